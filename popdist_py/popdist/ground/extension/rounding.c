/* Rounding of float32 to half precision by random bits: popdist.optim.rounding, to the same bits, faster. */

#include "extension.h"

/* Calls of the generator for a block: each gives four words, of which an element takes one or half of one. */
enum { CALLS = BLOCK / 4, CALLS_OF_HALVES = BLOCK / 8 };

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

INLINE void round_block(const Rounding *of, int64_t block, const char *from, uint16_t *to) {
    uint32_t words[BLOCK], bits[BLOCK];
    memcpy(bits, from, sizeof bits);
    if (of->dtype == BFLOAT16) {
        of->draw(of, (uint32_t)(block * CALLS_OF_HALVES), CALLS_OF_HALVES, words);
        for (int i = 0; i < BLOCK / 2; i++) to[i] = (uint16_t)to_bfloat16(bits[i], words[i] & 0xFFFF);
        for (int i = 0; i < BLOCK / 2; i++)
            to[i + BLOCK / 2] = (uint16_t)to_bfloat16(bits[i + BLOCK / 2], words[i] >> 16);
    } else {
        of->draw(of, (uint32_t)(block * CALLS), CALLS, words);
        round_to_float16(bits, words, to);
    }
}

FOR_EACH_PROCESSOR void round_blocks(const Rounding *of, int64_t start, int64_t num_blocks) {
    for (int64_t block = start; block < start + num_blocks; block++) {
        const char *from = of->wide + block * BLOCK * sizeof(float);
        uint16_t *to = of->held + block * BLOCK;
        int64_t left = of->length - block * BLOCK, number = of->first / BLOCK + block;
        if (left >= BLOCK) {
            round_block(of, number, from, to);
        } else {
            float padded[BLOCK] = {0};
            uint16_t rounded[BLOCK];
            memcpy(padded, from, left * sizeof(float));
            round_block(of, number, (const char *)padded, rounded);
            memcpy(to, rounded, left * sizeof(uint16_t));
        }
    }
}
