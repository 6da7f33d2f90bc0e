/* The gradients of a micro batch copied to their slots in one call, as popdist.gradients.rows does one by one.
 *
 * A gradient is copied here if it is a plain tensor of floats in the memory of the CPU, with the dtype and the strides
 * of its slot. All others are left to Python.
 */

#include "notes.h"

#include "../extensions/dlpack.h"

#include <string.h>

enum { LARGE = 1 << 18 }; /* bytes from which on other threads may run meanwhile */

typedef struct {
    PyObject *gradient; /* held, so that it stays where it is; NULL for zeros */
    const char *from;   /* NULL where nothing is to be copied */
    char *to;
    size_t num_bytes;
} Copy;

typedef struct {
    PyObject *tensor_type, *parameters, *slots, *left;
    const Exchange *exchange;
    Copy *copies;
    Py_ssize_t count;
} Filling;

static int is_dense_float(const Tensor *tensor) {
    return tensor->device.type == ON_CPU && tensor->dtype.code == FLOAT && tensor->dtype.lanes == 1 &&
           (tensor->strides != NULL || tensor->num_dimensions == 0);
}

static int have_same_form(const Tensor *one, const Tensor *other) {
    if (one->num_dimensions != other->num_dimensions || one->dtype.bits != other->dtype.bits) return 0;
    for (int i = 0; i < one->num_dimensions; i++) {
        if (one->shape[i] != other->shape[i]) return 0;
        if (one->shape[i] > 1 && one->strides[i] != other->strides[i]) return 0;
    }
    return 1;
}

/* Whether torch negates the numbers when they are read; also where that cannot be told. */
static int is_negated(PyObject *gradient) {
    PyObject *answer = PyObject_CallMethod(gradient, "is_neg", NULL);
    if (answer == NULL) PyErr_Clear();
    Py_XDECREF(answer); /* True and False are never gone */
    return answer != Py_False;
}

/* See what is to be copied to one slot: 1 if it can be done here, 0 if Python has to, -1 for an error. */
static int see(const Filling *self, PyObject *gradient, PyObject *slot, Copy *copy) {
    Tensor from, to;
    if (self->exchange->look_at(slot, &to) != 0) return PyErr_Clear(), 0;
    if (!is_dense_float(&to)) return 0;
    copy->to = (char *)to.data + to.byte_offset;
    copy->num_bytes = to.dtype.bits / 8;
    for (int i = 0; i < to.num_dimensions; i++) copy->num_bytes *= to.shape[i];
    if (gradient == Py_None) return 1;
    if ((PyObject *)Py_TYPE(gradient) != self->tensor_type) return 0;
    if (self->exchange->look_at(gradient, &from) != 0) return PyErr_Clear(), 0;
    if (!is_dense_float(&from) || !have_same_form(&from, &to) || is_negated(gradient)) return 0;
    copy->from = (char *)from.data + from.byte_offset;
    if (copy->from == copy->to) copy->num_bytes = 0;
    copy->gradient = Py_NewRef(gradient);
    return 1;
}

/* Set a digit of a number in hexadecimal digits, the last one first, of `count` bits. */
static void set_bit(char *digits, Py_ssize_t count, Py_ssize_t bit) {
    char *digit = digits + (count + 3) / 4 - 1 - bit / 4;
    int value = (*digit <= '9' ? *digit - '0' : *digit - 'a' + 10) | 1 << bit % 4;
    *digit = "0123456789abcdef"[value];
}

/* See all gradients; -1 for an error. */
static int see_all(Filling *self, char *digits) {
    for (Py_ssize_t i = 0; i < self->count; i++) {
        PyObject *gradient = PyObject_GetAttr(PyList_GetItem(self->parameters, i), grad_name);
        if (gradient == NULL) return -1;
        if (gradient != Py_None) set_bit(digits, self->count, i);
        int status = see(self, gradient, PyList_GetItem(self->slots, i), &self->copies[i]);
        Py_DECREF(gradient);
        if (status == 0) {
            self->copies[i].to = NULL;
            PyObject *position = PyLong_FromSsize_t(i);
            status = position == NULL ? -1 : PyList_Append(self->left, position);
            Py_XDECREF(position);
        }
        if (status < 0) return -1;
    }
    return 0;
}

static void copy_all(const Filling *self) {
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Copy *copy = &self->copies[i];
        if (copy->to == NULL || copy->num_bytes == 0) continue;
        if (copy->from == NULL) memset(copy->to, 0, copy->num_bytes);
        else memcpy(copy->to, copy->from, copy->num_bytes);
    }
}

static int take_all(const Filling *self) {
    for (Py_ssize_t i = 0; i < self->count; i++)
        if (self->copies[i].gradient != NULL &&
            PyObject_SetAttr(PyList_GetItem(self->parameters, i), grad_name, Py_None) != 0)
            return -1;
    return 0;
}

static PyObject *fill(Filling *self, char *digits, int are_taken) {
    size_t num_bytes = 0;
    memset(digits, '0', (self->count + 3) / 4);
    if (see_all(self, digits) != 0) return NULL;
    for (Py_ssize_t i = 0; i < self->count; i++) num_bytes += self->copies[i].num_bytes;
    if (num_bytes < LARGE) copy_all(self);
    else {
        Py_BEGIN_ALLOW_THREADS
        copy_all(self);
        Py_END_ALLOW_THREADS
    }
    if (are_taken && take_all(self) != 0) return NULL;
    PyObject *used = self->count ? PyLong_FromString(digits, NULL, 16) : PyLong_FromLong(0);
    return used == NULL ? NULL : Py_BuildValue("NO", used, self->left);
}

PyObject *fill_slots(PyObject *module, PyObject *args) {
    Filling self = {0};
    int are_taken;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOp", &self.tensor_type, &self.parameters, &self.slots, &are_taken)) return NULL;
    if (!PyList_Check(self.parameters) || !PyList_Check(self.slots) ||
        PyList_Size(self.parameters) != PyList_Size(self.slots)) {
        PyErr_SetString(PyExc_TypeError, "there must be a list of parameters, and one of as many slots");
        return NULL;
    }
    self.exchange = exchange_of(self.tensor_type);
    if (self.exchange == NULL) return NULL;
    self.count = PyList_Size(self.parameters);
    self.left = PyList_New(0);
    self.copies = PyMem_Calloc(self.count + 1, sizeof *self.copies);
    char *digits = PyMem_Calloc(self.count / 4 + 2, 1);
    PyObject *result = NULL;
    if (self.left == NULL || self.copies == NULL || digits == NULL) PyErr_NoMemory();
    else result = fill(&self, digits, are_taken);
    for (Py_ssize_t i = 0; self.copies != NULL && i < self.count; i++) Py_XDECREF(self.copies[i].gradient);
    Py_XDECREF(self.left);
    PyMem_Free(self.copies);
    PyMem_Free(digits);
    return result;
}
