/* Random words by Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011). */

#include "extension.h"

enum { ROUNDS = 10 };

static const uint32_t multipliers[2] = {0xD2511F53u, 0xCD9E8D57u}, steps_of_key[2] = {0x9E3779B9u, 0xBB67AE85u};

static void draw_anywhere(const Rounding *of, uint32_t first, int num_calls, uint32_t *words) {
    for (int i = 0; i < num_calls; i++) {
        uint32_t a = first + (uint32_t)i, b = of->step, c = of->position, d = of->tensor;
        uint32_t k = of->seed[0], l = of->seed[1];
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t left = (uint64_t)a * multipliers[0], right = (uint64_t)c * multipliers[1];
            a = (uint32_t)(right >> 32) ^ b ^ k, b = (uint32_t)right;
            c = (uint32_t)(left >> 32) ^ d ^ l, d = (uint32_t)left;
            k += steps_of_key[0], l += steps_of_key[1];
        }
        words[i] = a, words[i + num_calls] = b, words[i + 2 * num_calls] = c, words[i + 3 * num_calls] = d;
    }
}

#ifdef HAS_KINDS_OF_PROCESSORS

#include <immintrin.h>

/* Two vectors of 64-bit lanes hold consecutive calls in turn. Only the lower half of a lane counts, and this is all that
 * the instruction reads which multiplies 32 bits by 32 bits; a compiler does not find it by itself. */
#define DRAW(NAME, TARGET, NUM_LANES, VECTOR, MULTIPLY)                                                              \
    __attribute__((target(TARGET))) static void NAME(const Rounding *of, uint32_t first, int num_calls,               \
                                                     uint32_t *words) {                                              \
        typedef uint64_t Lanes __attribute__((vector_size(8 * NUM_LANES)));                                          \
        const Lanes zero = {0}, m = zero + multipliers[0], n = zero + multipliers[1];                                \
        for (int start = 0; start < num_calls; start += 2 * NUM_LANES) {                                             \
            Lanes a[2], b[2], c[2], d[2];                                                                            \
            for (int j = 0; j < 2; j++) {                                                                            \
                for (int i = 0; i < NUM_LANES; i++) a[j][i] = first + (uint32_t)(start + 2 * i + j);                 \
                b[j] = zero + of->step, c[j] = zero + of->position, d[j] = zero + of->tensor;                        \
            }                                                                                                        \
            uint32_t k = of->seed[0], l = of->seed[1];                                                               \
            _Pragma("GCC unroll 10") for (int round = 0; round < ROUNDS; round++) {                                  \
                for (int j = 0; j < 2; j++) {                                                                        \
                    Lanes left = (Lanes)MULTIPLY((VECTOR)a[j], (VECTOR)m);                                           \
                    Lanes right = (Lanes)MULTIPLY((VECTOR)c[j], (VECTOR)n);                                          \
                    a[j] = right >> 32 ^ b[j] ^ (zero + k), b[j] = right;                                            \
                    c[j] = left >> 32 ^ d[j] ^ (zero + l), d[j] = left;                                              \
                }                                                                                                    \
                k += steps_of_key[0], l += steps_of_key[1];                                                          \
            }                                                                                                        \
            const Lanes both[4] = {PAIRS(a), PAIRS(b), PAIRS(c), PAIRS(d)};                                          \
            for (int i = 0; i < 4; i++) memcpy(words + i * num_calls + start, &both[i], sizeof both[i]);             \
        }                                                                                                            \
    }

#define PAIRS(x) ((x[0] & 0xFFFFFFFFu) | x[1] << 32)

DRAW(draw_with_avx2, "avx2", 4, __m256i, _mm256_mul_epu32)
DRAW(draw_with_avx512, "avx512f", 8, __m512i, _mm512_mul_epu32)

Draw *best_draw(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return draw_with_avx512;
    return __builtin_cpu_supports("avx2") ? draw_with_avx2 : draw_anywhere;
}

#else

Draw *best_draw(void) { return draw_anywhere; }

#endif
