/* What the files of the extension share. */

#ifndef POPDIST_EXTENSION_H
#define POPDIST_EXTENSION_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* One function, compiled for several kinds of processors, of which the loader takes the best: the bits are the same,
 * because the compiler may not contract operations (-ffp-contract=off). */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_KINDS_OF_PROCESSORS
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 128 }; /* elements */

/* What a row of 16 or 32 bits holds, in the order of popdist.optim.rounding.DTYPES. */
enum { FLOAT32, FLOAT16, BFLOAT16 };

/* A tensor of a parameter, as it is held and in float32. */
typedef struct {
    char *wide, *held;     /* their first elements; in float32 only the blocks that are worked on are there */
    int64_t length, dtype; /* of the half precision */
    int64_t first;         /* number of the first element in its parameter, a multiple of BLOCK */
    int64_t position, tensor;
} Row;

typedef struct Rows Rows;

/* Draw four words in each of `num_calls` calls of the generator, a multiple of 16, of which the first has the number
 * `first`: words[i + w * num_calls] is word w of call i. */
typedef void Draw(const Rows *rows, const Row *row, uint32_t first, int num_calls, uint32_t *words);

/* Columns of rows, one after the other: in each column one tensor of each of some parameters, the same ones in all. */
struct Rows {
    const Row *rows;
    int64_t num_rows; /* of a column */
    int64_t num_columns;
    uint32_t seed[2], step; /* what random words depend on, beside the row */
    Draw *draw;
};

/* The fastest way for this processor. */
Draw *best_draw(void);

/* Work on `num_blocks` blocks of a row, from block `start` on. */
typedef void Work(const Rows *rows, const Row *row, int64_t start, int64_t num_blocks);

Work widen_blocks, round_blocks;

/* The sum of squares of a row: its address, its length, whether its numbers are doubles. */
PyObject *square_sum(PyObject *module, PyObject *args);

/* The sum of two or four rows into all of them: their addresses, how many numbers, whether these are doubles, the
 * divisor. */
PyObject *add_rows(PyObject *module, PyObject *args);

#endif
