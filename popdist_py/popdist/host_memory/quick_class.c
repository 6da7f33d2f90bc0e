/* The module that Python imports, popdist.host_memory._quick, and in it the class of a group's memory. */

#include "quick.h"

#include <stddef.h>
#include <structmember.h>

static int fill(Quick *self, Numbers pages, Numbers pairs, Numbers purposes) {
    const Py_ssize_t width = sizeof(uint64_t);
    if (self->size < 2 || self->size > MOST_RANKS || self->rank < 0 || self->rank >= self->size ||
        pages.length != self->size * width || pairs.length != 2 * (self->size - 1) * width ||
        purposes.length != NUM_DTYPES * width) {
        PyErr_Format(PyExc_ValueError, "rank %d of %d, with numbers for others", self->rank, self->size);
        return -1;
    }
    for (int i = 0; i < self->size; i++) self->pages[i] = (_Atomic uint64_t *)(uintptr_t)number_at(pages, i);
    for (int i = 0; i < 2 * (self->size - 1); i++) self->pairs[i / 2][i % 2] = number_at(pairs, i) % self->size;
    for (int i = 0; i < NUM_DTYPES; i++) self->purposes[i] = number_at(purposes, i);
    self->sums = PyMem_Malloc(self->size * BLOCK * sizeof(uint64_t));
    if (self->sums == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->failure = PyUnicode_InternFromString("failure");
    self->go_on = PyUnicode_InternFromString("go_on");
    return self->failure == NULL || self->go_on == NULL ? -1 : 0;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *tensor_type, *flags, *settle;
    Numbers pages, pairs, purposes;
    int rank, size, num_looks, most_sleeps;
    double yield_seconds;
    long long offered_bytes;
    (void)named;
    if (!PyArg_ParseTuple(args, "OOOiiidiLy#y#y#", &tensor_type, &flags, &settle, &rank, &size, &num_looks,
                          &yield_seconds, &most_sleeps, &offered_bytes, &pages.bytes, &pages.length, &pairs.bytes, &pairs.length, &purposes.bytes, &purposes.length))
        return NULL;
    const Exchange *exchange = exchange_of(tensor_type);
    if (exchange == NULL) return NULL;
    Quick *self = (Quick *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->tensor_type = Py_NewRef(tensor_type);
    self->flags = Py_NewRef(flags);
    self->settle = Py_NewRef(settle);
    self->exchange = exchange;
    self->rank = rank, self->size = size, self->num_looks = num_looks, self->offered_bytes = offered_bytes;
    self->yield_seconds = yield_seconds, self->most_sleeps = most_sleeps;
    if (fill(self, pages, pairs, purposes) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* From now on the slots are at these addresses, in `memory`. Before the first call nothing is small enough. */
static PyObject *lay(Quick *self, PyObject *args) {
    PyObject *memory, *before = self->memory;
    Numbers slots;
    long long slot_bytes, most_bytes;
    if (!PyArg_ParseTuple(args, "y#LLO", &slots.bytes, &slots.length, &slot_bytes, &most_bytes, &memory)) return NULL;
    if (slots.length != self->size * (Py_ssize_t)sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "there must be a slot for each rank");
        return NULL;
    }
    for (int i = 0; i < self->size; i++) self->slots[i] = (char *)(uintptr_t)number_at(slots, i);
    self->slot_bytes = slot_bytes, self->most_bytes = most_bytes;
    self->memory = Py_NewRef(memory);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static void destroy(Quick *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->flags);
    Py_XDECREF(self->memory);
    Py_XDECREF(self->failure);
    Py_XDECREF(self->go_on);
    PyMem_Free(self->sums);
    PyMem_Free(self->left);
    Py_XDECREF(self->settle);
    Py_XDECREF(forget(self, NULL));
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"lay", (PyCFunction)lay, METH_VARARGS, NULL},
    {"leave", (PyCFunction)leave, METH_VARARGS, NULL},
    {"know", (PyCFunction)know, METH_VARARGS, NULL},
    {"forget", (PyCFunction)forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"num_shared", T_ULONGLONG, offsetof(Quick, num_shared), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot type_slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, destroy}, {Py_tp_methods, methods},
    {Py_tp_members, members}, {0, NULL}};

static PyType_Spec spec = {"popdist.host_memory._quick.Quick", sizeof(Quick), 0, Py_TPFLAGS_DEFAULT, type_slots};

static int add_class(PyObject *module, const char *name, PyType_Spec *made_of) {
    PyObject *type = PyType_FromSpec(made_of);
    int status = type == NULL ? -1 : PyModule_AddObjectRef(module, name, type);
    Py_XDECREF(type);
    return status;
}

static int add_classes(PyObject *module) {
    return add_class(module, "Quick", &spec) == 0 ? add_class(module, "QuickCall", &quick_call_spec) : -1;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_classes}, {0, NULL}};

static PyMethodDef functions[] = {{"add_rows", add_rows, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_quick", NULL, 0, functions, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__quick(void) { return PyModuleDef_Init(&definition); }
