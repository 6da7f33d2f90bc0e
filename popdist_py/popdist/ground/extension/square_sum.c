/* The sum of squares of a row of numbers in the order of popdist.optim.square_sums: blocks of 128 elements, in float64,
 * and a binary tree over the blocks. */

#include "extension.h"

#define DEFINE_BLOCK_SUM(TYPE)                                                                                \
    FOR_EACH_PROCESSOR static double block_sum_##TYPE(const TYPE *x) {                                        \
        double sums[BLOCK / 2];                                                                               \
        for (int i = 0; i < BLOCK / 2; i++)                                                                   \
            sums[i] = (double)x[i] * (double)x[i] + (double)x[i + BLOCK / 2] * (double)x[i + BLOCK / 2];      \
        for (int i = 0; i < 32; i++) sums[i] += sums[i + 32];                                                 \
        for (int i = 0; i < 16; i++) sums[i] += sums[i + 16];                                                 \
        for (int i = 0; i < 8; i++) sums[i] += sums[i + 8];                                                   \
        for (int i = 0; i < 4; i++) sums[i] += sums[i + 4];                                                   \
        return (sums[0] + sums[2]) + (sums[1] + sums[3]);                                                     \
    }                                                                                                         \
    static double last_sum_##TYPE(const TYPE *x, int64_t length) {                                            \
        TYPE padded[BLOCK] = {0};                                                                             \
        memcpy(padded, x, length * sizeof(TYPE));                                                             \
        return block_sum_##TYPE(padded);                                                                      \
    }                                                                                                         \
    /* held[level] is the sum of 2**level blocks; the binary digits of the number of blocks say which are held. */ \
    static double sum_##TYPE(const TYPE *x, int64_t length) {                                                 \
        double held[64];                                                                                      \
        int64_t num_blocks = (length + BLOCK - 1) / BLOCK;                                                    \
        for (int64_t block = 0; block < num_blocks; block++) {                                                \
            int64_t left = length - block * BLOCK;                                                            \
            const TYPE *start = x + block * BLOCK;                                                            \
            double sum = left < BLOCK ? last_sum_##TYPE(start, left) : block_sum_##TYPE(start);               \
            int level = 0;                                                                                    \
            for (; block >> level & 1; level++) sum = held[level] + sum;                                      \
            held[level] = sum;                                                                                \
        }                                                                                                     \
        double total = 0;                                                                                     \
        int is_first = 1;                                                                                     \
        for (int level = 0; level < 63; level++)                                                              \
            if (num_blocks >> level & 1) {                                                                    \
                total = is_first ? held[level] : held[level] + total;                                         \
                is_first = 0;                                                                                 \
            }                                                                                                 \
        return total;                                                                                         \
    }

typedef float f32;
typedef double f64;
DEFINE_BLOCK_SUM(f32)
DEFINE_BLOCK_SUM(f64)

PyObject *square_sum(PyObject *module, PyObject *args) {
    unsigned long long address;
    long long length;
    int is_double;
    double total;
    (void)module;
    if (!PyArg_ParseTuple(args, "KLp", &address, &length, &is_double)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    total = is_double ? sum_f64((const double *)(uintptr_t)address, length)
                      : sum_f32((const float *)(uintptr_t)address, length);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(total);
}
