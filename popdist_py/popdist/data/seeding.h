/* What popdist.data._generators takes from seeding.c. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

/* seeded_rows(row, numbers): for each of a list of 64-bit numbers the row, as bytes, of a generator that is seeded with
 * it. `row` is one of such a generator: torch's, where it is longer than the words and one number, else Python's. */
PyObject *seeded_rows(PyObject *module, PyObject *args);
