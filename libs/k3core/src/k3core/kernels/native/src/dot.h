/* Products of rows with rows, the core of every matrix product here.
 *
 * out[m][n] = sum_k x_m[k] w_n[k], both rows dense along k: the layout of weights as stored
 * and of cached rows, so nothing is packed. Each pair has one vector accumulator over
 * ascending k and one closing sum, whatever the tile around it: a pair's bits do not depend
 * on how many rows are multiplied with it.
 */
#ifndef K3_DOT_H
#define K3_DOT_H

#include "k3.h"

#define DOT_MAX_X 3
#define DOT_MAX_W 8
/* Columns and x rows of one pass: eight w rows of them fill half of the first-level cache. */
#define DOT_COLUMNS 512
#define DOT_BLOCK 144

#if defined(__AVX__) && defined(__FMA__) && defined(__x86_64__)
#define DOT_HAS_LOOP 1
/* The loop of the 3 x 4 tile, columns from..to in whole vectors. Compilers load a w row once
 * for each x row, fifteen loads to twelve sums where seven do, and loads are what is scarce. */
K3_INLINE void dot_loop(const float *const *x, const float *const *w, long from, long to,
                        v8f s[3][DOT_MAX_W]) {
  long k = from * (long)sizeof(float), end = to * (long)sizeof(float);
  __asm__ volatile(
      "vmovaps 0(%[s]), %%ymm0\n"
      "vmovaps 32(%[s]), %%ymm1\n"
      "vmovaps 64(%[s]), %%ymm2\n"
      "vmovaps 96(%[s]), %%ymm3\n"
      "vmovaps 256(%[s]), %%ymm4\n"
      "vmovaps 288(%[s]), %%ymm5\n"
      "vmovaps 320(%[s]), %%ymm6\n"
      "vmovaps 352(%[s]), %%ymm7\n"
      "vmovaps 512(%[s]), %%ymm8\n"
      "vmovaps 544(%[s]), %%ymm9\n"
      "vmovaps 576(%[s]), %%ymm10\n"
      "vmovaps 608(%[s]), %%ymm11\n"
      "jmp 2f\n"
      ".p2align 4\n"
      "1:\n"
      "vmovups (%[x0],%[k]), %%ymm12\n"
      "vmovups (%[x1],%[k]), %%ymm13\n"
      "vmovups (%[x2],%[k]), %%ymm14\n"
      "vmovups (%[w0],%[k]), %%ymm15\n"
      "vfmadd231ps %%ymm12, %%ymm15, %%ymm0\n"
      "vfmadd231ps %%ymm13, %%ymm15, %%ymm4\n"
      "vfmadd231ps %%ymm14, %%ymm15, %%ymm8\n"
      "vmovups (%[w1],%[k]), %%ymm15\n"
      "vfmadd231ps %%ymm12, %%ymm15, %%ymm1\n"
      "vfmadd231ps %%ymm13, %%ymm15, %%ymm5\n"
      "vfmadd231ps %%ymm14, %%ymm15, %%ymm9\n"
      "vmovups (%[w2],%[k]), %%ymm15\n"
      "vfmadd231ps %%ymm12, %%ymm15, %%ymm2\n"
      "vfmadd231ps %%ymm13, %%ymm15, %%ymm6\n"
      "vfmadd231ps %%ymm14, %%ymm15, %%ymm10\n"
      "vmovups (%[w3],%[k]), %%ymm15\n"
      "vfmadd231ps %%ymm12, %%ymm15, %%ymm3\n"
      "vfmadd231ps %%ymm13, %%ymm15, %%ymm7\n"
      "vfmadd231ps %%ymm14, %%ymm15, %%ymm11\n"
      "add $32, %[k]\n"
      "2:\n"
      "cmp %[end], %[k]\n"
      "jl 1b\n"
      "vmovaps %%ymm0, 0(%[s])\n"
      "vmovaps %%ymm1, 32(%[s])\n"
      "vmovaps %%ymm2, 64(%[s])\n"
      "vmovaps %%ymm3, 96(%[s])\n"
      "vmovaps %%ymm4, 256(%[s])\n"
      "vmovaps %%ymm5, 288(%[s])\n"
      "vmovaps %%ymm6, 320(%[s])\n"
      "vmovaps %%ymm7, 352(%[s])\n"
      "vmovaps %%ymm8, 512(%[s])\n"
      "vmovaps %%ymm9, 544(%[s])\n"
      "vmovaps %%ymm10, 576(%[s])\n"
      "vmovaps %%ymm11, 608(%[s])\n"
      : [k] "+r"(k)
      : [s] "r"(s), [x0] "r"(x[0]), [x1] "r"(x[1]), [x2] "r"(x[2]), [w0] "r"(w[0]),
        [w1] "r"(w[1]), [w2] "r"(w[2]), [w3] "r"(w[3]), [end] "r"(end)
      : "cc", "memory", "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8",
        "ymm9", "ymm10", "ymm11", "ymm12", "ymm13", "ymm14", "ymm15");
}
#endif

/* One tile over columns from..to; constant sizes unroll into registers (3 x 4 and 1 x 8 fill
 * sixteen). Sums start from `before` unless it is NULL; they go to `after`, one vector a pair
 * and DOT_MAX_W pairs an x row, or, if that is NULL, are closed into out. */
