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

enum { BLOCK = 128 }; /* elements */

/* The sum of squares of a row: its address, its length, whether its numbers are doubles. */
PyObject *square_sum(PyObject *module, PyObject *args);

#endif
