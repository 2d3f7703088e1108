/* The gated activation of an MLP on vectors. Source: K3 architecture sheet, section 2.5. */
#ifndef K3_ACTIVATION_H
#define K3_ACTIVATION_H

#include "k3.h"

/* A bound <= 0 stands for none. */
typedef struct {
  float beta, linear_beta;
} activation;

K3_INLINE v8f v_activate(v8f gate, v8f up, activation a) {
  v8f bounded = gate;
  if (a.beta > 0) bounded = v_set(a.beta) * v_tanh(gate / v_set(a.beta));
  if (a.linear_beta > 0) up = v_set(a.linear_beta) * v_tanh(up / v_set(a.linear_beta));
  return bounded * v_sigmoid(gate) * up;
}

/* to [n] = activate(gate [n], up [n]); all float rows, `to` may be `gate`. */
K3_INLINE void activate_row(float *to, const float *gate, const float *up, long n, activation a) {
  long i = 0;
  for (; i + LANES <= n; i += LANES)
    v_store(to + i, v_activate(v_load(gate + i), v_load(up + i), a));
  if (i < n)
    v_store_part(to + i,
                 v_activate(v_load_part(gate + i, n - i), v_load_part(up + i, n - i), a), n - i);
}

#endif