K3_INLINE void dot_tile(const int nx, const int nw, const float *const *x, const float *const *w,
                        long from, long to, const v8f *before, v8f *after, float *out,
                        long out_row) {
  v8f sum[DOT_MAX_X][DOT_MAX_W];
  for (int m = 0; m < nx; m++)
    for (int n = 0; n < nw; n++) sum[m][n] = before ? before[m * DOT_MAX_W + n] : v_zero();
  long k = from;
#ifdef DOT_HAS_LOOP
  if (nx == 3 && nw == 4) {
    k = from + (to - from) / LANES * LANES;
    dot_loop(x, w, from, k, sum);
  }
#endif
  for (; k + LANES <= to; k += LANES) {
    v8f left[DOT_MAX_X];
    for (int m = 0; m < nx; m++) left[m] = v_load(x[m] + k);
    for (int n = 0; n < nw; n++) {
      v8f right = v_load(w[n] + k);
      for (int m = 0; m < nx; m++) sum[m][n] = v_fma(left[m], right, sum[m][n]);
    }
  }
  if (after) {
    for (int m = 0; m < nx; m++)
      for (int n = 0; n < nw; n++) after[m * DOT_MAX_W + n] = sum[m][n];
    return;
  }
  if (k < to)
    for (int m = 0; m < nx; m++)
      for (int n = 0; n < nw; n++)
        sum[m][n] =
            v_fma(v_load_part(x[m] + k, to - k), v_load_part(w[n] + k, to - k), sum[m][n]);
  for (int m = 0; m < nx; m++) {
    int n = 0;
    for (; n + 4 <= nw; n += 4) v_sum4(out + m * out_row + n, sum[m] + n);
    for (; n < nw; n++) out[m * out_row + n] = v_sum(sum[m][n]);
  }
}

/* nx <= 3 x rows against nw <= 8 w rows. */
K3_INLINE void dot_strip(const int nx, int nw, const float *const *x, const float *const *w,
                         long from, long to, const v8f *before, v8f *after, float *out,
                         long out_row) {
  int n = 0;
  for (; n + 4 <= nw; n += 4)
    dot_tile(nx, 4, x, w + n, from, to, before ? before + n : NULL, after ? after + n : NULL,
             out + n, out_row);
  for (; n < nw; n++)
    dot_tile(nx, 1, x, w + n, from, to, before ? before + n : NULL, after ? after + n : NULL,
             out + n, out_row);
}

/* nx <= DOT_BLOCK x rows, columns in passes: sums wait in `waiting` between them. */
static inline void dot_block(long nx, int nw, const float *const *x, const float *const *w, long K,
                             float *out, long out_row) {
  v8f waiting[DOT_BLOCK * DOT_MAX_W];
  for (long from = 0; from < K || from == 0; from += DOT_COLUMNS) {
    long to = K - from > DOT_COLUMNS ? from + DOT_COLUMNS : K;
    for (long m = 0; m < nx;) {
      v8f *sums = waiting + m * DOT_MAX_W, *before = from ? sums : NULL;
      v8f *after = to < K ? sums : NULL;
      float *result = out + m * out_row;
      if (nx - m >= 3) {
        dot_strip(3, nw, x + m, w, from, to, before, after, result, out_row);
        m += 3;
      } else if (nx - m == 2) {
        dot_strip(2, nw, x + m, w, from, to, before, after, result, out_row);
        m += 2;
      } else {
        dot_strip(1, nw, x + m, w, from, to, before, after, result, out_row);
        m += 1;
      }
    }
  }
}

/* Any number of x rows against nw <= 8 w rows; out [nx, .] with rows out_row apart. */
static inline void dot_rows(long nx, int nw, const float *const *x, const float *const *w, long K,
                            float *out, long out_row) {
  if (nx == 1 && nw == DOT_MAX_W) {
    dot_tile(1, DOT_MAX_W, x, w, 0, K, NULL, NULL, out, out_row);
    return;
  }
  for (long m = 0; m < nx; m += DOT_BLOCK)
    dot_block(nx - m < DOT_BLOCK ? nx - m : DOT_BLOCK, nw, x + m, w, K, out + m * out_row, out_row);
}

/* out [rows, n] += p [rows, keys] * v [keys, n], keys ascending; rows <= 3. */
K3_INLINE void accumulate_rows(const int rows, const float *p, long p_row, const float *const *v,
                               long keys, float *out, long out_row, long n) {
  long c = 0;
  for (; c + 4 * LANES <= n; c += 4 * LANES) {
    v8f sum[DOT_MAX_X][4];
    for (int m = 0; m < rows; m++)
      for (int j = 0; j < 4; j++) sum[m][j] = v_load(out + m * out_row + c + j * LANES);
    for (long key = 0; key < keys; key++) {
      v8f weight[DOT_MAX_X];
      for (int m = 0; m < rows; m++) weight[m] = v_set(p[m * p_row + key]);
      for (int j = 0; j < 4; j++) {
        v8f value = v_load(v[key] + c + j * LANES);
        for (int m = 0; m < rows; m++) sum[m][j] = v_fma(weight[m], value, sum[m][j]);
      }
    }
    for (int m = 0; m < rows; m++)
      for (int j = 0; j < 4; j++) v_store(out + m * out_row + c + j * LANES, sum[m][j]);
  }
  for (; c < n; c += LANES) {
    long width = n - c < LANES ? n - c : LANES;
    for (int m = 0; m < rows; m++) {
      v8f sum = v_load_part(out + m * out_row + c, width);
      for (long key = 0; key < keys; key++) {
        v8f value = width == LANES ? v_load(v[key] + c) : v_load_part(v[key] + c, width);
        sum = v_fma(v_set(p[m * p_row + key]), value, sum);
      }
      v_store_part(out + m * out_row + c, sum, width);
    }
  }
}

#endif
