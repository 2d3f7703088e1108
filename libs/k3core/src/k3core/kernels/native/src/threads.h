/* Running the tasks of one operator on a few threads.
 *
 * A call ends when its tasks are done, not when every thread has come by: a helper that the
 * system does not schedule, on a machine busy with other processes, holds nobody up. Which
 * thread runs a task never changes a result.
 */
#ifndef K3_THREADS_H
#define K3_THREADS_H

#include <stddef.h>

/* Threads that a call may use, the calling one included. */
int k3_get_threads(void);

/* One task; scratch has the size asked for, on a cache line, with rubbish in it. */
typedef void (*k3_task)(const void *context, long task, float *scratch);

/* Runs tasks 0..tasks - 1, in the calling thread alone if there is one task, if `alone`, or
 * while another thread's call has the helpers. Returns 0, or 1 if a task had no scratch
 * (nothing is then promised). */
int k3_run(long tasks, int alone, size_t scratch_floats, k3_task run, const void *context);

#endif
