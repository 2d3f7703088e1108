/* Routed experts: every chosen expert is unpacked once a call, tile by tile, and multiplied
 * with all the rows that chose it; for one row it is a product with a vector.
 *
 * Packed weights (MXFP4) stay packed in memory; some columns of some rows at a time are unpacked
 * into panels. A row's shares are added in the order in which the router named them, so
 * its bits do not depend on the batch. Sums are float32.
 *
 * Source: OCP Microscaling Formats v1.0; K3 architecture sheet, sections 2.6 and 3.3.
 */
#include "activation.h"
#include "expert_panels.h"

/* Middle columns (or output columns) of one task. */
#define COLUMNS 32
/* Floats of middle and output rows kept at once: bounds the memory of a long prompt. */
#define SLAB_FLOATS (1L << 26)

typedef struct {
  const void *x;
  const int64_t *ids;   /* [T, k] */
  const float *weights; /* [T, k] */
  const void *w13, *w2; /* [E, 2F, L], [E, L, F] or packed */
  const uint8_t *w13_scale, *w2_scale;
  void *out;
  int64_t x_row, T, k, E, L, F, group;
  int32_t x_type, w_type, out_type;
  activation act;
} expert_args;

/* Work of one slab of tokens. Row r of `middle` and `result` belongs to slot order[r] =
 * t * k + j; rows of expert e are first[e]..first[e + 1]. */
typedef struct {
  float *x, *middle, *result;
  int64_t *order, *place, *first, *active;
  long num_active, T;
} slab;

/* Some weight rows of an expert: `split` from `first` on, the others from `second` on. */
typedef struct {
  expert_weight weight;
  long first, second, split;
} expert_columns;

/* out [rows, n] of x [rows, K] with n weight rows, in whole panels: out rows have room for them.
 * Weights are unpacked once for all rows; many rows are taken in blocks. */
static void multiply_columns(const expert_columns *c, long rows, const float **x, long n,
                             float *wide, float *out, long out_row) {
  long names[2 * COLUMNS + TOGETHER * LANES], K = c->weight.K, panels = (n + PANEL - 1) / PANEL;
  for (long i = 0; i < n; i++) names[i] = i < c->split ? c->first + i : c->second + i - c->split;
  if (can_multiply_packed(&c->weight, rows)) {
    multiply_few(rows, x, &c->weight, names, n, out, out_row);
    return;
  }
  for (long from = 0, width; from < K; from += width) {
    width = pass_columns(rows, K, from);
    fill_panels(wide, &c->weight, names, n, from, width);
    panel_pass p = {wide, width * PANEL, panels, from, width, panel_chain(K)};
    for (long low = 0; low < rows; low += PANEL_BLOCK) {
      long count = rows - low < PANEL_BLOCK ? rows - low : PANEL_BLOCK;
      panel_rows(count, x + low, &p, out + low * out_row, out_row);
    }
  }
}

/* middle [rows, F] of one expert, columns f..f + n: gate and up rows side by side. */
static void run_middle(const expert_args *a, const slab *s, long expert, long f, long n,
                       float *wide, float *both, const float **x) {
  long first = s->first[expert], rows = s->first[expert + 1] - first, at = expert * 2 * a->F + f;
  expert_weight weight = {a->w13, a->w13_scale, a->L, a->group, a->w_type};
  expert_columns columns = {weight, at, at + a->F, n};
  for (long r = 0; r < rows; r++) x[r] = s->x + s->order[first + r] / a->k * a->L;
  multiply_columns(&columns, rows, x, 2 * n, wide, both, 2 * COLUMNS);
  for (long r = 0; r < rows; r++) {
    const float *gate = both + r * 2 * COLUMNS;
    activate_row(s->middle + (first + r) * a->F + f, gate, gate + n, n, a->act);
  }
}

/* result [rows, L] of one expert, columns c..c + n; through `both` unless they are whole panels. */
static void run_result(const expert_args *a, const slab *s, long expert, long c, long n,
                       float *wide, float *both, const float **x) {
  long first = s->first[expert], rows = s->first[expert + 1] - first;
  expert_weight weight = {a->w2, a->w2_scale, a->F, a->group, a->w_type};
  expert_columns columns = {weight, expert * a->L + c, 0, n};
  float *result = s->result + first * a->L + c;
  int direct = n % PANEL == 0;
  for (long r = 0; r < rows; r++) x[r] = s->middle + (first + r) * a->F;
  multiply_columns(&columns, rows, x, n, wide, direct ? result : both, direct ? a->L : COLUMNS);
  for (long r = 0; r < rows && !direct; r++)
    copy_floats(result + r * a->L, both + r * COLUMNS, n);
}

