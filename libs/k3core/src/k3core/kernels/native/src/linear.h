/* What a product of x [M, K] with a stored weight is given, in either layout of the weight. */
#ifndef K3_LINEAR_H
#define K3_LINEAR_H

#include <stdint.h>

typedef struct {
  const float *x;
  const void *w; /* [N, K] with rows w_row apart, or [panels, K, PANEL] */
  void *out;
  int64_t x_row, w_row, out_row, M, N, K;
  int32_t w_type, out_type;
} linear_args;

#endif
