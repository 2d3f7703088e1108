/* Operators on single rows: norms, gates, the activation, the mixture over depth, routing.
 *
 * Each row is computed by one thread from that row alone, in float32.
 */
#include "activation.h"

/* Elements of one task: below, dealing costs more than it saves. */
#define TASK_ELEMENTS 8192

/* Rows of `width` elements that one task takes. */
static long rows_per_task(long width) { return 1 + TASK_ELEMENTS / (width + 1); }

static long row_tasks(long rows, long width) {
  long each = rows_per_task(width);
  return (rows + each - 1) / each;
}

/* `row` runs over the rows of a task. */
#define EACH_ROW(row, task, rows, width)                                            \
  for (long each = rows_per_task(width), row = (task) * each,                       \
            end = row + each < (rows) ? row + each : (rows);                        \
       row < end; row++)

K3_INLINE v8f load_lanes(const float *p, long i, long n) {
  return i + LANES <= n ? v_load(p + i) : v_load_part(p + i, n - i);
}

K3_INLINE void store_lanes(float *p, v8f x, long i, long n) {
  if (i + LANES <= n)
    v_store(p + i, x);
  else
    v_store_part(p + i, x, n - i);
}

static float inverse_rms(const float *x, long n, float eps) {
  v8f sum = v_zero();
  for (long i = 0; i < n; i += LANES) {
    v8f lanes = load_lanes(x, i, n);
    sum = v_fma(lanes, lanes, sum);
  }
  /* In double: one rounding of the factor instead of four. */
  return (float)(1.0 / sqrt((double)v_sum(sum) / (double)n + (double)eps));
}

/* out = weight * cast(x / rms(x)), the cast to the row's type before the weight. */
static void norm_row(void *out, long at, int type, float *x, const float *weight, long n,
                     float eps) {
  v8f scale = v_set(inverse_rms(x, n, eps));
  for (long i = 0; i < n; i += LANES) store_lanes(x, load_lanes(x, i, n) * scale, i, n);
  if (type == K3_BF16)
    for (long i = 0; i < n; i++) x[i] = bf16_to_f32(f32_to_bf16(x[i]));
  for (long i = 0; i < n; i += LANES)
    store_lanes(x, load_lanes(x, i, n) * load_lanes(weight, i, n), i, n);
  store_row(out, at, type, x, n);
}

typedef struct {
  const void *x, *weight;
  void *out;
  int64_t x_row, T, D;
  int32_t type, weight_type;
  float eps;
} norm_args;

static void rms_norm_task(const void *context, long task, float *x) {
  const norm_args *a = context;
  float *weight = x + a->D;
  load_row(weight, a->weight, 0, a->weight_type, a->D);
  EACH_ROW(t, task, a->T, a->D) {
    load_row(x, a->x, t * a->x_row, a->type, a->D);
    norm_row(a->out, t * a->D, a->type, x, weight, a->D, a->eps);
  }
}

K3_API int k3_rms_norm(const norm_args *a) {
  return k3_run(row_tasks(a->T, a->D), 0, (size_t)(2 * a->D), rms_norm_task, a);
}

/* o [T, H, V] float32 dense; gate and out [T, H, V] of one type, gate strided. */
typedef struct {
  const float *o, *weight;
  const void *gate;
  void *out;
  int64_t gate_row, gate_head, T, H, V;
  int32_t type;
  float eps;
} gated_norm_args;

static void gated_norm_task(const void *context, long task, float *gate) {
  const gated_norm_args *a = context;
  EACH_ROW(row, task, a->T * a->H, a->V) {
    const float *o = a->o + row * a->V;
    v8f scale = v_set(inverse_rms(o, a->V, a->eps));
    load_row(gate, a->gate, row / a->H * a->gate_row + row % a->H * a->gate_head, a->type, a->V);
    for (long i = 0; i < a->V; i += LANES) {
      v8f unit = load_lanes(a->weight, i, a->V) * (load_lanes(o, i, a->V) * scale);
      store_lanes(gate, unit * v_sigmoid(load_lanes(gate, i, a->V)), i, a->V);
    }
    store_row(a->out, row * a->V, a->type, gate, a->V);
  }
}

