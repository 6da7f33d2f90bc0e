/* What the files of this folder's extension share. */

#ifndef POPDIST_ARITHMETIC_H
#define POPDIST_ARITHMETIC_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* One function, compiled for several kinds of processors, of which the loader takes the best: the bits are the same,
 * because the compiler may not contract operations (-ffp-contract=off). */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 128 }; /* elements */

/* What a row of 16 or 32 bits holds, in the order of popdist.optim.rounding.DTYPES. */
enum { FLOAT32, FLOAT16, BFLOAT16 };

/* A row that is widened or rounded. */
typedef struct {
    char *from, *to;
    int64_t length, dtype; /* of the half precision */
    int64_t first;         /* number of the first element in its parameter, a multiple of BLOCK */
    int64_t position, tensor;
} Row;

/* Rows, and what their random bits depend on. */
typedef struct {
    const Row *rows;
    int64_t num_rows;
    uint32_t seed[2], step;
} Rows;

/* Work on `num_blocks` blocks of a row, from block `start` on. */
typedef void Work(const Rows *rows, const Row *row, int64_t start, int64_t num_blocks);

/* Do `work` on all blocks of all rows, by several of the threads that torch has. */
void work_on(const Rows *rows, Work *work, int num_threads);

Work widen_blocks, round_blocks;

/* The sum of squares of a row: its address, its length, whether its numbers are doubles. */
PyObject *square_sum(PyObject *module, PyObject *args);

#endif
