/* Sums of large tensors in shared storages, which popdist.host_memory.offers has added before.
 *
 * Python tells where a tensor lay, what all ranks offered then, and which rows were added. When it comes again, this
 * offers the same, and if the others do so too, it adds those rows: two meetings and no line of Python, whose objects
 * a large sum has driven out of the caches. Where the others offer something else, Python goes on after that meeting.
 */

#include "quick.h"

enum { MOST_KNOWN = 256 };

enum { LONGER = 16 }; /* times as many looks as for a small sum: the ranks end a large one some time apart */

int is_left(const Quick *self, const Run *run) {
    uintptr_t start = (uintptr_t)run->data;
    if (run->num_bytes < self->offered_bytes) return 0;
    for (int i = 0; i < self->num_left; i++)
        if (start >= self->left[2 * i] && start < self->left[2 * i + 1]) return 1;
    return 0;
}

static Known *known_at(const Quick *self, const char *data, int64_t length, int dtype) {
    for (int i = 0; i < self->num_known; i++) {
        Known *known = &self->known[i];
        if (known->data == data && known->length == length && known->dtype == dtype) return known;
    }
    return NULL;
}

/* Whether `object.name` is this number, or what it gives when it is called. */
static int is_number(PyObject *object, const char *name, int is_called, uint64_t number) {
    PyObject *found = is_called ? PyObject_CallMethod(object, name, NULL) : PyObject_GetAttrString(object, name);
    int is_same = found != NULL && PyLong_AsUnsignedLongLong(found) == number;
    Py_XDECREF(found);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return is_same;
}

/* Whether the tensor is on the storage that is known, which is where and what it was. */
static int is_there(const Known *known, PyObject *tensor) {
    PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    if (storage == NULL) {
        PyErr_Clear();
        return 0;
    }
    int is_same = is_number(storage, "_cdata", 0, known->key) && is_number(storage, "data_ptr", 1, known->address) &&
                  is_number(storage, "nbytes", 1, known->storage_bytes);
    Py_DECREF(storage);
    return is_same;
}

int find_known(const Quick *self, const Run *run, Known *known) {
    const Known *found = known_at(self, run->data, run->length, run->dtype);
    if (found == NULL) return 0;
    *known = *found;
    Py_INCREF(known->memory); /* whatever becomes of the list meanwhile */
    if (is_there(known, run->object) && !is_negated(run->object)) return 1;
    Py_DECREF(known->memory);
    return 0;
}

static int is_agreed(const Quick *self, const Known *known) {
    for (int rank = 0; rank < self->size; rank++)
        if (told_by(self, rank) != known->places[rank]) return 0;
    return 1;
}

/* Have Python go on after the meeting at which something else was offered. */
static int settle(const Quick *self, PyObject *tensor) {
    PyObject *method = PyObject_CallNoArgs(self->settle);
    PyObject *done = method == NULL ? NULL : PyObject_CallFunctionObjArgs(method, tensor, NULL);
    Py_XDECREF(method);
    Py_XDECREF(done);
    return done != NULL;
}

int add_known(Quick *self, const Known *known, const Run *run) {
    int num_looks = self->num_looks > 1 ? self->num_looks * LONGER : self->num_looks, is_done = 0;
    uint64_t purpose = purpose_of(self, run);
    PyObject *object = Py_NewRef(run->object);
    if (meet(self, purpose, known->places[self->rank], num_looks) == FAILED) goto end;
    if (!is_agreed(self, known)) {
        is_done = settle(self, object);
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    add_into_all(known->rows, self->size, known->share, known->dtype == FLOAT64, 1);
    Py_END_ALLOW_THREADS
    self->num_shared++;
    is_done = meet(self, purpose, 0, num_looks) != FAILED;
end:
    Py_DECREF(object);
    Py_DECREF(known->memory);
    return is_done;
}

/* ---- What Python tells --------------------------------------------------------------------------------------- */

PyObject *leave(Quick *self, PyObject *args) {
    Numbers ends;
    if (!PyArg_ParseTuple(args, "y#", &ends.bytes, &ends.length)) return NULL;
    int count = (int)(ends.length / (Py_ssize_t)sizeof(uint64_t));
    uintptr_t *left = PyMem_Malloc(ends.length + 1);
    if (left == NULL) return PyErr_NoMemory();
    for (int i = 0; i < count; i++) left[i] = (uintptr_t)number_at(ends, i);
    PyMem_Free(self->left);
    self->left = left;
    self->num_left = count / 2;
    Py_RETURN_NONE;
}

PyObject *forget(Quick *self, PyObject *none) {
    (void)none;
    Known *known = self->known;
    int count = self->num_known;
    self->known = NULL, self->num_known = 0;
    for (int i = 0; i < count; i++) Py_DECREF(known[i].memory);
    PyMem_Free(known);
    Py_RETURN_NONE;
}

/* Where to write what is told of a tensor. */
static Known *place_for(Quick *self, const Known *told) {
    Known *found = known_at(self, told->data, told->length, told->dtype);
    if (found != NULL) {
        Py_DECREF(found->memory);
        return found;
    }
    if (self->num_known == MOST_KNOWN) Py_DECREF(forget(self, NULL));
    Known *known = PyMem_Realloc(self->known, (self->num_known + 1) * sizeof *known);
    if (known == NULL) return NULL;
    self->known = known;
    return &known[self->num_known++];
}

PyObject *know(Quick *self, PyObject *args) {
    Numbers numbers, places, rows;
    Known told = {0};
    PyObject *memory;
    if (!PyArg_ParseTuple(args, "y#y#y#O", &numbers.bytes, &numbers.length, &places.bytes, &places.length, &rows.bytes,
                          &rows.length, &memory))
        return NULL;
    const Py_ssize_t width = sizeof(uint64_t);
    if (self->size > MOST_ROWS || places.length != self->size * width || rows.length != self->size * width ||
        numbers.length != 7 * width || number_at(numbers, 5) >= NUM_DTYPES) {
        PyErr_SetString(PyExc_ValueError, "there must be a place and a row for each rank, of at most four");
        return NULL;
    }
    told.key = (uintptr_t)number_at(numbers, 0), told.address = (uintptr_t)number_at(numbers, 1);
    told.storage_bytes = number_at(numbers, 2), told.data = (char *)(uintptr_t)number_at(numbers, 3);
    told.length = (int64_t)number_at(numbers, 4), told.dtype = (int)number_at(numbers, 5);
    told.share = (int64_t)number_at(numbers, 6);
    for (int i = 0; i < self->size; i++) {
        told.places[i] = number_at(places, i);
        told.rows[i] = (char *)(uintptr_t)number_at(rows, i);
    }
    Known *place = place_for(self, &told);
    if (place == NULL) return PyErr_NoMemory();
    told.memory = Py_NewRef(memory);
    *place = told;
    Py_RETURN_NONE;
}
