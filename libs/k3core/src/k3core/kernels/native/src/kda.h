/* One head of Kimi Delta Attention over a short block of tokens.
 *
 * Shared by inference (kda.c) and training (kda_train.c). Per head and token, with the state
 * S [K, V], decay a = e^g and u = beta (v - S^T (a k)):
 *     o = S^T (a q) + (k q) u,    S <- a S + k u^T.
 * This is "decay, correct, write, read" with both reads of the new state moved to the old
 * one, so that a token reads S once; the write is left pending until the next token's sweep.
 * Every sum over K runs in ascending k, eight at a time: any split of a sequence into
 * chunks, decode steps included, gives the same bits.
 *
 * Source: KDA kernel notes, sections 0 and 3c; K3 architecture sheet, section 2.3.
 */
#ifndef K3_KDA_H
#define K3_KDA_H

#include "k3.h"

/* Tokens of a block: coefficients of one block stay in the first-level cache. */
#define KDA_BLOCK 16
/* Added to the sum of squares under the root of q's and k's norms. */
#define KDA_NORM_EPS 1e-6
/* Keys that are summed on their own before they join the whole: halves the rounding. */
#define KDA_PART 8
/* Vectors of V that one sweep carries: enough sums in flight to hide their latency, few
 * enough for sixteen registers. */
#define KDA_WIDE 4

/* Sizes, and sizes padded to whole vectors; padding is zero everywhere. */
typedef struct {
  long K, V, Kp, Vp;
} kda_dims;

/* A block ready for the recurrence. coef [1 + n, 4, Kp]: record 1 + t holds a, k, a*k and a*q
 * of token t; record 0 is the token that changes nothing, a = 1 and k = 0. v, o [n, Vp];
 * beta, kq [n]. */
typedef struct {
  float *coef, *v, *o, *beta, *kq;
} kda_block;

K3_INLINE kda_dims kda_make_dims(long K, long V) {
  return (kda_dims){K, V, round_up(K, LANES), round_up(V, LANES)};
}

K3_INLINE size_t kda_block_floats(kda_dims d) {
  return (size_t)((KDA_BLOCK + 1) * d.Kp * 4 + 2 * KDA_BLOCK * d.Vp + 2 * KDA_BLOCK) + 64;
}

K3_INLINE kda_block kda_carve_block(float *memory, kda_dims d) {
  kda_block block;
  block.v = memory;
  block.o = block.v + KDA_BLOCK * d.Vp;
  block.beta = block.o + KDA_BLOCK * d.Vp;
  block.kq = block.beta + KDA_BLOCK;
  block.coef = block.kq + KDA_BLOCK;
  for (long k = 0; k < d.Kp; k++) block.coef[k] = 1.0f, block.coef[d.Kp + k] = 0.0f;
  return block;
}

/* decay [Kp] = e^g of the raw gate. */
K3_INLINE void kda_decay(float *decay, const float *raw, const float *bias, float rate,
                         int bounded, float lower_bound, kda_dims d) {
  for (long k = 0; k < d.Kp; k += LANES) {
    v8f z = v_load(raw + k) + v_load(bias + k);
    v8f g = bounded ? v_set(lower_bound) * v_sigmoid(v_set(rate) * z)
                    : v_set(-rate) * v_softplus(z);
    v_store(decay + k, v_exp(g));
  }
}

/* sqrt(sum x^2 + eps) to be divided by, rounded once. */
K3_INLINE double kda_norm(const float *x, long Kp) {
  v8f sum = v_zero();
  for (long k = 0; k < Kp; k += LANES) sum = v_fma(v_load(x + k), v_load(x + k), sum);
  return sqrt((double)v_sum(sum) + KDA_NORM_EPS);
}

/* Fills token t's coefficients from its activated q, k [Kp], decay [Kp] and beta logit. */
K3_INLINE void kda_put_token(kda_block b, long t, const float *q, const float *k,
                             const float *decay, float beta_logit, kda_dims d) {
  float q_scale = (float)(1.0 / (kda_norm(q, d.Kp) * sqrt((double)d.K)));
  float k_scale = (float)(1.0 / kda_norm(k, d.Kp));
  float *record = b.coef + (t + 1) * 4 * d.Kp;
  v8f kq = v_zero();
  for (long i = 0; i < d.Kp; i += LANES) {
    v8f unit_k = v_load(k + i) * v_set(k_scale), unit_q = v_load(q + i) * v_set(q_scale);
    v8f a = v_load(decay + i);
    kq = v_fma(unit_k, unit_q, kq);
    v_store(record + i, a);
    v_store(record + d.Kp + i, unit_k);
    v_store(record + 2 * d.Kp + i, a * unit_k);
    v_store(record + 3 * d.Kp + i, a * unit_q);
  }
  b.kq[t] = v_sum(kq);
  b.beta[t] = 1.0f / (1.0f + expf(-beta_logit));
}

