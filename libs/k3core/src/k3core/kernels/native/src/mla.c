/* Latent attention over paged rows, absorbed and expanded, with a running softmax.
 *
 * Keys are taken in blocks of 64 positions from position 0, whoever asks: a query row's bits
 * depend neither on the batch, nor on how its chunk was cut, nor on threads. (The two forms
 * round differently from each other.)
 *
 * Source: K3 architecture sheet, section 2.4.
 */
#include "dot.h"

#define KEYS 64
/* Query rows of the expanded form that pass over a block of keys together. */
#define QUERIES 12

typedef struct {
  const void *q;      /* [T, N, K + R], rows strided */
  const void *latent; /* [P, page_units, U, C + R], last axis dense */
  const void *kv_b;   /* [N, K + V, C] dense */
  const int64_t *starts, *contexts, *units; /* [B + 1], [B], [B, max_units] */
  void *out;          /* [T, N, V] dense */
  int64_t q_row, q_head, page_stride, unit_stride, row_stride, table_row;
  int64_t B, N, K, R, V, C, page_units, unit_tokens;
  int32_t q_type, latent_type, weight_type;
  float scale;
} mla_args;

/* Points rows[0..n) at cached rows from..from + n of a sequence, widened into `wide` unless
 * they are floats where they lie. */
static void cached_rows(const mla_args *a, long sequence, long from, long n, float *wide,
                        const float **rows) {
  long X = a->C + a->R;
  for (long i = 0; i < n; i++) {
    long position = from + i;
    long unit = a->units[sequence * a->table_row + position / a->unit_tokens];
    long at = unit / a->page_units * a->page_stride + unit % a->page_units * a->unit_stride +
              position % a->unit_tokens * a->row_stride;
    if (a->latent_type == K3_F32) {
      rows[i] = (const float *)a->latent + at;
    } else {
      load_row(wide + i * X, a->latent, at, a->latent_type, X);
      rows[i] = wide + i * X;
    }
  }
}

