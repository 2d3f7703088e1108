/* Resizing, one thread, plain C: each byte of a resized line is a weighted sum of the bytes of some
 * lines. Across, pixels are turned first, so that what lies side by side becomes lines as well.
 * Every function writes all of its output and keeps no state. */

#include <stddef.h>
#include <stdint.h>

#include "wide.h"

enum { PIXEL_BYTES = 4, WEIGHT_BITS = 22, HALF = 1 << (WEIGHT_BITS - 1) };
enum { BLOCK = 128, TILE = 16 }; /* Bytes summed at once; lines turned at once. */

INLINE void weigh_block(const uint8_t *restrict first, ptrdiff_t line_bytes,
                               const int32_t *restrict weights, ptrdiff_t taps, int size,
                               uint8_t *restrict out)
{
    int32_t sums[BLOCK];
    for (int i = 0; i < size; i++) sums[i] = HALF;
    for (ptrdiff_t t = 0; t < taps; t++) {
        const uint8_t *restrict line = first + t * line_bytes;
        const int32_t weight = weights[t];
        for (int i = 0; i < size; i++) sums[i] += weight * line[i];
    }
    for (int i = 0; i < size; i++) {
        const int32_t value = sums[i] >> WEIGHT_BITS;
        out[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

INLINE void weigh(const uint8_t *restrict lines, ptrdiff_t line_bytes,
                         const int32_t *restrict starts, const int32_t *restrict weights,
                         ptrdiff_t num_lines, ptrdiff_t taps, uint8_t *restrict out)
{
    const ptrdiff_t whole = line_bytes - line_bytes % BLOCK;
    for (ptrdiff_t y = 0; y < num_lines; y++) {
        const uint8_t *first = lines + starts[y] * line_bytes;
        const int32_t *own = weights + y * taps;
        uint8_t *line = out + y * line_bytes;
        /* A size that the compiler knows leaves no loose ends. */
        for (ptrdiff_t x = 0; x < whole; x += BLOCK)
            weigh_block(first + x, line_bytes, own, taps, BLOCK, line + x);
        weigh_block(first + whole, line_bytes, own, taps, (int)(line_bytes - whole), line + whole);
    }
}

/* pixels: [height, width]; out: [width, height]. */
INLINE void turn(const uint32_t *restrict pixels, ptrdiff_t width, ptrdiff_t height,
                        uint32_t *restrict out)
{
    for (ptrdiff_t x = 0; x < width; x++)
        for (ptrdiff_t y = 0; y < height; y++) out[x * height + y] = pixels[y * width + x];
}

/* lines: [any, line_bytes]; starts: [num_lines]; weights: [num_lines, taps]; out: [num_lines,
 * line_bytes]. */
EXPORT WIDE void k3_weigh_rows(const uint8_t *restrict lines, ptrdiff_t line_bytes,
                               const int32_t *restrict starts, const int32_t *restrict weights,
                               ptrdiff_t num_lines, ptrdiff_t taps, uint8_t *restrict out)
{
    weigh(lines, line_bytes, starts, weights, num_lines, taps, out);
}

/* pixels: [height, width, 4]; starts: [new_width]; weights: [new_width, taps]; scratch: [16, width +
 * new_width, 4]; out: [height, new_width, 4]. */
EXPORT WIDE void k3_weigh_columns(const uint32_t *restrict pixels, ptrdiff_t width,
                                  ptrdiff_t height, const int32_t *restrict starts,
                                  const int32_t *restrict weights, ptrdiff_t new_width,
                                  ptrdiff_t taps, uint32_t *restrict scratch,
                                  uint32_t *restrict out)
{
    uint32_t *resized = scratch + TILE * width;
    for (ptrdiff_t y = 0; y < height; y += TILE) {
        const ptrdiff_t rows = height - y < TILE ? height - y : TILE;
        turn(pixels + y * width, width, rows, scratch);
        weigh((const uint8_t *)scratch, rows * PIXEL_BYTES, starts, weights, new_width, taps,
              (uint8_t *)resized);
        turn(resized, rows, new_width, out + y * new_width);
    }
}
