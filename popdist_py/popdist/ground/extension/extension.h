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

/* What a tensor in half precision holds, as popdist.optim.rounding numbers it. */
enum { FLOAT16 = 1, BFLOAT16 };

typedef struct Rounding Rounding;

/* Draw four words in each of `num_calls` calls of the generator, a multiple of 16, of which the first has the number
 * `first`: words[i + w * num_calls] is word w of call i. */
typedef void Draw(const Rounding *of, uint32_t first, int num_calls, uint32_t *words);

/* The rounding of one tensor of a parameter, and all that its random words depend on beside the element. */
struct Rounding {
    const char *wide; /* in float32 */
    uint16_t *held;   /* in half precision */
    int64_t length;
    int dtype;
    int64_t first; /* number of the first element in its parameter, a multiple of BLOCK */
    uint32_t position, tensor, seed[2], step;
    Draw *draw;
};

/* The fastest way for this processor. */
Draw *best_draw(void);

/* Round `num_blocks` blocks, from block `start` on. */
void round_blocks(const Rounding *of, int64_t start, int64_t num_blocks);

/* The sum of squares of a row: its address, its length, whether its numbers are doubles. */
PyObject *square_sum(PyObject *module, PyObject *args);

/* The sum of two or four rows into all of them: their addresses, how many numbers, whether these are doubles, the
 * divisor. */
PyObject *add_rows(PyObject *module, PyObject *args);

#endif
