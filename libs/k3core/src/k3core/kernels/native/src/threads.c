/* How many threads the parallel regions use; the process decides, once or at any time. */
#include "k3.h"

int k3_threads = 1;

K3_API void k3_set_threads(int count) { k3_threads = count < 1 ? 1 : count; }

K3_API int k3_get_threads(void) { return k3_threads; }
