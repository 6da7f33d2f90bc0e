/* The sum of two or four rows of shared memory, into all of them, in one pass over each.
 *
 * The order is the tree of popdist.ground.tree, so the bits are those of row by row; but each number is loaded once and
 * stored once, where row by row takes up to twice as many of both.
 */

#include "extension.h"

#include <math.h>

/* What a sum is divided by: a power of two is a product, which has the same bits and takes less time. */
#define DEFINE_ROWS(TYPE, SPLIT, MODERATE)                                                                    \
    static void add_two_##TYPE(char *const *rows, int64_t length, TYPE over, TYPE times) {                    \
        TYPE *restrict a = (TYPE *)rows[0], *restrict b = (TYPE *)rows[1];                                    \
        if (times != 0)                                                                                       \
            for (int64_t i = 0; i < length; i++) a[i] = b[i] = (a[i] + b[i]) * times;                         \
        else                                                                                                  \
            for (int64_t i = 0; i < length; i++) a[i] = b[i] = (a[i] + b[i]) / over;                          \
    }                                                                                                         \
    static void add_four_##TYPE(char *const *rows, int64_t length, TYPE over, TYPE times) {                   \
        TYPE *restrict a = (TYPE *)rows[0], *restrict b = (TYPE *)rows[1];                                    \
        TYPE *restrict c = (TYPE *)rows[2], *restrict d = (TYPE *)rows[3];                                    \
        if (times != 0)                                                                                       \
            for (int64_t i = 0; i < length; i++)                                                              \
                a[i] = b[i] = c[i] = d[i] = ((a[i] + b[i]) + (c[i] + d[i])) * times;                          \
        else                                                                                                  \
            for (int64_t i = 0; i < length; i++)                                                              \
                a[i] = b[i] = c[i] = d[i] = ((a[i] + b[i]) + (c[i] + d[i])) / over;                           \
    }                                                                                                         \
    static TYPE inverse_##TYPE(TYPE over) {                                                                   \
        int exponent;                                                                                         \
        int is_power_of_two = SPLIT(over, &exponent) == (TYPE)0.5;                                            \
        return is_power_of_two && exponent > -MODERATE && exponent < MODERATE ? 1 / over : 0;                 \
    }                                                                                                         \
    static void add_##TYPE(char *const *rows, int num_rows, int64_t length, TYPE over) {                      \
        TYPE times = inverse_##TYPE(over);                                                                    \
        (num_rows == 2 ? add_two_##TYPE : add_four_##TYPE)(rows, length, over, times);                        \
    }

typedef float f32;
typedef double f64;
DEFINE_ROWS(f32, frexpf, 100)
DEFINE_ROWS(f64, frexp, 100)

PyObject *add_rows(PyObject *module, PyObject *args) {
    const char *addresses;
    Py_ssize_t num_bytes, length;
    int is_double;
    double over;
    char *rows[4];
    (void)module;
    if (!PyArg_ParseTuple(args, "y#npd", &addresses, &num_bytes, &length, &is_double, &over)) return NULL;
    int num_rows = (int)(num_bytes / (Py_ssize_t)sizeof(uint64_t));
    if ((num_rows != 2 && num_rows != 4) || num_bytes % sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "two rows are added here, or four");
        return NULL;
    }
    for (int i = 0; i < num_rows; i++) {
        uint64_t address;
        memcpy(&address, addresses + i * sizeof address, sizeof address);
        rows[i] = (char *)(uintptr_t)address;
    }
    Py_BEGIN_ALLOW_THREADS
    if (is_double) add_f64(rows, num_rows, length, over);
    else add_f32(rows, num_rows, length, (float)over);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
