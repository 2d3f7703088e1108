/* Expert weights brought into panels (panel.h), from bytes of MXFP4 or from plain rows.
 *
 * Source: OCP Microscaling Formats v1.0: two E2M1 elements a byte, the earlier in the low half,
 * and one E8M0 scale a group.
 */
#ifndef K3_EXPERT_PANELS_H
#define K3_EXPERT_PANELS_H

#include "panel.h"

/* Weights as stored: K3_F32, K3_BF16, or two elements a byte with one scale a group. */
enum { K3_MXFP4 = 2 };

/* Elements of a row that are unpacked together: four bytes. */
#define IN_WORD 8

typedef struct {
  const void *w;
  const uint8_t *scales; /* of packed weights, K / group a row */
  long K, group;
  int type;
} expert_weight;

/* 2^(exponent - 128): half of the E8M0 scale, for the table holds twice the magnitudes. */
K3_INLINE float half_scale(uint8_t exponent) {
  union { uint32_t u; float f; } word;
  word.u = exponent >= 2 ? (uint32_t)(exponent - 1) << 23 : 0x00200000u << exponent;
  return word.f;
}

/* Element j of a word of eight rows: four bits of each lane, of which the highest is the sign. */
K3_INLINE v8f unpack_lanes(v8i word, const int j, v8f scale) {
#ifdef __AVX2__
  const __m256 twice = _mm256_setr_ps(0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f);
  v8f value = (v8f)_mm256_permutevar8x32_ps(twice, (__m256i)(word >> (4 * j)));
#else
  static const float twice[8] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f};
  v8f value;
  for (int i = 0; i < LANES; i++) value[i] = twice[word[i] >> (4 * j) & 7];
#endif
  v8i sign = (word << (28 - 4 * j)) & (v8i)v_set(-0.0f);
  return (v8f)((v8i)value ^ sign) * scale;
}

/* The next word of each of eight rows. */
K3_INLINE v8i load_words(const uint8_t *const *rows, long at) {
  int32_t w[LANES];
  for (int i = 0; i < LANES; i++) memcpy(w + i, rows[i] + at, sizeof *w);
  return (v8i){w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]};
}

