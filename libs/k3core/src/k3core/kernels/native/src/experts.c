/* Routed experts: every chosen expert is unpacked once a call, tile by tile, and multiplied
 * with all the rows that chose it; for one row it is a product with a vector.
 *
 * Packed weights (MXFP4) stay packed in memory; eight rows at a time are unpacked into the
 * first-level cache. A row's shares are added in the order in which the router named them, so
 * its bits do not depend on the batch. Sums are float32.
 *
 * Source: OCP Microscaling Formats v1.0; K3 architecture sheet, sections 2.6 and 3.3.
 */
#include "activation.h"
#include "dot.h"

/* Weights as stored: K3_F32, K3_BF16, or two elements a byte with one scale a group. */
enum { K3_MXFP4 = 2 };

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

/* Elements of 16 lie as evens, then odds: what unpacking nibbles gives without a shuffle. */
static void store_split(float *to, const float *from, long n) {
  for (long i = 0; i < n; i += 16)
    for (int j = 0; j < 8; j++) {
      to[i + j] = from[i + 2 * j];
      to[i + 8 + j] = from[i + 2 * j + 1];
    }
}

#ifdef __AVX2__
static void unpack_sixteen(float *to, const uint8_t *from, float scale) {
  const __m256 magnitudes = _mm256_setr_ps(0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f);
  __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
  __m256i odd = _mm256_srli_epi32(codes, 4), sign = _mm256_set1_epi32(8);
  __m256 low = _mm256_permutevar8x32_ps(magnitudes, codes);
  __m256 high = _mm256_permutevar8x32_ps(magnitudes, odd);
  __m256i low_sign = _mm256_slli_epi32(_mm256_and_si256(codes, sign), 28);
  __m256i high_sign = _mm256_slli_epi32(_mm256_and_si256(odd, sign), 28);
  low = _mm256_xor_ps(low, _mm256_castsi256_ps(low_sign));
  high = _mm256_xor_ps(high, _mm256_castsi256_ps(high_sign));
  _mm256_storeu_ps(to, _mm256_mul_ps(low, _mm256_set1_ps(scale)));
  _mm256_storeu_ps(to + 8, _mm256_mul_ps(high, _mm256_set1_ps(scale)));
}
#else
static void unpack_sixteen(float *to, const uint8_t *from, float scale) {
  static const float twice[16] = {0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  6.0f,  8.0f,  12.0f,
                                  -0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f};
  for (int j = 0; j < 8; j++) {
    to[j] = twice[from[j] & 15] * scale;
    to[8 + j] = twice[from[j] >> 4] * scale;
  }
}
#endif

/* 2^(exponent - 128): half of the E8M0 scale, for the table holds twice the magnitudes. */
K3_INLINE float half_scale(uint8_t exponent) {
  union { uint32_t u; float f; } word;
  word.u = exponent >= 2 ? (uint32_t)(exponent - 1) << 23 : 0x00200000u << exponent;
  return word.f;
}

/* Row `row` of a weight as floats, in `wide` unless it can be used where it lies. */
static const float *weight_row(float *wide, const void *w, const uint8_t *scales, long row, long K,
                               long group, int type) {
  if (type == K3_F32) return (const float *)w + row * K;
  if (type == K3_BF16) {
    load_row(wide, w, row * K, type, K);
    return wide;
  }
  const uint8_t *bytes = (const uint8_t *)w + row * (K / 2);
  const uint8_t *exponents = scales + row * (K / group);
  for (long g = 0; g < K / group; g++) {
    float scale = half_scale(exponents[g]);
    for (long i = 0; i < group; i += 16)
      unpack_sixteen(wide + g * group + i, bytes + (g * group + i) / 2, scale);
  }
  return wide;
}

/* Some weight rows of an expert: `split` from `first` on, the others from `second` on. */
typedef struct {
  const void *w;
  const uint8_t *scales;
  long K, first, second, split;
} expert_columns;