static long sequence_of(const mla_args *a, long row) {
  long low = 0, high = a->B;
  while (high - low > 1) {
    long middle = (low + high) / 2;
    if (a->starts[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* scores [KEYS] of one row become weights; returns what earlier sums are multiplied with. */
static float soften(float *scores, long n, float scale, float *largest, float *total) {
  v8f best = v_set(*largest);
  for (long j = n; j < KEYS; j++) scores[j] = -INFINITY;
  for (long j = 0; j < KEYS; j += LANES) {
    v8f s = v_load(scores + j) * v_set(scale);
    v_store(scores + j, s);
    best = v_max(s, best);
  }
  float now = v_largest(best);
  /* A row that sees none of this block keeps what it had. */
  float kept = now == *largest ? 1.0f : v_exp(v_set(*largest - now))[0];
  v8f sum = v_zero();
  for (long j = 0; j < KEYS; j += LANES) {
    v8f p = v_exp(v_load(scores + j) - v_set(now));
    v_store(scores + j, p);
    sum = sum + p;
  }
  *total = *total * kept + v_sum(sum);
  *largest = now;
  return kept;
}

static void scale_row(float *row, float by, long n) {
  if (by != 1.0f)
    for (long i = 0; i < n; i++) row[i] *= by;
}

/* ---- absorbed: heads [low, high) of one query row ---- */

typedef struct {
  float *query, *latent, *score, *rows, *weight, *value; /* see absorbed_floats */
} absorbed_scratch;

static size_t absorbed_floats(const mla_args *a, long heads) {
  long X = a->C + a->R, widest = a->K + a->R > a->V ? a->K + a->R : a->V;
  return (size_t)(heads * (X + a->C + KEYS) + KEYS * X + 4 * a->C + widest);
}

/* q [N] moved by the key half of kv_b to the latent: query [heads, C + R]. */
static void move_query(const mla_args *a, long row, long low, long high, absorbed_scratch s) {
  long X = a->C + a->R;
  for (long h = low; h < high; h++) {
    float *to = s.query + (h - low) * X;
    memset(to, 0, (size_t)a->C * sizeof(float));
    load_row(s.value, a->q, row * a->q_row + h * a->q_head, a->q_type, a->K + a->R);
    copy_floats(to + a->C, s.value + a->K, a->R);
    for (long k = 0; k < a->K; k += 4) {
      const float *weights[4];
      long n = a->K - k < 4 ? a->K - k : 4;
      for (long i = 0; i < n; i++) {
        load_row(s.weight + i * a->C, a->kv_b, (h * (a->K + a->V) + k + i) * a->C, a->weight_type,
                 a->C);
        weights[i] = s.weight + i * a->C;
      }
      accumulate_rows(1, s.value + k, 0, weights, n, to, 0, a->C);
    }
  }
}

static void attend_absorbed(const mla_args *a, long row, long low, long high, absorbed_scratch s) {
  long X = a->C + a->R, heads = high - low, sequence = sequence_of(a, row);
  long seen = a->contexts[sequence] + row - a->starts[sequence] + 1;
  const float *rows[KEYS], *query[heads];
  float largest[heads], total[heads];
  move_query(a, row, low, high, s);
  memset(s.latent, 0, (size_t)(heads * a->C) * sizeof(float));
  for (long h = 0; h < heads; h++) {
    query[h] = s.query + h * X;
    largest[h] = -INFINITY;
    total[h] = 0.0f;
  }
  for (long from = 0; from < seen; from += KEYS) {
    long n = seen - from < KEYS ? seen - from : KEYS;
    cached_rows(a, sequence, from, n, s.rows, rows);
    for (long j = 0; j < n; j += DOT_MAX_W)
      dot_rows(heads, (int)(n - j < DOT_MAX_W ? n - j : DOT_MAX_W), query, rows + j, X,
               s.score + j, KEYS);
    for (long h = 0; h < heads; h++)
      scale_row(s.latent + h * a->C,
                soften(s.score + h * KEYS, n, a->scale, largest + h, total + h), a->C);
    long h = 0;
    for (; h + 3 <= heads; h += 3)
      accumulate_rows(3, s.score + h * KEYS, KEYS, rows, n, s.latent + h * a->C, a->C, a->C);
    for (; h < heads; h++)
      accumulate_rows(1, s.score + h * KEYS, KEYS, rows, n, s.latent + h * a->C, a->C, a->C);
  }
  for (long h = 0; h < heads; h++) {
    const float *latent = s.latent + h * a->C, *weights[1] = {s.weight};
    scale_row(s.latent + h * a->C, 1.0f / total[h], a->C);
    for (long v = 0; v < a->V; v++) {
      long at = ((low + h) * (a->K + a->V) + a->K + v) * a->C;
      load_row(s.weight, a->kv_b, at, a->weight_type, a->C);
      dot_rows(1, 1, &latent, weights, a->C, s.value + v, 1);
    }
    store_row(a->out, (row * a->N + low + h) * a->V, a->q_type, s.value, a->V);
  }
}

typedef struct {
  const mla_args *a;
  long parts, heads; /* tasks of one row, and heads of one task */
} absorbed_job;

static void absorbed_task(const void *context, long task, float *memory) {
  const absorbed_job *job = context;
  const mla_args *a = job->a;
  long X = a->C + a->R, low = task % job->parts * job->heads;
  absorbed_scratch s;
  s.query = memory;
  s.latent = s.query + job->heads * X;
  s.score = s.latent + job->heads * a->C;
  s.rows = s.score + job->heads * KEYS;
  s.weight = s.rows + KEYS * X;
  s.value = s.weight + 4 * a->C;
  attend_absorbed(a, task / job->parts, low,
                  low + job->heads < a->N ? low + job->heads : a->N, s);
}

K3_API int k3_mla_absorbed(const mla_args *a) {
  long T = a->starts[a->B], threads = k3_get_threads();
  /* Few rows: split the heads, else threads would idle. */
  long parts = T >= 2 * threads || a->N < 2 ? 1 : (2 * threads + T - 1) / T;
  absorbed_job job = {a, parts, (a->N + parts - 1) / parts};
  job.parts = (a->N + job.heads - 1) / job.heads;
  return k3_run(T * job.parts, 0, absorbed_floats(a, job.heads), absorbed_task, &job);
}

/* ---- expanded: one head of one chunk ---- */

/* keys [L, K + R] and values [L, V] of a head from all its cached rows. */
static void expand_head(const mla_args *a, long sequence, long h, long L, float *keys,
                        float *values, float *wide) {
  long X = a->C + a->R, width = a->K + a->R;
  const float *rows[KEYS], *weights[DOT_MAX_W];
  float *widened = wide + DOT_MAX_W * a->C, *result = widened + KEYS * X;
  for (long from = 0; from < L; from += KEYS) {
    long n = L - from < KEYS ? L - from : KEYS;
    cached_rows(a, sequence, from, n, widened, rows);
    for (long i = 0; i < n; i++) copy_floats(keys + (from + i) * width + a->K, rows[i] + a->C, a->R);
    for (long o = 0; o < a->K + a->V; o += DOT_MAX_W) {
      int some = (int)(a->K + a->V - o < DOT_MAX_W ? a->K + a->V - o : DOT_MAX_W);
      for (int i = 0; i < some; i++) {
        long at = (h * (a->K + a->V) + o + i) * a->C;
        weights[i] = (const float *)a->kv_b + at;
        if (a->weight_type != K3_F32) {
          load_row(wide + i * a->C, a->kv_b, at, a->weight_type, a->C);
          weights[i] = wide + i * a->C;
        }
      }
      dot_rows(n, some, rows, weights, a->C, result, DOT_MAX_W);
      for (long i = 0; i < n; i++)
        for (int j = 0; j < some; j++) {
          if (o + j < a->K)
            keys[(from + i) * width + o + j] = result[i * DOT_MAX_W + j];
          else
            values[(from + i) * a->V + o + j - a->K] = result[i * DOT_MAX_W + j];
        }
    }
  }
}

/* Query rows first..first + n of the chunk, whose first row stands at position `context`. */
static void attend_expanded(const mla_args *a, long start, long context, long first, long n,
                            long h, const float *keys, const float *values, float *scratch) {
  long width = a->K + a->R, last = context + first + n;
  float *query = scratch, *score = query + QUERIES * width, *sum = score + QUERIES * KEYS;
  const float *q[QUERIES], *k[KEYS], *v[KEYS];
  float largest[QUERIES], total[QUERIES];
  for (long i = 0; i < n; i++) {
    q[i] = query + i * width;
    load_row(query + i * width, a->q, (start + first + i) * a->q_row + h * a->q_head, a->q_type,
             width);
    largest[i] = -INFINITY;
    total[i] = 0.0f;
  }
  memset(sum, 0, (size_t)(n * a->V) * sizeof(float));
  for (long from = 0; from < last; from += KEYS) {
    long here = last - from < KEYS ? last - from : KEYS;
    for (long j = 0; j < here; j++) {
      k[j] = keys + (from + j) * width;
      v[j] = values + (from + j) * a->V;
    }
    for (long j = 0; j < here; j += DOT_MAX_W)
      dot_rows(n, (int)(here - j < DOT_MAX_W ? here - j : DOT_MAX_W), q, k + j, width, score + j,
               KEYS);
    for (long i = 0; i < n; i++) {
      long seen = context + first + i + 1 - from;
      if (seen < 0) seen = 0;
      scale_row(sum + i * a->V,
                soften(score + i * KEYS, seen < here ? seen : here, a->scale, largest + i,
                       total + i),
                a->V);
    }
    long i = 0;
    for (; i + 3 <= n; i += 3)
      accumulate_rows(3, score + i * KEYS, KEYS, v, here, sum + i * a->V, a->V, a->V);
    for (; i < n; i++)
      accumulate_rows(1, score + i * KEYS, KEYS, v, here, sum + i * a->V, a->V, a->V);
  }
  for (long i = 0; i < n; i++) {
    scale_row(sum + i * a->V, 1.0f / total[i], a->V);
    store_row(a->out, ((start + first + i) * a->N + h) * a->V, a->q_type, sum + i * a->V, a->V);
  }
}

static long longest_sequence(const mla_args *a) {
  long longest = 0;
  for (long b = 0; b < a->B; b++) {
    long L = a->contexts[b] + a->starts[b + 1] - a->starts[b];
    longest = L > longest ? L : longest;
  }
  return longest;
}

typedef struct {
  const mla_args *a;
  long longest; /* tokens of the longest sequence */
} expanded_job;

static void expanded_task(const void *context, long task, float *keys) {
  const expanded_job *job = context;
  const mla_args *a = job->a;
  float *values = keys + job->longest * (a->K + a->R), *rest = values + job->longest * a->V;
  long b = task / a->N, h = task % a->N, start = a->starts[b], T = a->starts[b + 1] - start;
  expand_head(a, b, h, a->contexts[b] + T, keys, values, rest);
  for (long first = 0; first < T; first += QUERIES)
    attend_expanded(a, start, a->contexts[b], first, T - first < QUERIES ? T - first : QUERIES, h,
                    keys, values, rest);
}

K3_API int k3_mla_expanded(const mla_args *a) {
  long width = a->K + a->R;
  expanded_job job = {a, longest_sequence(a)};
  /* Expanding and attending use the rest one after the other. */
  long working = DOT_MAX_W * a->C + KEYS * (a->C + a->R + DOT_MAX_W) +
                 QUERIES * (width + KEYS + a->V);
  return k3_run(a->B * a->N, 0, (size_t)(job.longest * (width + a->V) + working), expanded_task,
                &job);
}

/* ---- writing rows ---- */

typedef struct {
  void *latent;
  const void *rows;
  const int64_t *units, *places;
  int64_t page_stride, unit_stride, row_stride, page_units, rows_row, T, X;
  int32_t latent_type, rows_type;
} mla_write_args;

K3_API int k3_mla_write(const mla_write_args *a) {
  float *wide = scratch_floats((size_t)a->X);
  if (!wide) return 1;
  for (long t = 0; t < a->T; t++) {
    long unit = a->units[t];
    long at = unit / a->page_units * a->page_stride + unit % a->page_units * a->unit_stride +
              a->places[t] * a->row_stride;
    load_row(wide, a->rows, t * a->rows_row, a->rows_type, a->X);
    store_row(a->latent, at, a->latent_type, wide, a->X);
  }
  free(wide);
  return 0;
}
