/* Words that every native kernel shares: vectors, element types, exponentials.
 *
 * Vectors are the compiler's own (gcc and clang), eight float lanes; on a machine without
 * AVX the compiler splits them, so the same source is right on any machine. Nothing here is
 * compiled with -ffast-math: every sum has one order, written out, and so a row's result does
 * not depend on the other rows of a call or on the number of threads.
 */
#ifndef K3_H
#define K3_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

#define K3_API __attribute__((visibility("default")))
#define K3_INLINE static inline __attribute__((always_inline))
#define LANES 8

typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef float v8f_any __attribute__((vector_size(32), aligned(4), may_alias));

/* Element types of tensors that may be float32 or bfloat16. */
enum { K3_F32 = 0, K3_BF16 = 1 };

K3_INLINE v8f v_load(const float *p) { return *(const v8f_any *)p; }
K3_INLINE void v_store(float *p, v8f x) { *(v8f_any *)p = x; }
K3_INLINE v8f v_set(float x) { return (v8f){x, x, x, x, x, x, x, x}; }
K3_INLINE v8f v_zero(void) { return v_set(0.0f); }

/* a * b + c. Contraction is off, so fusing happens here and nowhere else: two functions that
 * do the same steps round alike, whatever the compiler thinks of either. */
K3_INLINE v8f v_fma(v8f a, v8f b, v8f c) {
#ifdef __FMA__
  return (v8f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

/* Lane-wise choice; a lane of `mask` is all ones or all zeros. */
K3_INLINE v8f v_pick(v8i mask, v8f yes, v8f no) {
#ifdef __AVX__
  return (v8f)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
  return (v8f)((mask & (v8i)yes) | (~mask & (v8i)no));
#endif
}

/* A NaN in `a` stays one. */
K3_INLINE v8f v_max(v8f a, v8f b) {
#ifdef __AVX__
  return (v8f)_mm256_max_ps((__m256)b, (__m256)a);
#else
  return v_pick((v8i)(b > a), b, a);
#endif
}

K3_INLINE v8f v_min(v8f a, v8f b) {
#ifdef __AVX__
  return (v8f)_mm256_min_ps((__m256)b, (__m256)a);
#else
  return v_pick((v8i)(b < a), b, a);
#endif
}

/* The first `n` < 8 elements, zeros behind them. */
K3_INLINE v8f v_load_part(const float *p, long n) {
  float lanes[LANES] = {0};
  for (long i = 0; i < n; i++) lanes[i] = p[i];
  return v_load(lanes);
}

K3_INLINE void v_store_part(float *p, v8f x, long n) {
  float lanes[LANES];
  v_store(lanes, x);
  for (long i = 0; i < n; i++) p[i] = lanes[i];
}

/* Sum of the lanes, always as ((0+4)+(2+6)) + ((1+5)+(3+7)). */
K3_INLINE float v_sum(v8f x) {
#ifdef __AVX__
  __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
#else
  float a0 = x[0] + x[4], a1 = x[1] + x[5], a2 = x[2] + x[6], a3 = x[3] + x[7];
  return (a0 + a2) + (a1 + a3);
#endif
}

/* The sums of four vectors, each as v_sum would add it. */
K3_INLINE void v_sum4(float *to, const v8f x[4]) {
#ifdef __AVX__
  __m128 half[4];
  for (int i = 0; i < 4; i++)
    half[i] = _mm_add_ps(_mm256_castps256_ps128((__m256)x[i]),
                         _mm256_extractf128_ps((__m256)x[i], 1));
  __m128 first = _mm_add_ps(_mm_movelh_ps(half[0], half[1]), _mm_movehl_ps(half[1], half[0]));
  __m128 last = _mm_add_ps(_mm_movelh_ps(half[2], half[3]), _mm_movehl_ps(half[3], half[2]));
  _mm_storeu_ps(to, _mm_add_ps(_mm_shuffle_ps(first, last, 0x88),
                               _mm_shuffle_ps(first, last, 0xdd)));
#else
  for (int i = 0; i < 4; i++) to[i] = v_sum(x[i]);
#endif
}

K3_INLINE float v_largest(v8f x) {
  float best = x[0];
  for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
  return best;
}

K3_INLINE float bf16_to_f32(uint16_t bits) {
  union { uint32_t u; float f; } word = {(uint32_t)bits << 16};
  return word.f;
}

/* Round to nearest, ties to even; a NaN stays one. */
K3_INLINE uint16_t f32_to_bf16(float value) {
  union { float f; uint32_t u; } word = {value};
  if (value != value) return 0x7fc0;
  return (uint16_t)((word.u + 0x7fffu + ((word.u >> 16) & 1u)) >> 16);
}

/* For short rows, where a call of memcpy costs more than the copy. */
K3_INLINE void copy_floats(float *to, const float *from, long n) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) v_store(to + i, v_load(from + i));
  for (; i < n; i++) to[i] = from[i];
}

/* Copies `n` elements at element offset `at` of a tensor of either type to floats. */
K3_INLINE void load_row(float *to, const void *from, long at, int type, long n) {
  if (type == K3_F32) {
    copy_floats(to, (const float *)from + at, n);
    return;
  }
  const uint16_t *bits = (const uint16_t *)from + at;
  for (long i = 0; i < n; i++) to[i] = bf16_to_f32(bits[i]);
}