K3_API int k3_gated_rms_norm(const gated_norm_args *a) {
  return k3_run(row_tasks(a->T * a->H, a->V), 0, (size_t)a->V, gated_norm_task, a);
}

/* gate_up [T, 2F] strided by row, out [T, F] dense. */
typedef struct {
  const void *gate_up;
  void *out;
  int64_t row, T, F;
  int32_t type;
  activation act;
} activate_args;

static void activate_task(const void *context, long task, float *both) {
  const activate_args *a = context;
  EACH_ROW(t, task, a->T, a->F) {
    load_row(both, a->gate_up, t * a->row, a->type, 2 * a->F);
    activate_row(both, both, both + a->F, a->F, a->act);
    store_row(a->out, t * a->F, a->type, both, a->F);
  }
}

K3_API int k3_activate(const activate_args *a) {
  return k3_run(row_tasks(a->T, a->F), 0, (size_t)(2 * a->F), activate_task, a);
}

/* Attention over depth: `sources` are num_sources row pointers [T, D], the stream last.
 * norm_weight NULL leaves the mixture as it is. Source: architecture sheet, section 2.2. */
typedef struct {
  const void *const *sources;
  const float *query;
  const void *norm_weight;
  void *out;
  int64_t num_sources, T, D;
  int32_t type, weight_type;
  float mix_eps, norm_eps;
} mix_args;

/* rows [num_sources, D], sum [D] and score [num_sources] are scratch; sum is the result. */
static void mix_row(const mix_args *a, long t, float *rows, float *sum, float *score) {
  float largest = -INFINITY, total = 0.0f;
  for (long s = 0; s < a->num_sources; s++) {
    float *row = rows + s * a->D;
    v8f squares = v_zero(), product = v_zero();
    load_row(row, a->sources[s], t * a->D, a->type, a->D);
    for (long i = 0; i < a->D; i += LANES) {
      v8f x = load_lanes(row, i, a->D);
      squares = v_fma(x, x, squares);
      product = v_fma(x, load_lanes(a->query, i, a->D), product);
    }
    score[s] = (float)(v_sum(product) / sqrt((double)v_sum(squares) / (double)a->D + a->mix_eps));
    largest = score[s] > largest ? score[s] : largest;
  }
  for (long s = 0; s < a->num_sources; s++) {
    score[s] = expf(score[s] - largest);
    total += score[s];
  }
  for (long s = 0; s < a->num_sources; s++) score[s] /= total;
  for (long i = 0; i < a->D; i += LANES) {
    v8f mixed = v_zero();
    for (long s = 0; s < a->num_sources; s++)
      mixed = v_fma(v_set(score[s]), load_lanes(rows + s * a->D, i, a->D), mixed);
    store_lanes(sum, mixed, i, a->D);
  }
}

static void mix_task(const void *context, long task, float *rows) {
  const mix_args *a = context;
  float *sum = rows + a->num_sources * a->D, *weight = sum + a->D, *score = weight + a->D;
  if (a->norm_weight) load_row(weight, a->norm_weight, 0, a->weight_type, a->D);
  EACH_ROW(t, task, a->T, a->D * a->num_sources) {
    if (a->num_sources == 1)
      load_row(sum, a->sources[0], t * a->D, a->type, a->D);
    else
      mix_row(a, t, rows, sum, score);
    if (!a->norm_weight) {
      store_row(a->out, t * a->D, a->type, sum, a->D);
      continue;
    }
    if (a->type == K3_BF16)
      for (long i = 0; i < a->D; i++) sum[i] = bf16_to_f32(f32_to_bf16(sum[i]));
    norm_row(a->out, t * a->D, a->type, sum, weight, a->D, a->norm_eps);
  }
}

K3_API int k3_attn_res(const mix_args *a) {
  return k3_run(row_tasks(a->T, a->D * a->num_sources), 0,
                (size_t)((a->num_sources + 2) * a->D + a->num_sources), mix_task, a);
}
