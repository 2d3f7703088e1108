/* How the steps are compiled: once for any processor of the machine's kind and, where the loader can
 * choose between the two when it loads them, once more for 256-bit integers. Same bits either way. */

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
/* What a step is made of has to be compiled with it, for the same processor. */
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif
