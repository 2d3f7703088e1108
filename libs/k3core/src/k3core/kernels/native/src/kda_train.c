/* The recurrence of Kimi Delta Attention with its gradients, for training.
 *
 * Enters q (scaled), k, decay a = e^g, v and beta of whole sequences from zero states; leaves
 * o, and in the backward pass the gradients of all five. The forward pass keeps the state at
 * every 32nd token; the backward pass recomputes the states between from there, newest stretch
 * first, so memory grows with T / 32 and not with T.
 *
 * With S' = a S the decayed state, r = v - S'^T k, u = beta r, S+ = S' + k u^T, o = S+^T q and
 * D the gradient of S+ (as left by the later tokens, plus q do^T):
 *     dq = S+ do,  du = D^T k,  dbeta = du . r,  dr = beta du = dv,
 *     dS' = D - k dr^T,  dk = D u - S' dr,  da = rowsum(dS' * S),  dS = a dS'.
 *
 * One task is one head of one sequence. States here are [K, Vp], lanes along V.
 */
#include "k3.h"

/* Tokens between kept states. */
#define STRETCH 32

typedef struct {
  /* q, k, decay [B, T, H, K]; v [B, T, H, V]; beta [B, T, H]; float32, dense. */
  const float *q, *k, *decay, *v, *beta;
  /* o [B, T, H, V]; kept [B, H, ceil(T / 32), K, V]: the state before tokens 0, 32, ... */
  float *o, *kept;
  /* Backward only: gradient of o in, the others out, shaped like what they belong to. */
  const float *d_o;
  float *d_q, *d_k, *d_decay, *d_v, *d_beta;
  int64_t B, T, H, K, V;
} kda_train_args;

/* Offset of token t's keys; values and betas follow the same pattern. */
static long token(const kda_train_args *a, long b, long t, long h) {
  return (b * a->T + t) * a->H + h;
}

/* r [Vp] of the token and the new state, from the old one; u = beta r. o may be NULL. */
static void step(const kda_train_args *a, long at, const float *S, float *next, float *r, float *o,
                 const float *v, long Vp) {
  const float *q = a->q + at * a->K, *k = a->k + at * a->K, *decay = a->decay + at * a->K;
  for (long c = 0; c < Vp; c += LANES) {
    v8f seen = v_zero(), read = v_zero();
    for (long i = 0; i < a->K; i++)
      seen = v_fma(v_set(k[i]), v_set(decay[i]) * v_load(S + i * Vp + c), seen);
    v8f missing = v_load(v + c) - seen, u = v_set(a->beta[at]) * missing;
    for (long i = 0; i < a->K; i++) {
      v8f s = v_fma(v_set(k[i]), u, v_set(decay[i]) * v_load(S + i * Vp + c));
      v_store(next + i * Vp + c, s);
      read = v_fma(v_set(q[i]), s, read);
    }
    v_store(r + c, missing);
    if (o) v_store(o + c, read);
  }
}

/* [n] floats into a row padded with zeros to Vp. */
static void pad_row(float *to, const float *from, long n, long Vp) {
  memcpy(to, from, (size_t)n * sizeof(float));
  memset(to + n, 0, (size_t)(Vp - n) * sizeof(float));
}

static float *kept_state(const kda_train_args *a, long b, long h, long t) {
  long stretches = (a->T + STRETCH - 1) / STRETCH;
  return a->kept + ((b * a->H + h) * stretches + t / STRETCH) * a->K * a->V;
}

static void forward_head(const kda_train_args *a, long b, long h, float *S, float *rows, long Vp) {
  float *v = rows, *r = rows + Vp, *o = rows + 2 * Vp;
  memset(S, 0, (size_t)(a->K * Vp) * sizeof(float));
  for (long t = 0; t < a->T; t++) {
    long at = token(a, b, t, h);
    if (t % STRETCH == 0)
      for (long i = 0; i < a->K; i++)
        memcpy(kept_state(a, b, h, t) + i * a->V, S + i * Vp, (size_t)a->V * sizeof(float));
    pad_row(v, a->v + at * a->V, a->V, Vp);
    step(a, at, S, S, r, o, v, Vp);
    memcpy(a->o + at * a->V, o, (size_t)a->V * sizeof(float));
  }
}

static void forward_task(const void *context, long task, float *S) {
  const kda_train_args *a = context;
  long Vp = round_up(a->V, LANES);
  forward_head(a, task / a->H, task % a->H, S, S + a->K * Vp, Vp);
}

K3_API int k3_kda_train_forward(const kda_train_args *a) {
  long Vp = round_up(a->V, LANES);
  return k3_run(a->B * a->H, 0, (size_t)(a->K * Vp + 3 * Vp), forward_task, a);
}