/* Groups the slab's slots by expert; within one, tokens ascend. */
static void sort_slots(const expert_args *a, slab *s, long from) {
  long slots = s->T * a->k;
  const int64_t *ids = a->ids + from * a->k;
  memset(s->first, 0, (size_t)(a->E + 1) * sizeof(int64_t));
  for (long i = 0; i < slots; i++) s->first[ids[i] + 1]++;
  s->num_active = 0;
  for (long e = 0; e < a->E; e++) {
    if (s->first[e + 1]) s->active[s->num_active++] = e;
    s->first[e + 1] += s->first[e];
  }
  for (long i = 0; i < slots; i++) {
    long row = s->first[ids[i]]++;
    s->order[row] = i;
    s->place[i] = row;
  }
  for (long e = a->E; e > 0; e--) s->first[e] = s->first[e - 1];
  s->first[0] = 0;
}

static void add_shares(const expert_args *a, const slab *s, long from, long t, float *sum) {
  memset(sum, 0, (size_t)a->L * sizeof(float));
  for (long j = 0; j < a->k; j++) {
    const float *share = s->result + s->place[t * a->k + j] * a->L;
    v8f weight = v_set(a->weights[(from + t) * a->k + j]);
    long i = 0;
    for (; i + LANES <= a->L; i += LANES)
      v_store(sum + i, v_fma(weight, v_load(share + i), v_load(sum + i)));
    if (i < a->L)
      v_store_part(sum + i,
                   v_fma(weight, v_load_part(share + i, a->L - i), v_load_part(sum + i, a->L - i)),
                   a->L - i);
  }
  store_row(a->out, (from + t) * a->L, a->out_type, sum, a->L);
}

static long columns_tasks(long n) { return (n + COLUMNS - 1) / COLUMNS; }

typedef struct {
  const expert_args *a;
  slab *s;
  long from, most_rows; /* first token of the slab; rows of the busiest expert */
} slab_job;

/* Scratch: pointers to the rows of one expert (two floats each), room for their gate and up
 * columns, and the panels of a pass; or the sums of one token. */
static size_t job_floats(const slab_job *job) {
  long floats = job->most_rows * (2 + 2 * COLUMNS) + 2 * COLUMNS * PANEL_COLUMNS;
  return (size_t)(floats > job->a->L ? floats : job->a->L);
}

static void load_task(const void *context, long t, float *scratch) {
  const slab_job *job = context;
  const expert_args *a = job->a;
  (void)scratch;
  load_row(job->s->x + t * a->L, a->x, (job->from + t) * a->x_row, a->x_type, a->L);
}

static void middle_task(const void *context, long task, float *scratch) {
  const slab_job *job = context;
  const expert_args *a = job->a;
  long tasks = columns_tasks(a->F), f = task % tasks * COLUMNS;
  float *both = scratch + 2 * job->most_rows;
  run_middle(a, job->s, job->s->active[task / tasks], f, a->F - f < COLUMNS ? a->F - f : COLUMNS,
             both + job->most_rows * 2 * COLUMNS, both, (const float **)scratch);
}

static void result_task(const void *context, long task, float *scratch) {
  const slab_job *job = context;
  const expert_args *a = job->a;
  long tasks = columns_tasks(a->L), c = task % tasks * COLUMNS;
  float *both = scratch + 2 * job->most_rows;
  run_result(a, job->s, job->s->active[task / tasks], c, a->L - c < COLUMNS ? a->L - c : COLUMNS,
             both + job->most_rows * 2 * COLUMNS, both, (const float **)scratch);
}

static void share_task(const void *context, long t, float *scratch) {
  const slab_job *job = context;
  add_shares(job->a, job->s, job->from, t, scratch);
}

static int run_slab(const expert_args *a, slab *s, long from) {
  slab_job job = {a, s, from, 0};
  sort_slots(a, s, from);
  for (long e = 0; e < a->E; e++) {
    long rows = s->first[e + 1] - s->first[e];
    job.most_rows = rows > job.most_rows ? rows : job.most_rows;
  }
  int few = s->T < 8, small = s->T * a->k * a->F * a->L < 65536;
  size_t scratch = job_floats(&job);
  return k3_run(s->T, few, scratch, load_task, &job) ||
         k3_run(s->num_active * columns_tasks(a->F), small, scratch, middle_task, &job) ||
         k3_run(s->num_active * columns_tasks(a->L), small, scratch, result_task, &job) ||
         k3_run(s->T, few, scratch, share_task, &job);
}

K3_API int k3_experts(const expert_args *a) {
  long per_token = a->k * (a->F + a->L) + a->L, longest = SLAB_FLOATS / per_token;
  long T = a->T < longest ? a->T : longest < 1 ? 1 : longest;
  slab s;
  s.x = scratch_floats((size_t)(T * per_token));
  s.order = malloc((size_t)(2 * T * a->k + 2 * a->E + 1) * sizeof(int64_t));
  int failed = s.x == NULL || s.order == NULL;
  s.middle = s.x + T * a->L;
  s.result = s.middle + T * a->k * a->F;
  s.place = s.order + T * a->k;
  s.first = s.place + T * a->k;
  s.active = s.first + a->E + 1;
  for (long from = 0; from < a->T && !failed; from += T) {
    s.T = a->T - from < T ? a->T - from : T;
    failed = run_slab(a, &s, from);
  }
  free(s.x);
  free(s.order);
  return failed;
}
