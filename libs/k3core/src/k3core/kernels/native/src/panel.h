/* Products of rows with panels: element k of sixteen weight rows lies side by side, then element
 * k + 1 of them, so that lanes are outputs and no sum has to be closed.
 *
 * An output is the sum of chains, each over so many columns, added in ascending order; which tile
 * it falls into changes nothing. So for one row and for a thousand the bits are the same. They are
 * not those of dot.h, which adds eight lanes.
 */
#ifndef K3_PANEL_H
#define K3_PANEL_H

#include "k3.h"

#define PANEL 16
#define HALVES (PANEL / LANES)
/* Columns of one pass: a panel's part of them fills half of the first-level cache. Where rows are
 * few, all panels of a task together do, for then every panel is brought anew for each tile. */
#define PANEL_COLUMNS 256
#define FEW_ROWS_COLUMNS 64
/* x rows taken together, which stay in the second-level cache; a multiple of the tallest tile. */
#define PANEL_BLOCK 144
/* A tile's height times its panels times HALVES: sums that stay in registers. */
#define TALLEST 6
#define WIDEST 4

/* Columns that one chain of sums takes before it is added to those before it: short enough that
 * rounding errors stay those of eight lanes, and as long as that allows, for adding takes time. */
static inline long panel_chain(long K) { return K <= 64 ? 4 : K <= 128 ? 16 : 64; }

/* Columns from `from` on of the product: `count` panels, `apart` floats from each other, n columns
 * of each. Passes follow each other from column 0 on; n is a multiple of `chain` in all but the
 * last. */
typedef struct {
  const float *w;
  long apart, count, from, n, chain;
} panel_pass;

static inline long pass_columns(long rows, long K, long from) {
  long most = rows < TALLEST ? FEW_ROWS_COLUMNS : PANEL_COLUMNS;
  return K - from < most ? K - from : most;
}

/* `height` rows against `width` panels from `panel` on; sums go to out, and are added to what is
 * there unless the pass is the first. */
K3_INLINE void panel_tile(const int height, const int width, const float *const *rows,
                          const panel_pass *p, long panel, float *out, long out_row) {
  const float *x[TALLEST], *w = p->w + panel * p->apart;
  for (int r = 0; r < height; r++) x[r] = rows[r] + p->from;
  for (long from = 0; from < p->n || from == 0; from += p->chain) {
    long to = p->n - from > p->chain ? from + p->chain : p->n;
    v8f sum[TALLEST][WIDEST * HALVES];
    for (int r = 0; r < height; r++)
      for (int j = 0; j < width * HALVES; j++) sum[r][j] = v_zero();
    for (long k = from; k < to; k++)
      for (int i = 0; i < width; i++) {
        const float *at = w + i * p->apart + k * PANEL;
        v8f left = v_load(at), right = v_load(at + LANES);
        for (int r = 0; r < height; r++) {
          v8f value = v_set(x[r][k]);
          sum[r][i * HALVES] = v_fma(value, left, sum[r][i * HALVES]);
          sum[r][i * HALVES + 1] = v_fma(value, right, sum[r][i * HALVES + 1]);
        }
      }
    int is_first = p->from == 0 && from == 0;
    for (int r = 0; r < height; r++)
      for (int j = 0; j < width * HALVES; j++) {
        float *place = out + r * out_row + j * LANES;
        v_store(place, is_first ? sum[r][j] : v_load(place) + sum[r][j]);
      }
  }
}

/* `height` rows, fewer than the tallest tile has, against `width` panels at a time. */
K3_INLINE void panel_rest(const int height, const int width, const float *const *rows,
                          const panel_pass *p, float *out, long out_row) {
  long i = 0;
  for (; i + width <= p->count; i += width)
    panel_tile(height, width, rows, p, i, out + i * PANEL, out_row);
  for (; width > 1 && i < p->count; i++)
    panel_tile(height, 1, rows, p, i, out + i * PANEL, out_row);
}

/* out [count, panels * PANEL] (+)= rows * panels: tall tiles panel by panel, then the rest. */
static inline void panel_rows(long count, const float *const *rows, const panel_pass *p, float *out,
                              long out_row) {
  long whole = count / TALLEST * TALLEST;
  for (long i = 0; i < p->count; i++)
    for (long m = 0; m < whole; m += TALLEST)
      panel_tile(TALLEST, 1, rows + m, p, i, out + m * out_row + i * PANEL, out_row);
  rows += whole;
  out += whole * out_row;
  switch (count - whole) {
    case 1: panel_rest(1, 4, rows, p, out, out_row); break;
    case 2: panel_rest(2, 2, rows, p, out, out_row); break;
    case 3: panel_rest(3, 1, rows, p, out, out_row); break;
    case 4: panel_rest(4, 1, rows, p, out, out_row); break;
    case 5: panel_rest(5, 1, rows, p, out, out_row); break;
    default: break;
  }
}

#endif
