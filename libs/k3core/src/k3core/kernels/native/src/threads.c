#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define MAX_THREADS 256
/* Rounds of waiting awake, some tens of microseconds, before a thread sleeps or yields. */
#define SPINS 2000
/* Scratch that a thread keeps between calls, at most. */
#define KEPT_FLOATS (1UL << 24)
/* `claim` holds a generation in its upper and the next task in its lower half. */
#define TASK_BITS 32
#define CLOSED 0xffffffffUL

/* One job at a time. A thread may take task i of generation g only by moving `claim` from
 * (g, i) to (g, i + 1); the fields are rewritten while `claim` is closed, so a late thread
 * that read old or half-new fields fails to move it and looks again. */
static struct {
  pthread_mutex_t owner, sleep;
  pthread_cond_t wake;
  _Atomic uint64_t claim;
  _Atomic long tasks, done;
  _Atomic size_t scratch;
  _Atomic(k3_task) run;
  _Atomic(const void *) context;
  _Atomic int failed, sleepers, limit;
  int workers; /* started so far; changed by the owner only */
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER,
          .sleep = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .claim = CLOSED,
          .limit = 1};

static __thread float *kept;
static __thread size_t kept_floats;

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

static float *own_scratch(size_t floats) {
  if (kept && kept_floats >= floats) return kept;
  free(kept);
  size_t bytes = ((floats + 16) * sizeof(float) + 63) / 64 * 64;
  kept = aligned_alloc(64, bytes);
  kept_floats = kept ? floats : 0;
  return kept;
}

static void drop_large_scratch(void) {
  if (kept_floats <= KEPT_FLOATS) return;
  free(kept);
  kept = NULL;
  kept_floats = 0;
}

/* Takes tasks of the present job until none is left. */
static void work(void) {
  uint64_t claim = atomic_load(&pool.claim);
  for (;;) {
    k3_task run = atomic_load(&pool.run);
    const void *context = atomic_load(&pool.context);
    long tasks = atomic_load(&pool.tasks);
    size_t scratch = atomic_load(&pool.scratch);
    long task = (long)(claim & CLOSED);
    if ((claim & CLOSED) == CLOSED || task >= tasks) break;
    if (!atomic_compare_exchange_weak(&pool.claim, &claim, claim + 1)) continue;
    float *memory = own_scratch(scratch);
    if (memory)
      run(context, task, memory);
    else
      atomic_store(&pool.failed, 1);
    atomic_fetch_add(&pool.done, 1);
    claim = atomic_load(&pool.claim);
  }
  drop_large_scratch();
}

static void *helper(void *argument) {
  int number = (int)(intptr_t)argument;
  uint64_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < SPINS && atomic_load(&pool.claim) >> TASK_BITS == seen; spin++)
      pause_briefly();
    if (atomic_load(&pool.claim) >> TASK_BITS == seen) {
      pthread_mutex_lock(&pool.sleep);
      atomic_fetch_add(&pool.sleepers, 1);
      while (atomic_load(&pool.claim) >> TASK_BITS == seen)
        pthread_cond_wait(&pool.wake, &pool.sleep);
      atomic_fetch_sub(&pool.sleepers, 1);
      pthread_mutex_unlock(&pool.sleep);
    }
    seen = atomic_load(&pool.claim) >> TASK_BITS;
    if (number < atomic_load(&pool.limit)) work();
  }
  return NULL;
}

/* A child process has the pool's memory but none of its threads. */
static void forget_helpers(void) {
  pthread_mutex_init(&pool.owner, NULL);
  pthread_mutex_init(&pool.sleep, NULL);
  pthread_cond_init(&pool.wake, NULL);
  atomic_store(&pool.sleepers, 0);
  pool.workers = 0;
}

static void start_helpers(void) {
  static int watches_forks = 0;
  if (!watches_forks) watches_forks = pthread_atfork(NULL, NULL, forget_helpers) == 0;
  if (pool.workers >= atomic_load(&pool.limit) - 1) return;
  /* Signals are the interpreter's business: helpers take none. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (pool.workers < atomic_load(&pool.limit) - 1) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)(pool.workers + 1)) != 0) break;
    pthread_detach(thread);
    pool.workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int run_alone(long tasks, size_t scratch_floats, k3_task run, const void *context) {
  float *memory = own_scratch(scratch_floats);
  if (memory == NULL) return 1;
  for (long task = 0; task < tasks; task++) run(context, task, memory);
  drop_large_scratch();
  return 0;
}

static void publish(long tasks, size_t scratch_floats, k3_task run, const void *context) {
  uint64_t generation = (atomic_load(&pool.claim) >> TASK_BITS) + 1;
  atomic_store(&pool.claim, generation << TASK_BITS | CLOSED);
  atomic_store(&pool.tasks, tasks);
  atomic_store(&pool.scratch, scratch_floats);
  atomic_store(&pool.run, run);
  atomic_store(&pool.context, context);
  atomic_store(&pool.done, 0);
  atomic_store(&pool.failed, 0);
  atomic_store(&pool.claim, (generation + 1) << TASK_BITS);
  if (atomic_load(&pool.sleepers) > 0) {
    pthread_mutex_lock(&pool.sleep);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep);
  }
}

int k3_run(long tasks, int alone, size_t scratch_floats, k3_task run, const void *context) {
  if (alone || tasks < 2 || tasks >= (long)CLOSED || atomic_load(&pool.limit) < 2 ||
      pthread_mutex_trylock(&pool.owner) != 0)
    return run_alone(tasks, scratch_floats, run, context);
  start_helpers();
  publish(tasks, scratch_floats, run, context);
  work();
  for (int spin = 0; atomic_load(&pool.done) < tasks; spin++) {
    if (spin < SPINS)
      pause_briefly();
    else
      sched_yield();
  }
  int failed = atomic_load(&pool.failed);
  pthread_mutex_unlock(&pool.owner);
  return failed;
}

__attribute__((visibility("default"))) void k3_set_threads(int count) {
  atomic_store(&pool.limit, count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count);
}

__attribute__((visibility("default"))) int k3_get_threads(void) {
  return atomic_load(&pool.limit);
}