/* Scratch of a backward task: the gradient D [K, Vp] of the running state, the states
 * [STRETCH + 1, K, Vp] and r [STRETCH, Vp] of one stretch, and four rows [Vp]. */
typedef struct {
  float *D, *states, *r, *d_o, *v, *d_u, *d_r;
} backward_scratch;

static size_t backward_floats(const kda_train_args *a, long Vp) {
  return (size_t)((STRETCH + 2) * a->K * Vp + (STRETCH + 4) * Vp);
}

static backward_scratch carve(float *memory, const kda_train_args *a, long Vp) {
  backward_scratch s;
  s.D = memory;
  s.states = s.D + a->K * Vp;
  s.r = s.states + (STRETCH + 1) * a->K * Vp;
  s.d_o = s.r + STRETCH * Vp;
  s.v = s.d_o + Vp;
  s.d_u = s.v + Vp;
  s.d_r = s.d_u + Vp;
  return s;
}

/* Gradients of one token; D enters as the gradient of the state after it, leaves as that of
 * the state before it. `old` is the state before, `new` the one after. */
static void step_back(const kda_train_args *a, long at, const float *old, const float *new,
                      const float *r, backward_scratch s, long Vp) {
  const float *q = a->q + at * a->K, *k = a->k + at * a->K, *decay = a->decay + at * a->K;
  v8f beta = v_set(a->beta[at]), d_beta = v_zero();
  memset(s.d_u, 0, (size_t)Vp * sizeof(float));
  for (long i = 0; i < a->K; i++) {
    v8f d_q = v_zero();
    for (long c = 0; c < Vp; c += LANES) {
      v8f d = v_fma(v_set(q[i]), v_load(s.d_o + c), v_load(s.D + i * Vp + c));
      v_store(s.D + i * Vp + c, d);
      d_q = v_fma(v_load(new + i * Vp + c), v_load(s.d_o + c), d_q);
      v_store(s.d_u + c, v_fma(v_set(k[i]), d, v_load(s.d_u + c)));
    }
    a->d_q[at * a->K + i] = v_sum(d_q);
  }
  for (long c = 0; c < Vp; c += LANES) {
    d_beta = v_fma(v_load(s.d_u + c), v_load(r + c), d_beta);
    v_store(s.d_r + c, beta * v_load(s.d_u + c));
  }
  a->d_beta[at] = v_sum(d_beta);
  memcpy(a->d_v + at * a->V, s.d_r, (size_t)a->V * sizeof(float));
  for (long i = 0; i < a->K; i++) {
    v8f d_k = v_zero(), d_decay = v_zero();
    for (long c = 0; c < Vp; c += LANES) {
      v8f d = v_load(s.D + i * Vp + c), d_r = v_load(s.d_r + c), S = v_load(old + i * Vp + c);
      d_k = v_fma(d, beta * v_load(r + c), d_k);
      d_k = v_fma(v_set(-decay[i]) * S, d_r, d_k);
      d = v_fma(v_set(-k[i]), d_r, d);
      d_decay = v_fma(d, S, d_decay);
      v_store(s.D + i * Vp + c, v_set(decay[i]) * d);
    }
    a->d_k[at * a->K + i] = v_sum(d_k);
    a->d_decay[at * a->K + i] = v_sum(d_decay);
  }
}

static void backward_head(const kda_train_args *a, long b, long h, backward_scratch s, long Vp) {
  long size = a->K * Vp;
  memset(s.D, 0, (size_t)size * sizeof(float));
  for (long first = (a->T - 1) / STRETCH * STRETCH; first >= 0; first -= STRETCH) {
    long n = a->T - first < STRETCH ? a->T - first : STRETCH;
    for (long i = 0; i < a->K; i++)
      pad_row(s.states + i * Vp, kept_state(a, b, h, first) + i * a->V, a->V, Vp);
    for (long t = 0; t < n; t++) {
      long at = token(a, b, first + t, h);
      pad_row(s.v, a->v + at * a->V, a->V, Vp);
      step(a, at, s.states + t * size, s.states + (t + 1) * size, s.r + t * Vp, NULL, s.v, Vp);
    }
    for (long t = n - 1; t >= 0; t--) {
      long at = token(a, b, first + t, h);
      pad_row(s.d_o, a->d_o + at * a->V, a->V, Vp);
      step_back(a, at, s.states + t * size, s.states + (t + 1) * size, s.r + t * Vp, s, Vp);
    }
  }
}

static void backward_task(const void *context, long task, float *memory) {
  const kda_train_args *a = context;
  long Vp = round_up(a->V, LANES);
  backward_head(a, task / a->H, task % a->H, carve(memory, a, Vp), Vp);
}

K3_API int k3_kda_train_backward(const kda_train_args *a) {
  long Vp = round_up(a->V, LANES);
  return k3_run(a->B * a->H, 0, backward_floats(a, Vp), backward_task, a);
}
