/* x [M, K] times w [N, K] transposed, in float32 whatever the weights are stored in.
 *
 * For one row and for a thousand the sums are the same (dot.h), so a decode row has the bits
 * it has in any batch. Weight rows are widened tile by tile into the first-level cache.
 */
#include "dot.h"
#include "linear.h"

/* Weight rows of one task; a multiple of the tile of 8. */
#define ROWS_PER_TASK 32
/* From so many x rows on it pays to copy float weight rows too: their distance in memory is
 * mostly a power of two, and then they push each other out of the first-level cache. */
#define COPY_FROM_ROWS 12

/* Floats between weight rows in scratch: never a power of two. */
static long wide_stride(long K) { return round_up(K, 16) + 16; }

/* Weight rows [first, last) against x rows [low, high). `wide` holds 8 rows of floats. */
static void multiply(const linear_args *a, long low, long high, long first, long last, float *wide,
                     const float **x, float *result) {
  const float *w[DOT_MAX_W];
  long stride = wide_stride(a->K);
  for (long m = low; m < high; m++) x[m - low] = a->x + m * a->x_row;
  for (long n = first; n < last; n += DOT_MAX_W) {
    int width = last - n < DOT_MAX_W ? (int)(last - n) : DOT_MAX_W;
    for (int i = 0; i < width; i++) {
      if (a->w_type == K3_F32 && high - low < COPY_FROM_ROWS) {
        w[i] = (const float *)a->w + (n + i) * a->w_row;
      } else {
        load_row(wide + i * stride, a->w, (n + i) * a->w_row, a->w_type, a->K);
        w[i] = wide + i * stride;
      }
    }
    dot_rows(high - low, width, x, w, a->K, result, DOT_MAX_W);
    for (long m = low; m < high; m++)
      store_row(a->out, m * a->out_row + n, a->out_type, result + (m - low) * DOT_MAX_W, width);
  }
}

static void run_task(const void *context, long task, float *scratch) {
  const linear_args *a = context;
  long block = DOT_BLOCK, chunks = (a->N + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
  long low = task / chunks * block, first = task % chunks * ROWS_PER_TASK;
  long high = low + block < a->M ? low + block : a->M;
  long last = first + ROWS_PER_TASK < a->N ? first + ROWS_PER_TASK : a->N;
  float *result = scratch + 2 * block;
  multiply(a, low, high, first, last, result + block * DOT_MAX_W, (const float **)scratch, result);
}

K3_API int k3_linear(const linear_args *a) {
  long block = DOT_BLOCK, blocks = (a->M + block - 1) / block;
  long chunks = (a->N + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
  /* Pointers to x rows lie in front, two floats each. */
  size_t scratch = (size_t)(2 * block + block * DOT_MAX_W + DOT_MAX_W * wide_stride(a->K));
  return k3_run(blocks * chunks, a->M * a->N * a->K < 131072, scratch, run_task, a);
}
