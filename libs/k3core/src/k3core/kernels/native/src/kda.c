/* Kimi Delta Attention at inference: convolution, SiLU, norms, gate and recurrence in one
 * pass over packed chunks, states and convolution windows read and written by page.
 *
 * One task is one head of one chunk: nothing is shared between tasks, so neither the batch
 * nor the number of threads changes a bit. The exports' states are written where the pass
 * meets them.
 */
#include "kda.h"

typedef struct {
  /* qkv rows of 2HK + HV channels; gate [T, H, K]; beta [T, H]; strides in elements. */
  const void *qkv, *gate, *beta;
  int64_t qkv_row, gate_row, gate_head, beta_row, beta_head;
  /* conv [Q, W], a_log [H], dt_bias [H, K], all float32. */
  const float *conv, *a_log, *dt_bias;
  /* starts [B + 1], pages [B]; exports [num_exports, 3]: sequence, offset, page. */
  const int64_t *starts, *pages, *exports;
  const uint8_t *has_state;
  /* state [P, H, V, K], a page apart, dense within; window [P, W - 1, Q]. */
  float *state;
  void *window;
  int64_t state_page, window_page, window_row;
  /* out [T, H, V], dense. */
  float *out;
  int64_t num_sequences, num_exports, H, K, V, W;
  int32_t input_type, window_type, bounded;
  float lower_bound;
} kda_args;

/* Scratch of one thread. raw [W - 1 + block, C], taps [W, C], mixed [C] with
 * C = 2 Kp + Vp channels of one head: q | k | v, each padded. */
typedef struct {
  float *raw, *taps, *mixed, *gate, *decay, *bias, *S;
  kda_block block;
  long head; /* whose weights lie in taps, bias and rate, or -1 */
  float rate;
} kda_scratch;

static long channels(kda_dims d) { return 2 * d.Kp + d.Vp; }

static size_t scratch_size(const kda_args *a, kda_dims d) {
  return (size_t)((2 * a->W + KDA_BLOCK) * channels(d) + 3 * d.Kp + d.K * d.Vp) +
         kda_block_floats(d);
}

static kda_scratch carve_scratch(const kda_args *a, float *memory, kda_dims d) {
  long C = channels(d);
  kda_scratch s;
  if (d.Kp != d.K || d.Vp != d.V) memset(memory, 0, scratch_size(a, d) * sizeof(float));
  s.S = memory;
  s.raw = s.S + d.K * d.Vp;
  s.taps = s.raw + (a->W - 1 + KDA_BLOCK) * C;
  s.mixed = s.taps + a->W * C;
  s.gate = s.mixed + C;
  s.decay = s.gate + d.Kp;
  s.bias = s.decay + d.Kp;
  s.block = kda_carve_block(s.bias + d.Kp, d);
  s.head = -1;
  return s;
}

/* Channels of one head lie in three places of a row; `row` has them side by side. */
static void load_channels(float *row, const void *from, long at, int type, const kda_args *a,
                          long h, kda_dims d) {
  load_row(row, from, at + h * d.K, type, d.K);
  load_row(row + d.Kp, from, at + (a->H + h) * d.K, type, d.K);
  load_row(row + 2 * d.Kp, from, at + 2 * a->H * d.K + h * d.V, type, d.V);
}

static void store_channels(void *to, long at, int type, const float *row, const kda_args *a,
                           long h, kda_dims d) {
  store_row(to, at + h * d.K, type, row, d.K);
  store_row(to, at + (a->H + h) * d.K, type, row + d.Kp, d.K);
  store_row(to, at + 2 * a->H * d.K + h * d.V, type, row + 2 * d.Kp, d.V);
}

/* Rows of one head lie far apart, which defeats the processor's own prefetching. */
static void prefetch_token(const kda_args *a, long row, long h, kda_dims d) {
  const char *qkv = (const char *)a->qkv + (size_t)(row * a->qkv_row) * type_size(a->input_type);
  const long at[3] = {h * d.K, (a->H + h) * d.K, 2 * a->H * d.K + h * d.V};
  size_t size = type_size(a->input_type);
  for (int part = 0; part < 3; part++)
    for (size_t byte = 0; byte < (size_t)(part < 2 ? d.K : d.V) * size; byte += 64)
      __builtin_prefetch(qkv + (size_t)at[part] * size + byte);
  const char *gate = (const char *)a->gate + (size_t)(row * a->gate_row + h * a->gate_head) * size;
  for (size_t byte = 0; byte < (size_t)d.K * size; byte += 64) __builtin_prefetch(gate + byte);
}

