/* x [M, K] times a weight [N, K] transposed, the weight laid in panels beforehand (panel.h),
 * zeros behind its last row. */
#include "linear.h"
#include "panel.h"

#define PANELS_PER_TASK 8

/* A task's rows low..high against its panels; out rows are `out_row` floats apart. */
static void run_passes(const linear_args *a, long low, long high, long panel, long count,
                       const float **x, float *wide, float *out, long out_row) {
  for (long m = low; m < high; m++) x[m - low] = a->x + m * a->x_row;
  for (long from = 0; from < a->K || from == 0;) {
    long n = pass_columns(high - low, a->K, from), at = (panel * a->K + from) * PANEL;
    panel_pass p = {(const float *)a->w + at, a->K * PANEL, count, from, n, panel_chain(a->K)};
    if (a->w_type != K3_F32) {
      for (long i = 0; i < count; i++)
        load_row(wide + i * n * PANEL, a->w, at + i * a->K * PANEL, a->w_type, n * PANEL);
      p.w = wide;
      p.apart = n * PANEL;
    }
    panel_rows(high - low, x, &p, out, out_row);
    from += n > 0 ? n : 1;
  }
}

static void run_task(const void *context, long task, float *scratch) {
  const linear_args *a = context;
  long panels = (a->N + PANEL - 1) / PANEL;
  long chunks = (panels + PANELS_PER_TASK - 1) / PANELS_PER_TASK;
  long low = task / chunks * PANEL_BLOCK, panel = task % chunks * PANELS_PER_TASK;
  long high = low + PANEL_BLOCK < a->M ? low + PANEL_BLOCK : a->M;
  long count = panels - panel < PANELS_PER_TASK ? panels - panel : PANELS_PER_TASK;
  long n = panel * PANEL, width = a->N - n < count * PANEL ? a->N - n : count * PANEL;
  const float **x = (const float **)scratch;
  float *sums = scratch + 2 * PANEL_BLOCK, *wide = sums + PANEL_BLOCK * PANELS_PER_TASK * PANEL;
  /* Whole panels of floats are summed where they are wanted. */
  if (a->out_type == K3_F32 && width == count * PANEL) {
    float *out = (float *)a->out + low * a->out_row + n;
    run_passes(a, low, high, panel, count, x, wide, out, a->out_row);
    return;
  }
  long row = PANELS_PER_TASK * PANEL;
  run_passes(a, low, high, panel, count, x, wide, sums, row);
  for (long m = low; m < high; m++)
    store_row(a->out, m * a->out_row + n, a->out_type, sums + (m - low) * row, width);
}

K3_API int k3_linear_panels(const linear_args *a) {
  long blocks = (a->M + PANEL_BLOCK - 1) / PANEL_BLOCK;
  long panels = (a->N + PANEL - 1) / PANEL;
  long chunks = (panels + PANELS_PER_TASK - 1) / PANELS_PER_TASK;
  /* Pointers to x rows, two floats each; sums; panels widened. */
  size_t scratch = 2 * PANEL_BLOCK + PANELS_PER_TASK * PANEL * (PANEL_BLOCK + PANEL_COLUMNS);
  return k3_run(blocks * chunks, a->M * a->N * a->K < 131072, scratch, run_task, a);
}
