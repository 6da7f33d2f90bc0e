/* The module that Python imports, popdist.optim._arithmetic. */

#include "arithmetic.h"

static PyMethodDef functions[] = {
    {"square_sum", square_sum, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_arithmetic", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__arithmetic(void) { return PyModuleDef_Init(&definition); }