K3_INLINE void store_row(void *to, long at, int type, const float *from, long n) {
  if (type == K3_F32) {
    copy_floats((float *)to + at, from, n);
    return;
  }
  uint16_t *bits = (uint16_t *)to + at;
  for (long i = 0; i < n; i++) bits[i] = f32_to_bf16(from[i]);
}

K3_INLINE size_t type_size(int type) { return type == K3_F32 ? 4 : 2; }

/* Scratch of one thread: `n` floats on a cache line; the caller frees it. */
K3_INLINE float *scratch_floats(size_t n) {
  size_t bytes = ((n + 16) * sizeof(float) + 63) / 64 * 64;
  return (float *)aligned_alloc(64, bytes);
}

K3_INLINE long round_up(long n, long to) { return (n + to - 1) / to * to; }

/* Transposes an 8 x 8 block held in registers. */
K3_INLINE void v_transpose8(v8f rows[LANES]) {
#ifdef __AVX2__
  __m256 pairs[LANES], quads[LANES];
  for (int i = 0; i < LANES; i += 2) {
    pairs[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = (v8f)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    rows[i + 4] = (v8f)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
#else
  float block[LANES][LANES];
  for (int i = 0; i < LANES; i++) v_store(block[i], rows[i]);
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) rows[i][j] = block[j][i];
#endif
}

/* e^x as *power * (1 + what is returned), *power a power of two; for -87.4 < x < 89.
 * Source: Cephes expf, coefficients of the minimax polynomial on |r| <= ln(2) / 2. */
K3_INLINE v8f v_exp_parts(v8f x, v8f *power) {
  const v8f magic = v_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
  v8f shifted = v_fma(x, v_set(1.44269504088896341f), magic);
  v8f n = shifted - magic;
  v8f r = v_fma(n, v_set(-0.693359375f), x);
  r = v_fma(n, v_set(2.12194440e-4f), r);
  v8f p = v_set(1.9875691500e-4f);
  p = v_fma(p, r, v_set(1.3981999507e-3f));
  p = v_fma(p, r, v_set(8.3334519073e-3f));
  p = v_fma(p, r, v_set(4.1665795894e-2f));
  p = v_fma(p, r, v_set(1.6666665459e-1f));
  p = v_fma(p, r, v_set(5.0000001201e-1f));
  *power = (v8f)(((v8i)shifted - (v8i)magic + 127) << 23);
  return v_fma(p, r * r, r);
}

/* e^x to about one unit in the last place; 0 below -87.3, infinite above 88.4. */
K3_INLINE v8f v_exp(v8f x) {
  v8i vanishes = (v8i)(x < v_set(-87.33654f));
  v8f power, p = v_exp_parts(v_min(v_max(x, v_set(-87.33654f)), v_set(89.0f)), &power);
  return (v8f)(~vanishes & (v8i)((p + v_set(1.0f)) * power));
}

/* e^x - 1 to a few units in the last place, near 0 too, where e^x - 1 would cancel; for x < 88. */
K3_INLINE v8f v_expm1(v8f x) {
  v8f power, p = v_exp_parts(v_max(x, v_set(-87.0f)), &power);
  return v_fma(power, p, power - v_set(1.0f));
}

K3_INLINE v8f v_sigmoid(v8f x) { return v_set(1.0f) / (v_set(1.0f) + v_exp(-x)); }

/* ln(x) for normal x > 0. Source: Cephes logf. */
K3_INLINE v8f v_log(v8f x) {
  v8i bits = (v8i)x;
  v8i n = ((bits >> 23) & 255) - 126;
  v8f m = (v8f)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
  v8i small = (v8i)(m < v_set(0.707106781186547524f));
  n = n + small; /* a true lane is -1 */
  v8f r = v_pick(small, m + m, m) - v_set(1.0f);
  v8f z = r * r;
  v8f p = v_set(7.0376836292e-2f);
  p = v_fma(p, r, v_set(-1.1514610310e-1f));
  p = v_fma(p, r, v_set(1.1676998740e-1f));
  p = v_fma(p, r, v_set(-1.2420140846e-1f));
  p = v_fma(p, r, v_set(1.4249322787e-1f));
  p = v_fma(p, r, v_set(-1.6668057665e-1f));
  p = v_fma(p, r, v_set(2.0000714765e-1f));
  p = v_fma(p, r, v_set(-2.4999993993e-1f));
  p = v_fma(p, r, v_set(3.3333331174e-1f));
  v8f y = p * z * r;
  v8f e = __builtin_convertvector(n, v8f);
  y = y + e * v_set(-2.12194440e-4f) - v_set(0.5f) * z;
  return r + y + e * v_set(0.693359375f);
}

/* ln(1 + e^x), stable on both sides. */
K3_INLINE v8f v_softplus(v8f x) {
  v8f y = v_exp(-v_max(x, -x));
  v8f u = v_set(1.0f) + y;
  /* What rounding 1 + y lost is put back to first order. */
  v8f log1p = v_log(u) + (y - (u - v_set(1.0f))) / u;
  return v_max(x, v_zero()) + log1p;
}

#endif