/* Runs n tokens over `width` vectors of V. S points at them in the [K, Vp] state. */
K3_INLINE void kda_run_tile(float *S, kda_block b, long n, long at, const int width,
                            kda_dims d) {
  v8f u[KDA_WIDE], seen[KDA_WIDE], read[KDA_WIDE], s[KDA_WIDE], sums[2 * KDA_WIDE];
  for (int j = 0; j < width; j++) u[j] = v_zero();
  for (long t = 0; t <= n; t++) {
    /* What token t - 1 wrote is added on the way; the last round does only that. */
    const float *old = b.coef + t * 4 * d.Kp, *now = old + 4 * d.Kp;
    float *row = S;
    if (t == n) {
      for (long k = 0; k < d.K; k++, row += d.Vp)
        for (int j = 0; j < width; j++)
          v_store(row + j * LANES, v_fma(v_set(old[d.Kp + k]), u[j],
                                         v_set(old[k]) * v_load(row + j * LANES)));
      return;
    }
    for (int j = 0; j < width; j++) sums[2 * j] = sums[2 * j + 1] = v_zero();
    for (long part = 0; part < d.K; part += KDA_PART) {
      long end = part + KDA_PART < d.K ? part + KDA_PART : d.K;
      for (int j = 0; j < width; j++) seen[j] = read[j] = v_zero();
      for (long k = part; k < end; k++, row += d.Vp) {
        v8f decay = v_set(old[k]), key = v_set(old[d.Kp + k]);
        for (int j = 0; j < width; j++) {
          s[j] = v_fma(key, u[j], decay * v_load(row + j * LANES));
          v_store(row + j * LANES, s[j]);
        }
        v8f next_key = v_set(now[2 * d.Kp + k]), query = v_set(now[3 * d.Kp + k]);
        for (int j = 0; j < width; j++) {
          seen[j] = v_fma(next_key, s[j], seen[j]);
          read[j] = v_fma(query, s[j], read[j]);
        }
      }
      for (int j = 0; j < width; j++) {
        sums[2 * j] = sums[2 * j] + seen[j];
        sums[2 * j + 1] = sums[2 * j + 1] + read[j];
      }
    }
    for (int j = 0; j < width; j++) seen[j] = sums[2 * j], read[j] = sums[2 * j + 1];
    for (int j = 0; j < width; j++) {
      u[j] = v_set(b.beta[t]) * (v_load(b.v + t * d.Vp + at + j * LANES) - seen[j]);
      v_store(b.o + t * d.Vp + at + j * LANES, v_fma(v_set(b.kq[t]), u[j], read[j]));
    }
  }
}

/* Runs n tokens over the whole state [K, Vp]; nothing is pending afterwards. */
K3_INLINE void kda_run_block(float *S, kda_block b, long n, kda_dims d) {
  long at = 0;
  for (; at + KDA_WIDE * LANES <= d.Vp; at += KDA_WIDE * LANES)
    kda_run_tile(S + at, b, n, at, KDA_WIDE, d);
  for (; at < d.Vp; at += LANES) kda_run_tile(S + at, b, n, at, 1, d);
}

/* [V, K] memory to the [K, Vp] working state. */
K3_INLINE void kda_load_state(float *S, const float *from, kda_dims d) {
  long whole_v = d.V / LANES * LANES, whole_k = d.K / LANES * LANES;
  v8f block[LANES];
  for (long v = 0; v < whole_v; v += LANES)
    for (long k = 0; k < whole_k; k += LANES) {
      for (int i = 0; i < LANES; i++) block[i] = v_load(from + (v + i) * d.K + k);
      v_transpose8(block);
      for (int i = 0; i < LANES; i++) v_store(S + (k + i) * d.Vp + v, block[i]);
    }
  for (long k = 0; k < d.K; k++) {
    for (long v = k < whole_k ? whole_v : 0; v < d.V; v++) S[k * d.Vp + v] = from[v * d.K + k];
    for (long v = d.V; v < d.Vp; v++) S[k * d.Vp + v] = 0.0f;
  }
}

K3_INLINE void kda_store_state(float *to, const float *S, kda_dims d) {
  long whole_v = d.V / LANES * LANES, whole_k = d.K / LANES * LANES;
  v8f block[LANES];
  for (long v = 0; v < whole_v; v += LANES)
    for (long k = 0; k < whole_k; k += LANES) {
      for (int i = 0; i < LANES; i++) block[i] = v_load(S + (k + i) * d.Vp + v);
      v_transpose8(block);
      for (int i = 0; i < LANES; i++) v_store(to + (v + i) * d.K + k, block[i]);
    }
  for (long v = 0; v < d.V; v++)
    for (long k = v < whole_v ? whole_k : 0; k < d.K; k++) to[v * d.K + k] = S[k * d.Vp + v];
}

#endif