/* out [rows, n] of x [rows, K] with n weight rows. Many x rows are taken in blocks that stay in
 * the second-level cache, and the weight rows are then unpacked once for all blocks. */
static void multiply_columns(const expert_args *a, const expert_columns *c, long rows,
                             const float **x, long n, float *wide, float *out, long out_row) {
  const float *w[2 * COLUMNS];
  int keep = rows > DOT_BLOCK;
  for (long low = 0; low < rows; low += DOT_BLOCK)
    for (long i = 0; i < n; i += DOT_MAX_W) {
      int width = n - i < DOT_MAX_W ? (int)(n - i) : DOT_MAX_W;
      for (int j = 0; j < width && low == 0; j++) {
        long row = i + j < c->split ? c->first + i + j : c->second + (i + j - c->split);
        w[i + j] = weight_row(wide + (keep ? i + j : j) * c->K, c->w, c->scales, row, c->K,
                              a->group, a->w_type);
      }
      dot_rows(rows - low < DOT_BLOCK ? rows - low : DOT_BLOCK, width, x + low, w + i, c->K,
               out + low * out_row + i, out_row);
    }
}

/* middle [rows, F] of one expert, columns f..f + n: gate and up rows side by side. */
static void run_middle(const expert_args *a, const slab *s, long expert, long f, long n,
                       float *wide, float *both, const float **x) {
  long first = s->first[expert], rows = s->first[expert + 1] - first, at = expert * 2 * a->F + f;
  expert_columns columns = {a->w13, a->w13_scale, a->L, at, at + a->F, n};
  for (long r = 0; r < rows; r++) x[r] = s->x + s->order[first + r] / a->k * a->L;
  multiply_columns(a, &columns, rows, x, 2 * n, wide, both, 2 * n);
  for (long r = 0; r < rows; r++) {
    float *gate = both + r * 2 * n, *to = s->middle + (first + r) * a->F + f;
    activate_row(gate, gate, gate + n, n, a->act);
    if (a->w_type == K3_MXFP4)
      store_split(to, gate, n);
    else
      copy_floats(to, gate, n);
  }
}

/* result [rows, L] of one expert, columns c..c + n. */
static void run_result(const expert_args *a, const slab *s, long expert, long c, long n,
                       float *wide, const float **x) {
  long first = s->first[expert], rows = s->first[expert + 1] - first;
  expert_columns columns = {a->w2, a->w2_scale, a->F, expert * a->L + c, 0, n};
  for (long r = 0; r < rows; r++) x[r] = s->middle + (first + r) * a->F;
  multiply_columns(a, &columns, rows, x, n, wide, s->result + first * a->L + c, a->L);
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

/* Scratch: pointers to the rows of one expert (two floats each), then room for their gate and
 * up columns, then its task's weight rows, or DOT_MAX_W of them if x rows are few. */
static size_t job_floats(const slab_job *job) {
  long widest = job->a->L > job->a->F ? job->a->L : job->a->F;
  long kept = job->most_rows > DOT_BLOCK ? 2 * COLUMNS : DOT_MAX_W;
  return (size_t)(job->most_rows * (2 + 2 * COLUMNS) + kept * widest);
}

static void load_task(const void *context, long t, float *scratch) {
  const slab_job *job = context;
  const expert_args *a = job->a;
  float *to = job->s->x + t * a->L;
  if (a->w_type != K3_MXFP4) {
    load_row(to, a->x, (job->from + t) * a->x_row, a->x_type, a->L);
  } else {
    load_row(scratch, a->x, (job->from + t) * a->x_row, a->x_type, a->L);
    store_split(to, scratch, a->L);
  }
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
  run_result(a, job->s, job->s->active[task / tasks], c, a->L - c < COLUMNS ? a->L - c : COLUMNS,
             scratch + 2 * job->most_rows, (const float **)scratch);
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
