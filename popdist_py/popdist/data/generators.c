/* The module that Python imports, popdist.data._generators: the states of all generators exchanged in one call.
 *
 * It does what popdist.data.process_generators does where there is no extension, and leaves to that what is rare. The
 * states are 8 KiB; what takes time in Python are the calls, whose code has left the caches while a model computed.
 * Python's lock is held throughout. */

#include "seeding.h"

#include <stdint.h>
#include <string.h>

/* A pair's second normal number, as Python's generator has it as an object, and numpy as these two fields. */
typedef struct {
    int32_t is_there;
    double number;
} Pair;

typedef struct {
    char *address;
    Py_ssize_t num_bytes;
} Place;

enum { NUM_PLACES = 3 };

/* What prepare() was told. */
static Place places[NUM_PLACES];
static Pair *numpy_pair;
static Py_ssize_t row_bytes;
static PyObject *generator, *random_state, *bits, *in_turn;

static PyObject *rows, *other_bits, *gauss_next, *bit_generator; /* names */

/* ---- The second of a pair of Python's generator ---------------------------------------------------------------- */

static int read_pair(Pair *pair) {
    PyObject *number = PyObject_GetAttr(generator, gauss_next);
    if (number == NULL) return -1;
    *pair = (Pair){number != Py_None, number == Py_None ? 0.0 : PyFloat_AsDouble(number)};
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int write_pair(Pair pair) {
    PyObject *number = pair.is_there ? PyFloat_FromDouble(pair.number) : Py_NewRef(Py_None);
    int status = number == NULL ? -1 : PyObject_SetAttr(generator, gauss_next, number);
    Py_XDECREF(number);
    return status;
}

/* ---- Exchange -------------------------------------------------------------------------------------------------- */

/* Whether an attribute of an object is this one; -1 is an error. */
static int has(PyObject *owner, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(owner, name);
    if (found == NULL) return -1;
    Py_DECREF(found); /* the owner keeps it */
    return found == wanted;
}

static int exchange_rows(char *out, const char *into) {
    Pair before, after;
    if (read_pair(&before) != 0) return -1;
    for (int i = 0; i < NUM_PLACES; i++) {
        memcpy(out, places[i].address, places[i].num_bytes);
        memcpy(places[i].address, into, places[i].num_bytes);
        out += places[i].num_bytes, into += places[i].num_bytes;
    }
    *numpy_pair = (Pair){0, 0.0};
    memcpy(&after, into, sizeof after);
    memcpy(out, &before, sizeof before);
    return write_pair(after);
}

/* The bytes of a state's rows, which the state keeps; NULL is an error. */
static char *rows_of(PyObject *state) {
    PyObject *found = PyObject_GetAttr(state, rows);
    if (found == NULL) return NULL;
    int is_right = Py_TYPE(found) == &PyByteArray_Type && PyByteArray_Size(found) == row_bytes;
    char *bytes = is_right ? PyByteArray_AsString(found) : NULL;
    if (!is_right) PyErr_Format(PyExc_ValueError, "the rows of a state must be a bytearray of %zd", row_bytes);
    Py_DECREF(found);
    return bytes;
}

/* The state `out` becomes that of the generators now, and they go on from the state `into`. */
static PyObject *exchange(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 2 || in_turn == NULL) {
        PyErr_SetString(PyExc_TypeError, "exchange(out, into), after prepare()");
        return NULL;
    }
    int is_usual = has(random_state, bit_generator, bits);
    if (is_usual > 0) is_usual = has(args[0], other_bits, Py_None);
    if (is_usual > 0) is_usual = has(args[1], other_bits, Py_None);
    if (is_usual < 0) return NULL;
    if (!is_usual) return PyObject_CallFunctionObjArgs(in_turn, args[0], args[1], NULL);
    char *out = rows_of(args[0]), *into = out == NULL ? NULL : rows_of(args[1]);
    if (into == NULL || exchange_rows(out, into) != 0) return NULL;
    Py_RETURN_NONE;
}

/* Where the states are: each place's address and length, as 64-bit numbers, and where numpy's pair is. Then whose they
 * are: Python's generator, numpy's RandomState and what it draws from; and what else exchanges two states. */
static PyObject *prepare(PyObject *module, PyObject *args) {
    const char *numbers;
    Py_ssize_t num_bytes;
    unsigned long long pair;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#KOOOO", &numbers, &num_bytes, &pair, &generator, &random_state, &bits, &in_turn))
        return NULL;
    if (num_bytes != NUM_PLACES * 2 * (Py_ssize_t)sizeof(uint64_t)) {
        in_turn = NULL;
        PyErr_Format(PyExc_ValueError, "there are %d places", NUM_PLACES);
        return NULL;
    }
    row_bytes = sizeof(Pair);
    for (int i = 0; i < NUM_PLACES; i++) {
        uint64_t place[2];
        memcpy(place, numbers + i * sizeof place, sizeof place);
        places[i] = (Place){(char *)(uintptr_t)place[0], (Py_ssize_t)place[1]};
        row_bytes += places[i].num_bytes;
    }
    numpy_pair = (Pair *)(uintptr_t)pair;
    Py_INCREF(generator), Py_INCREF(random_state), Py_INCREF(bits), Py_INCREF(in_turn);
    rows = PyUnicode_InternFromString("rows");
    other_bits = PyUnicode_InternFromString("other_bits");
    gauss_next = PyUnicode_InternFromString("gauss_next");
    bit_generator = PyUnicode_InternFromString("_bit_generator");
    if (rows == NULL || other_bits == NULL || gauss_next == NULL || bit_generator == NULL) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"prepare", prepare, METH_VARARGS, NULL},
    {"exchange", (PyCFunction)(void (*)(void))exchange, METH_FASTCALL, NULL},
    {"seeding", seeding, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_generators", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__generators(void) { return PyModuleDef_Init(&definition); }
