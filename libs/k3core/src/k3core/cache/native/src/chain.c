// The chained digests of a run of units in one call.
//
// A digest covers a parent and all units of its group so far. The state of the hash is copied after
// each unit, and the copy is padded and finished; the digest of a group's last unit is the parent of
// the next group.
#include <string.h>

#include "sha256.h"

#define EXPORT __attribute__((visibility("default")))

enum { DIGEST_BYTES = 16, LENGTH_PLACE = 56 };

typedef struct {
    uint64_t num_bytes;
    uint32_t state[8];
    // What does not fill a block yet: num_bytes % K3_BLOCK_BYTES of it count.
    uint8_t rest[K3_BLOCK_BYTES];
} Hash;

static void absorb(Hash *hash, const uint8_t *data, size_t num_bytes) {
    size_t held = hash->num_bytes % K3_BLOCK_BYTES;
    hash->num_bytes += num_bytes;
    if (held) {
        size_t wanted = K3_BLOCK_BYTES - held;
        size_t taken = num_bytes < wanted ? num_bytes : wanted;
        memcpy(hash->rest + held, data, taken);
        if (taken < wanted) return;
        k3_compress(hash->state, hash->rest, 1);
        data += taken, num_bytes -= taken;
    }
    k3_compress(hash->state, data, num_bytes / K3_BLOCK_BYTES);
    size_t left = num_bytes % K3_BLOCK_BYTES;
    memcpy(hash->rest, data + num_bytes - left, left);
}

static void start(Hash *hash, const uint8_t parent[DIGEST_BYTES]) {
    // Fractions of the square roots of the first eight primes (FIPS 180-4, 5.3.3).
    static const uint32_t initial[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    memcpy(hash->state, initial, sizeof initial);
    hash->num_bytes = 0;
    absorb(hash, parent, DIGEST_BYTES);
}

// Writes the digest of what was absorbed so far, and leaves `hash` as it was.
static void write_digest(const Hash *hash, uint8_t digest[DIGEST_BYTES]) {
    uint32_t state[8];
    uint8_t last[2 * K3_BLOCK_BYTES] = {0};
    size_t held = hash->num_bytes % K3_BLOCK_BYTES;
    size_t num_blocks = held < LENGTH_PLACE ? 1 : 2;
    uint64_t num_bits = hash->num_bytes * 8;
    memcpy(state, hash->state, sizeof state);
    memcpy(last, hash->rest, held);
    last[held] = 0x80;
    uint8_t *end = last + num_blocks * K3_BLOCK_BYTES;
    for (int i = 1; i <= 8; i++, num_bits >>= 8) end[-i] = (uint8_t)num_bits;
    k3_compress(state, last, num_blocks);
    for (int i = 0; i < DIGEST_BYTES; i++) digest[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}

// Whether k3_chain_digests may be called on this processor.
EXPORT int k3_can_chain(void) {
    return k3_has_sha_instructions() != 0;
}

// Writes the digests of units num_seen .. num_units - 1; those before have theirs.
//
// parent: 16 bytes, what the first unit follows. num_seen: less than until_border, the units until the
// first group ends; each later group has group_units.
EXPORT void k3_chain_digests(const uint8_t *parent, const uint8_t *units, int64_t unit_bytes,
                             int64_t num_units, int64_t num_seen, int64_t until_border,
                             int64_t group_units, uint8_t *digests) {
    Hash hash;
    start(&hash, parent);
    for (int64_t unit = 0; unit < num_units; unit++, units += unit_bytes, until_border--) {
        if (!until_border) {
            start(&hash, digests - DIGEST_BYTES);
            until_border = group_units;
        }
        absorb(&hash, units, (size_t)unit_bytes);
        if (unit < num_seen) continue;
        write_digest(&hash, digests);
        digests += DIGEST_BYTES;
    }
}
