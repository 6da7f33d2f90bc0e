/* Rounding of float32 to half precision by random bits: popdist.optim.rounding, to the same bits, faster. */

#include "extension.h"

/* Calls of the generator for a block: each gives four words, of which an element takes one or half of one. */
enum { CALLS = BLOCK / 4, CALLS_OF_HALVES = BLOCK / 8 };

/* ---- Rounding ---------------------------------------------------------------------------------------------------- */

/* Round to nearest, as beyond the largest finite value; NaN is one NaN. */
static inline uint32_t nearest_bfloat16(uint32_t bits) {
    uint32_t even = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : even;
}

static inline uint32_t to_bfloat16(uint32_t bits, uint32_t half) {
    uint32_t up = (bits + half) >> 16;
    return (bits & 0x7FFFFFFF) > 0x7F7F0000 ? nearest_bfloat16(bits) : up;
}

/* Without branches, so that many elements are rounded at once. */
static inline uint32_t choose(int condition, uint32_t yes, uint32_t no) {
    return no ^ ((yes ^ no) & -(uint32_t)condition);
}

/* `units`: the value in units of the smallest subnormal number, 2**-24, or anything small if it is no subnormal. */
static inline uint32_t to_float16(uint32_t bits, float units, uint32_t word) {
    uint32_t size = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
    uint32_t normal = ((size + (word >> 19)) >> 13) - (112 << 10);
    int32_t whole = (int32_t)units;
    int32_t limit = (int32_t)((units - (float)whole) * 2147483648.0f);
    uint32_t subnormal = (uint32_t)whole + ((int32_t)(word >> 1) < limit);
    uint32_t beyond = choose(size < 0x477FF000, 0x7BFF, 0x7C00); /* 65520 is infinite */
    uint32_t finite = sign | choose(size < 0x38800000, subnormal, choose(size > 0x477FE000, beyond, normal));
    return choose(size > 0x7F800000, 0x7E00, finite);
}

INLINE void round_to_float16(const uint32_t *bits, const uint32_t *words, uint16_t *to) {
    uint32_t small[BLOCK];
    float values[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        uint32_t size = bits[i] & 0x7FFFFFFF;
        small[i] = choose(size < 0x38800000, size, 0);
    }
    memcpy(values, small, sizeof values);
    for (int i = 0; i < BLOCK; i++) to[i] = (uint16_t)to_float16(bits[i], values[i] * 16777216.0f, words[i]);
}

INLINE void round_block(const Rows *rows, const Row *row, int64_t block, const char *from, uint16_t *to) {
    uint32_t words[BLOCK], bits[BLOCK];
    memcpy(bits, from, sizeof bits);
    if (row->dtype == BFLOAT16) {
        rows->draw(rows, row, (uint32_t)(block * CALLS_OF_HALVES), CALLS_OF_HALVES, words);
        for (int i = 0; i < BLOCK / 2; i++) to[i] = (uint16_t)to_bfloat16(bits[i], words[i] & 0xFFFF);
        for (int i = 0; i < BLOCK / 2; i++)
            to[i + BLOCK / 2] = (uint16_t)to_bfloat16(bits[i + BLOCK / 2], words[i] >> 16);
    } else {
        rows->draw(rows, row, (uint32_t)(block * CALLS), CALLS, words);
        round_to_float16(bits, words, to);
    }
}

FOR_EACH_PROCESSOR static void round_some(const Rows *rows, const Row *row, int64_t start, int64_t num_blocks) {
    for (int64_t block = start; block < start + num_blocks; block++) {
        const char *from = row->wide + block * BLOCK * sizeof(float);
        uint16_t *to = (uint16_t *)row->held + block * BLOCK;
        int64_t left = row->length - block * BLOCK, number = row->first / BLOCK + block;
        if (left >= BLOCK) {
            round_block(rows, row, number, from, to);
        } else {
            float padded[BLOCK] = {0};
            uint16_t rounded[BLOCK];
            memcpy(padded, from, left * sizeof(float));
            round_block(rows, row, number, (const char *)padded, rounded);
            memcpy(to, rounded, left * sizeof(uint16_t));
        }
    }
}

void round_blocks(const Rows *rows, const Row *row, int64_t start, int64_t num_blocks) {
    int64_t first = start * BLOCK, left = row->length - first, length = num_blocks * BLOCK;
    if (row->dtype != FLOAT32) round_some(rows, row, start, num_blocks);
    else memcpy((float *)row->held + first, (float *)row->wide + first, (length < left ? length : left) * sizeof(float));
}

/* ---- Widening ------------------------------------------------------------------------------------------------------ */

/* Without the sign: a subnormal number is a normal one of float32, and infinity and NaN have the largest exponent. */
INLINE void widen_float16(const uint16_t *from, float *to, int64_t length) {
    const uint32_t up = 0x77800000; /* 2**112 */
    float factor;
    memcpy(&factor, &up, sizeof factor);
    for (int64_t i = 0; i < length; i++) {
        uint32_t size = (uint32_t)(from[i] & 0x7FFF) << 13, bits;
        float value;
        memcpy(&value, &size, sizeof value);
        value *= factor;
        memcpy(&bits, &value, sizeof bits);
        bits |= (uint32_t)(from[i] & 0x8000) << 16 | (0x7F800000 & -(uint32_t)(size >= 0x0F800000));
        memcpy(&to[i], &bits, sizeof bits);
    }
}

INLINE void widen_bfloat16(const uint16_t *from, float *to, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}

FOR_EACH_PROCESSOR static void widen_some(const Row *row, int64_t start, int64_t length) {
    float *to = (float *)row->wide + start;
    if (row->dtype == BFLOAT16) widen_bfloat16((const uint16_t *)row->held + start, to, length);
    else if (row->dtype == FLOAT16) widen_float16((const uint16_t *)row->held + start, to, length);
    else memcpy(to, (const float *)row->held + start, length * sizeof(float));
}

void widen_blocks(const Rows *rows, const Row *row, int64_t start, int64_t num_blocks) {
    int64_t left = row->length - start * BLOCK, length = num_blocks * BLOCK;
    (void)rows;
    widen_some(row, start * BLOCK, length < left ? length : left);
}
