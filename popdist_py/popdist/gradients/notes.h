/* What the files of the extension share. */

#ifndef POPDIST_NOTES_H
#define POPDIST_NOTES_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

/* The name of an attribute of a parameter. */
extern PyObject *grad_name;

/* Copy gradients to their slots: the class Tensor, parameters, slots, whether the gradients are taken away. It gives
 * which parameters had a gradient, and the positions of those that are left to Python. */
PyObject *fill_slots(PyObject *module, PyObject *args);

#endif