/* The next four words of each of eight rows. */
K3_INLINE void load_four_words(v8i words[4], const uint8_t *const *rows, long at) {
#ifdef __AVX2__
  __m256i row[4];
  for (int i = 0; i < 4; i++) {
    __m128i low = _mm_loadu_si128((const __m128i *)(rows[i] + at));
    __m128i high = _mm_loadu_si128((const __m128i *)(rows[i + 4] + at));
    row[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  __m256i a = _mm256_unpacklo_epi32(row[0], row[1]), b = _mm256_unpackhi_epi32(row[0], row[1]);
  __m256i c = _mm256_unpacklo_epi32(row[2], row[3]), d = _mm256_unpackhi_epi32(row[2], row[3]);
  words[0] = (v8i)_mm256_unpacklo_epi64(a, c);
  words[1] = (v8i)_mm256_unpackhi_epi64(a, c);
  words[2] = (v8i)_mm256_unpacklo_epi64(b, d);
  words[3] = (v8i)_mm256_unpackhi_epi64(b, d);
#else
  for (int i = 0; i < 4; i++) words[i] = load_words(rows, at + 4 * i);
#endif
}

K3_INLINE void unpack_word(float *to, v8i word, v8f scale) {
  for (int j = 0; j < IN_WORD; j++) v_store(to + j * PANEL, unpack_lanes(word, j, scale));
}

/* Columns from..from + n, whole words, of eight packed rows into half a panel. */
static void unpack_half(float *to, const expert_weight *e, const long *rows, long from, long n) {
  const uint8_t *bytes[LANES];
  for (int i = 0; i < LANES; i++) bytes[i] = (const uint8_t *)e->w + rows[i] * (e->K / 2);
  for (long k = from, end = from + n; k < end;) {
    long group = k / e->group, last = (group + 1) * e->group < end ? (group + 1) * e->group : end;
    float s[LANES];
    for (int i = 0; i < LANES; i++)
      s[i] = half_scale(e->scales[rows[i] * (e->K / e->group) + group]);
    v8f scale = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
    for (; k + 4 * IN_WORD <= last; k += 4 * IN_WORD, to += 4 * IN_WORD * PANEL) {
      v8i words[4];
      load_four_words(words, bytes, k / 2);
      for (int i = 0; i < 4; i++) unpack_word(to + i * IN_WORD * PANEL, words[i], scale);
    }
    for (; k < last; k += IN_WORD, to += IN_WORD * PANEL)
      unpack_word(to, load_words(bytes, k / 2), scale);
  }
}

/* Half panels, and at most rows, that are multiplied as they are unpacked. */
#define TOGETHER 4
#define PACKED_ROWS 3

static inline int can_multiply_packed(const expert_weight *e, long rows) {
  return rows <= PACKED_ROWS && e->type == K3_MXFP4 && e->group % (4 * IN_WORD) == 0 &&
         panel_chain(e->K) % IN_WORD == 0;
}

/* The next four words of TOGETHER half panels; at a group's start their scales too. */
K3_INLINE void load_packed(v8i words[TOGETHER][4], v8f *scale, const expert_weight *e,
                           const uint8_t *const *bytes, const long *rows, long k) {
  for (int h = 0; h < TOGETHER; h++) {
    load_four_words(words[h], bytes + h * LANES, k / 2);
    if (k % e->group) continue;
    float s[LANES];
    for (int i = 0; i < LANES; i++)
      s[i] = half_scale(e->scales[rows[h * LANES + i] * (e->K / e->group) + k / e->group]);
    scale[h] = (v8f){s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
  }
}

/* `height` rows x against TOGETHER half panels without laying these down: the chains are those of
 * `panel_tile`, so the bits are too. Sums go to out [height, TOGETHER * LANES]. */
K3_INLINE void multiply_packed(const int height, const float *const *x, const expert_weight *e,
                               const long *rows, float *out) {
  const uint8_t *bytes[TOGETHER * LANES];
  for (int i = 0; i < TOGETHER * LANES; i++)
    bytes[i] = (const uint8_t *)e->w + rows[i] * (e->K / 2);
  long chain = panel_chain(e->K);
  v8f sum[PACKED_ROWS][TOGETHER], scale[TOGETHER] = {v_zero()};
  v8i words[TOGETHER][4];
  for (int r = 0; r < height; r++)
    for (int h = 0; h < TOGETHER; h++) sum[r][h] = v_zero();
  for (long k = 0; k < e->K; k += IN_WORD) {
    long i = k % (4 * IN_WORD) / IN_WORD;
    if (i == 0) load_packed(words, scale, e, bytes, rows, k);
    for (int j = 0; j < IN_WORD; j++) {
      v8f value[PACKED_ROWS];
      for (int r = 0; r < height; r++) value[r] = v_set(x[r][k + j]);
      for (int h = 0; h < TOGETHER; h++) {
        v8f w = unpack_lanes(words[h][i], j, scale[h]);
        for (int r = 0; r < height; r++) sum[r][h] = v_fma(value[r], w, sum[r][h]);
      }
    }
    if ((k + IN_WORD) % chain && k + IN_WORD < e->K) continue;
    for (int r = 0; r < height; r++)
      for (int h = 0; h < TOGETHER; h++) {
        float *place = out + (r * TOGETHER + h) * LANES;
        v_store(place, k < chain ? sum[r][h] : v_load(place) + sum[r][h]);
        sum[r][h] = v_zero();
      }
  }
}

/* out [rows, n] of few rows x [rows, K]; `named` has room for TOGETHER * LANES rows behind n. */
static void multiply_few(long rows, const float *const *x, const expert_weight *e, long *named,
                         long n, float *out, long out_row) {
  float sums[PACKED_ROWS * TOGETHER * LANES];
  for (long i = n; i < n + TOGETHER * LANES; i++) named[i] = named[n - 1];
  for (long i = 0; i < n; i += TOGETHER * LANES) {
    switch (rows) {
      case 1: multiply_packed(1, x, e, named + i, sums); break;
      case 2: multiply_packed(2, x, e, named + i, sums); break;
      default: multiply_packed(3, x, e, named + i, sums); break;
    }
    long width = n - i < TOGETHER * LANES ? n - i : TOGETHER * LANES;
    for (long r = 0; r < rows; r++)
      copy_floats(out + r * out_row + i, sums + r * TOGETHER * LANES, width);
  }
}

static void widen_half(float *to, const expert_weight *e, const long *rows, long from, long n) {
  float row[LANES][LANES];
  for (long k = 0; k < n; k += LANES) {
    long width = n - k < LANES ? n - k : LANES;
    v8f block[LANES];
    for (int i = 0; i < LANES; i++) {
      load_row(row[i], e->w, rows[i] * e->K + from + k, e->type, width);
      block[i] = width == LANES ? v_load(row[i]) : v_load_part(row[i], width);
    }
    v_transpose8(block);
    for (int j = 0; j < width; j++) v_store(to + (k + j) * PANEL, block[j]);
  }
}

/* Columns from..from + n of the rows named into panels of n columns; behind the last row its own
 * elements stand again, which fill lanes that nobody reads. */
static void fill_panels(float *to, const expert_weight *e, const long *rows, long count, long from,
                        long n) {
  for (long first = 0; first < round_up(count, PANEL); first += LANES) {
    long named[LANES];
    for (int i = 0; i < LANES; i++) named[i] = rows[first + i < count ? first + i : count - 1];
    float *half = to + first / PANEL * n * PANEL + first % PANEL;
    if (e->type == K3_MXFP4)
      unpack_half(half, e, named, from, n);
    else
      widen_half(half, e, named, from, n);
  }
}

#endif
