/* What popdist.data._generators takes from seeding.c. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

/* seeding(place, row, generator, numbers): an iterator that, at each step, writes to the address `place` the row of a
 * generator that is seeded with the next of a list of 64-bit numbers. `row` is one of such a generator: torch's, where
 * it is longer than the words and one number, else Python's. `generator` is Python's object there, which then has no
 * second of a pair of normal numbers, or None. */
PyObject *seeding(PyObject *module, PyObject *args);