static void load_head(kda_scratch *s, const kda_args *a, long h, kda_dims d) {
  long C = channels(d);
  if (s->head == h) return;
  s->head = h;
  s->rate = expf(a->a_log[h]);
  const long from[3] = {h * d.K, (a->H + h) * d.K, 2 * a->H * d.K + h * d.V};
  const long to[3] = {0, d.Kp, 2 * d.Kp}, width[3] = {d.K, d.K, d.V};
  for (int part = 0; part < 3; part++)
    for (long c = 0; c < width[part]; c++)
      for (long w = 0; w < a->W; w++)
        s->taps[w * C + to[part] + c] = a->conv[(from[part] + c) * a->W + w];
  memcpy(s->bias, a->dt_bias + h * d.K, (size_t)d.K * sizeof(float));
}

/* mixed [C] = SiLU of the convolution whose newest input is raw row W - 1 + t. */
K3_INLINE void convolve(kda_scratch *s, long t, const long W, kda_dims d) {
  long C = channels(d);
  for (long c = 0; c < C; c += LANES) {
    v8f sum = v_zero();
    for (long w = 0; w < W; w++)
      sum = v_fma(v_load(s->taps + w * C + c), v_load(s->raw + (t + w) * C + c), sum);
    v_store(s->mixed + c, sum * v_sigmoid(sum));
  }
}

static void prepare_token(kda_scratch *s, const kda_args *a, long row, long t, long h,
                          kda_dims d) {
  float beta;
  if (a->W == 4)
    convolve(s, t, 4, d); /* the constant unrolls the taps */
  else
    convolve(s, t, a->W, d);
  load_row(s->gate, a->gate, row * a->gate_row + h * a->gate_head, a->input_type, d.K);
  load_row(&beta, a->beta, row * a->beta_row + h * a->beta_head, a->input_type, 1);
  kda_decay(s->decay, s->gate, s->bias, s->rate, a->bounded, a->lower_bound, d);
  kda_put_token(s->block, t, s->mixed, s->mixed + d.Kp, s->decay, beta, d);
  copy_floats(s->block.v + t * d.Vp, s->mixed + 2 * d.Kp, d.Vp);
}

static void load_window(kda_scratch *s, const kda_args *a, long sequence, long h, kda_dims d) {
  long C = channels(d);
  for (long w = 0; w < a->W - 1; w++) {
    if (a->has_state[sequence])
      load_channels(s->raw + w * C, a->window,
                    a->pages[sequence] * a->window_page + w * a->window_row, a->window_type, a, h,
                    d);
    else
      memset(s->raw + w * C, 0, (size_t)C * sizeof(float));
  }
}

/* Both states after the tokens in `raw` up to row W - 1 + n, to a page. */
static void store_page(const float *S, const float *last_rows, const kda_args *a, long page,
                       long h, kda_dims d) {
  kda_store_state(a->state + page * a->state_page + h * d.V * d.K, S, d);
  for (long w = 0; w < a->W - 1; w++)
    store_channels(a->window, page * a->window_page + w * a->window_row, a->window_type,
                   last_rows + w * channels(d), a, h, d);
}

/* Index of the first export of a sequence, exports being sorted by (sequence, offset). */
static long first_export(const kda_args *a, long sequence) {
  long i = 0;
  while (i < a->num_exports && a->exports[3 * i] < sequence) i++;
  return i;
}

static void run_chunk(kda_scratch *s, const kda_args *a, long sequence, long h, kda_dims d) {
  long C = channels(d), first = a->starts[sequence], T = a->starts[sequence + 1] - first;
  long page = a->pages[sequence], next = first_export(a, sequence);
  load_head(s, a, h, d);
  load_window(s, a, sequence, h, d);
  if (a->has_state[sequence])
    kda_load_state(s->S, a->state + page * a->state_page + h * d.V * d.K, d);
  else
    memset(s->S, 0, (size_t)(d.K * d.Vp) * sizeof(float));
  for (long done = 0; done < T;) {
    int exports = next < a->num_exports && a->exports[3 * next] == sequence;
    long stop = exports && a->exports[3 * next + 1] < T ? a->exports[3 * next + 1] : T;
    long n = stop - done < KDA_BLOCK ? stop - done : KDA_BLOCK;
    for (long t = 0; t < n; t++) {
      long row = first + done + t;
      if (done + t + KDA_BLOCK < T) prefetch_token(a, row + KDA_BLOCK, h, d);
      load_channels(s->raw + (a->W - 1 + t) * C, a->qkv, row * a->qkv_row, a->input_type, a, h, d);
      prepare_token(s, a, row, t, h, d);
    }
    kda_run_block(s->S, s->block, n, d);
    for (long t = 0; t < n; t++)
      copy_floats(a->out + ((first + done + t) * a->H + h) * d.V, s->block.o + t * d.Vp, d.V);
    done += n;
    while (next < a->num_exports && a->exports[3 * next] == sequence &&
           a->exports[3 * next + 1] == done)
      store_page(s->S, s->raw + n * C, a, a->exports[3 * next++ + 2], h, d);
    if (done == T) store_page(s->S, s->raw + n * C, a, page, h, d);
    memmove(s->raw, s->raw + n * C, (size_t)((a->W - 1) * C) * sizeof(float));
  }
}

/* One token on the state as it lies, [V, K], eight rows at a time turned in registers: the
 * same sums in the same order as kda_run_tile, without the copy. K and V whole vectors. */
static void step_in_place(float *S, const kda_block b, float *out, kda_dims d) {
  const float *decay = b.coef + 4 * d.Kp, *key = decay + d.Kp;
  const float *next_key = key + d.Kp, *query = next_key + d.Kp;
  v8f rows[LANES];
  for (long v = 0; v < d.V; v += LANES, S += LANES * d.K) {
    v8f seen = v_zero(), read = v_zero();
    for (long k = 0; k < d.K; k += LANES) {
      for (int i = 0; i < LANES; i++) rows[i] = v_load(S + i * d.K + k);
      v_transpose8(rows);
      v8f part_seen = v_zero(), part_read = v_zero();
      for (int i = 0; i < KDA_PART; i++) {
        part_seen = v_fma(v_set(next_key[k + i]), rows[i], part_seen);
        part_read = v_fma(v_set(query[k + i]), rows[i], part_read);
      }
      seen = seen + part_seen;
      read = read + part_read;
    }
    v8f u = v_set(b.beta[0]) * (v_load(b.v + v) - seen);
    v_store(out + v, v_fma(v_set(b.kq[0]), u, read));
    for (long k = 0; k < d.K; k += LANES) {
      v8f decays = v_load(decay + k), keys = v_load(key + k);
      for (int i = 0; i < LANES; i++)
        v_store(S + i * d.K + k, v_fma(keys, v_set(u[i]), decays * v_load(S + i * d.K + k)));
    }
  }
}

static void run_step(kda_scratch *s, const kda_args *a, long sequence, long h, kda_dims d) {
  long C = channels(d), row = a->starts[sequence], page = a->pages[sequence];
  float *state = a->state + page * a->state_page + h * d.V * d.K;
  load_head(s, a, h, d);
  load_window(s, a, sequence, h, d);
  load_channels(s->raw + (a->W - 1) * C, a->qkv, row * a->qkv_row, a->input_type, a, h, d);
  prepare_token(s, a, row, 0, h, d);
  if (!a->has_state[sequence]) memset(state, 0, (size_t)(d.V * d.K) * sizeof(float));
  step_in_place(state, s->block, a->out + (row * a->H + h) * d.V, d);
  for (long w = 0; w < a->W - 1; w++)
    store_channels(a->window, page * a->window_page + w * a->window_row, a->window_type,
                   s->raw + (w + 1) * C, a, h, d);
}

/* Heads outermost: a task mostly keeps the head whose weights it has laid out. */
typedef struct {
  const kda_args *a;
  kda_dims d;
  long grain; /* (head, sequence) pairs of one task */
} kda_job;

static void run_task(const void *context, long task, float *memory) {
  const kda_job *job = context;
  const kda_args *a = job->a;
  kda_dims d = job->d;
  kda_scratch s = carve_scratch(a, memory, d);
  int whole = d.K % LANES == 0 && d.V % LANES == 0;
  long end = (task + 1) * job->grain, pairs = a->num_sequences * a->H;
  for (long pair = task * job->grain; pair < end && pair < pairs; pair++) {
    long sequence = pair % a->num_sequences, h = pair / a->num_sequences;
    if (a->starts[sequence + 1] - a->starts[sequence] == 1 && whole && a->num_exports == 0)
      run_step(&s, a, sequence, h, d);
    else
      run_chunk(&s, a, sequence, h, d);
  }
}

K3_API int k3_kda(const kda_args *a) {
  long pairs = a->num_sequences * a->H, work = a->starts[a->num_sequences] * a->H;
  kda_job job = {a, kda_make_dims(a->K, a->V), 1};
  /* Single steps are short and alike: hand out several at a time. */
  if (a->starts[a->num_sequences] == a->num_sequences)
    job.grain = 1 + pairs / (4 * k3_get_threads());
  return k3_run((pairs + job.grain - 1) / job.grain, work * a->K * a->V < 8192,
                scratch_size(a, job.d), run_task, &job);
}
