/* The gated activation of an MLP on vectors. Source: K3 architecture sheet, section 2.5. */
#ifndef K3_ACTIVATION_H
#define K3_ACTIVATION_H

#include "k3.h"

/* A bound <= 0 stands for none. */
typedef struct {
  float beta, linear_beta;
} activation;

/* x bounded by `bound` is bound * tanh(x / bound) = bound * e / (e + 2), e = e^(2 x / bound) - 1.
 * From 20 on tanh rounds to 1, and products of two such e are still far from overflowing. */
K3_INLINE v8f v_twice_expm1(v8f x, float bound) {
  return v_expm1(v_min(x * v_set(2.0f / bound), v_set(20.0f)));
}

K3_INLINE v8f v_activate(v8f gate, v8f up, activation a) {
  v8f above = v_set(1.0f), below = v_set(1.0f);
  /* One division for both bounds. */
  if (a.beta > 0) {
    v8f e = v_twice_expm1(gate, a.beta);
    above = v_set(a.beta) * e;
    below = e + v_set(2.0f);
  }
  if (a.linear_beta > 0) {
    v8f e = v_twice_expm1(up, a.linear_beta);
    above = above * (v_set(a.linear_beta) * e);
    below = below * (e + v_set(2.0f));
  }
  v8f product = above / below * v_sigmoid(gate);
  /* What knows no bound comes last: a large `up` must meet a gate that has closed. */
  if (!(a.beta > 0)) product = product * gate;
  return a.linear_beta > 0 ? product : product * up;
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
