// SHA-256 of whole blocks (FIPS 180-4) with the SHA instructions of x86-64.
//
// There is no form without them: in plain C it was slower than what OpenSSL has for such processors.
#ifndef K3_SHA256_H
#define K3_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { K3_BLOCK_BYTES = 64 };

// Whether this processor has the instructions; nothing else may be called where it has not.
int k3_has_sha_instructions(void);

// Goes on from `state` over `num_blocks` blocks.
void k3_compress(uint32_t state[8], const uint8_t *blocks, size_t num_blocks);

#endif
