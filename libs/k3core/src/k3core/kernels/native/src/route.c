/* Choosing experts: scores, groups, the best k, their weights. One row, one thread.
 *
 * Equal scores: the lower id wins. Source: K3 architecture sheet, section 2.6; groups as in
 * DeepSeek-V3, ranked by the sum of their two best biased scores.
 */
#include "k3.h"

typedef struct {
  const float *logits; /* [T, E] dense */
  const float *bias;   /* [E] or NULL */
  int64_t *ids;        /* [T, k] */
  float *weights;      /* [T, k] */
  int64_t T, E, k, num_groups, groups_per_token;
  int32_t is_softmax, renormalize;
  float scaling;
} route_args;

/* scores [round_up(E, 8)] with padding of zeros. */
static void score_row(const route_args *a, const float *logits, float *scores) {
  v8f total = v_zero();
  float largest = 0.0f;
  if (a->is_softmax) {
    largest = logits[0];
    for (long e = 1; e < a->E; e++) largest = logits[e] > largest ? logits[e] : largest;
  }
  for (long e = 0; e < a->E; e += LANES) {
    long n = a->E - e < LANES ? a->E - e : LANES;
    v8f x = n == LANES ? v_load(logits + e) : v_load_part(logits + e, n);
    x = a->is_softmax ? v_exp(x - v_set(largest)) : v_sigmoid(x);
    float lanes[LANES] = {0};
    v_store_part(lanes, x, n);
    v_store(scores + e, v_load(lanes));
    total = total + v_load(lanes);
  }
  if (a->is_softmax)
    for (long e = 0; e < a->E; e += LANES)
      v_store(scores + e, v_load(scores + e) / v_set(v_sum(total)));
}

/* The k best of n in falling order; entries of -infinity are never better than none. */
static void best_of(const float *value, long n, long k, int64_t *ids, float *best) {
  long found = 0;
  for (long i = 0; i < n; i++) {
    if (found == k && !(value[i] > best[k - 1])) continue;
    long at = found < k ? found++ : k - 1;
    for (; at > 0 && value[i] > best[at - 1]; at--) best[at] = best[at - 1], ids[at] = ids[at - 1];
    best[at] = value[i];
    ids[at] = i;
  }
}

/* Closes all but the best groups of `choice`. rank and best [num_groups], ids as many. */
static void close_groups(const route_args *a, float *choice, float *rank, float *best,
                         int64_t *ids) {
  long size = a->E / a->num_groups;
  for (long g = 0; g < a->num_groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (long e = g * size; e < (g + 1) * size; e++) {
      if (choice[e] > first) second = first, first = choice[e];
      else if (choice[e] > second) second = choice[e];
    }
    rank[g] = size > 1 ? first + second : first;
  }
  best_of(rank, a->num_groups, a->groups_per_token, ids, best);
  for (long g = 0; g < a->num_groups; g++) {
    int open = 0;
    for (long i = 0; i < a->groups_per_token; i++) open |= ids[i] == g;
    for (long e = g * size; !open && e < (g + 1) * size; e++) choice[e] = -INFINITY;
  }
}

static void route_row(const route_args *a, long t, float *scores, float *choice, float *rank,
                      float *best, int64_t *groups) {
  int64_t *ids = a->ids + t * a->k;
  float *weights = a->weights + t * a->k, total = 0.0f;
  score_row(a, a->logits + t * a->E, scores);
  for (long e = 0; e < a->E; e++) choice[e] = a->bias ? scores[e] + a->bias[e] : scores[e];
  if (a->groups_per_token < a->num_groups) close_groups(a, choice, rank, best, groups);
  best_of(choice, a->E, a->k, ids, best);
  for (long j = 0; j < a->k; j++) total += scores[ids[j]];
  for (long j = 0; j < a->k; j++)
    weights[j] = scores[ids[j]] / (a->renormalize ? total + 1e-20f : 1.0f) * a->scaling;
}

/* Rows of one task. */
#define ROUTE_ROWS 16

static void route_task(const void *context, long task, float *scores) {
  const route_args *a = context;
  long padded = round_up(a->E, LANES), most = a->k > a->num_groups ? a->k : a->num_groups;
  float *choice = scores + padded, *rank = choice + padded;
  /* An even place: ids are as wide as two floats. */
  int64_t *groups = (int64_t *)(rank + round_up(2 * most, LANES));
  for (long t = task * ROUTE_ROWS; t < a->T && t < (task + 1) * ROUTE_ROWS; t++)
    route_row(a, t, scores, choice, rank, rank + most, groups);
}

K3_API int k3_route(const route_args *a) {
  long padded = round_up(a->E, LANES), most = a->k > a->num_groups ? a->k : a->num_groups;
  return k3_run((a->T + ROUTE_ROWS - 1) / ROUTE_ROWS, 0, (size_t)(2 * padded + 4 * most + LANES),
                route_task, a);
}
