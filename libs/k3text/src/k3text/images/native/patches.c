/* Cutting and normalising patches, one thread, plain C: no intrinsics, no libraries, no result that
 * depends on the processor. Every function writes all of its output and keeps no state. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "wide.h"

enum { CHANNELS = 3, PIXEL_BYTES = 4, NUM_BYTES = 256 };

/* The planes of one line of pixels, zero to the right of the picture. */
INLINE void split_line(const uint8_t *restrict line, ptrdiff_t width, ptrdiff_t padded_width,
                       uint8_t *restrict red, uint8_t *restrict green, uint8_t *restrict blue)
{
    for (ptrdiff_t x = 0; x < width; x++) {
        red[x] = line[PIXEL_BYTES * x];
        green[x] = line[PIXEL_BYTES * x + 1];
        blue[x] = line[PIXEL_BYTES * x + 2];
    }
    const size_t rest = (size_t)(padded_width - width);
    memset(red + width, 0, rest);
    memset(green + width, 0, rest);
    memset(blue + width, 0, rest);
}

/* One line of a plane, dealt out to the patches that it crosses. */
INLINE void deal(const uint8_t *restrict plane, ptrdiff_t columns, ptrdiff_t patch,
                 uint8_t *restrict out)
{
    const ptrdiff_t step = CHANNELS * patch * patch;
    /* A length that the compiler knows is two moves instead of a call. */
    if (patch == 14)
        for (ptrdiff_t i = 0; i < columns; i++) memcpy(out + i * step, plane + i * 14, 14);
    else
        for (ptrdiff_t i = 0; i < columns; i++)
            memcpy(out + i * step, plane + i * patch, (size_t)patch);
}

/* pixels: [height, width, 4], of which the fourth byte is ignored; width <= columns * patch and
 * height <= rows * patch. scratch: [3, columns * patch]. out: [rows * columns, 3, patch, patch],
 * zero where the picture does not reach. */
EXPORT WIDE void k3_cut(const uint8_t *restrict pixels, ptrdiff_t width, ptrdiff_t height,
                   ptrdiff_t patch, ptrdiff_t rows, ptrdiff_t columns, uint8_t *restrict scratch,
                   uint8_t *restrict out)
{
    const ptrdiff_t padded_width = columns * patch;
    const ptrdiff_t area = patch * patch;
    for (ptrdiff_t y = 0; y < rows * patch; y++) {
        uint8_t *planes[CHANNELS];
        for (int c = 0; c < CHANNELS; c++) planes[c] = scratch + c * padded_width;
        if (y < height)
            split_line(pixels + y * width * PIXEL_BYTES, width, padded_width, planes[0], planes[1],
                       planes[2]);
        else if (y == height)
            memset(scratch, 0, (size_t)(CHANNELS * padded_width));
        uint8_t *first = out + (y / patch) * columns * CHANNELS * area + (y % patch) * patch;
        for (int c = 0; c < CHANNELS; c++) deal(planes[c], columns, patch, first + c * area);
    }
}

/* bytes, out: [num_patches, 3, area]; tables: [3, 256], the float of every byte, a channel. */
EXPORT WIDE void k3_look_up(const uint8_t *restrict bytes, ptrdiff_t num_patches, ptrdiff_t area,
                       const float *restrict tables, float *restrict out)
{
    for (ptrdiff_t i = 0; i < num_patches * CHANNELS; i++) {
        const float *restrict table = tables + NUM_BYTES * (i % CHANNELS);
        for (ptrdiff_t k = 0; k < area; k++) out[i * area + k] = table[bytes[i * area + k]];
    }
}

/* The same floats without tables, several at a time: byte / divisors[c] - shifts[c], each step
 * rounded to float32. */
EXPORT WIDE void k3_scale(const uint8_t *restrict bytes, ptrdiff_t num_patches, ptrdiff_t area,
                     const float *restrict divisors, const float *restrict shifts,
                     float *restrict out)
{
    for (ptrdiff_t i = 0; i < num_patches * CHANNELS; i++) {
        const float divisor = divisors[i % CHANNELS], shift = shifts[i % CHANNELS];
        for (ptrdiff_t k = 0; k < area; k++) out[i * area + k] = bytes[i * area + k] / divisor - shift;
    }
}
