/* The all-reduce of a small tensor, from the call to the sum, without a line of Python.
 *
 * It does what popdist.host_memory.host_collectives does with what fits a slot, in the same memory: lay the tensor
 * down, say what for, raise the counter, look for the others' counters, add all rows in the order of the tree. A rank
 * that runs this and one that runs the Python come to the same meetings. What it does not do it leaves to Python before
 * anything has happened: other dtypes, strides, devices and subclasses; and waiting for a rank that is late.
 *
 * Flags are C11 atomics: the counter is stored with release after the data, and read with acquire before them. Tensors
 * are read through the DLPack exchange API of their class, a table of C functions (DLPack 1.3).
 */

#include "quick.h"

enum { LINE = 64, MOST_COPIED = 1 << 13 };

static int dtype_of(const Tensor *tensor) {
    if (tensor->dtype.lanes != 1) return -1;
    int is_wide = tensor->dtype.bits == 64;
    if (!is_wide && tensor->dtype.bits != 32) return -1;
    if (tensor->dtype.code == FLOAT) return is_wide ? FLOAT64 : FLOAT32;
    if (tensor->dtype.code == SIGNED) return is_wide ? INT64 : INT32;
    return -1;
}

uint64_t purpose_of(const Quick *self, const Run *run) {
    return self->purposes[run->dtype] | (uint64_t)run->length << 28;
}

/* A single number may be one that torch negates when it is read; of more, such a tensor has strides. */
int is_negated(PyObject *tensor) {
    PyObject *answer = PyObject_CallMethod(tensor, "is_neg", NULL);
    if (answer == NULL) PyErr_Clear();
    int is_plain = answer == Py_False;
    Py_XDECREF(answer);
    return !is_plain;
}

/* Whether `list` holds one tensor of numbers in a row that can be added, and where they are. */
static int take(Quick *self, PyObject *list, Run *run) {
    if (!PyList_CheckExact(list) || PyList_Size(list) != 1) return 0;
    PyObject *object = PyList_GetItem(list, 0);
    if ((PyObject *)Py_TYPE(object) != self->tensor_type) return 0;
    Tensor tensor;
    if (self->exchange->look_at(object, &tensor) != 0) {
        PyErr_Clear();
        return 0;
    }
    run->dtype = dtype_of(&tensor);
    if (run->dtype < 0 || tensor.device.type != ON_CPU || tensor.data == NULL) return 0;
    run->length = 1;
    for (int i = tensor.num_dimensions - 1; i >= 0; i--) {
        if (tensor.strides != NULL && tensor.strides[i] != run->length) return 0;
        run->length *= tensor.shape[i];
    }
    run->num_bytes = run->length * (tensor.dtype.bits / 8);
    if (run->length < 1) return 0;
    if (run->length == 1 && is_negated(object)) return 0;
    run->object = object;
    run->data = (char *)tensor.data + tensor.byte_offset;
    return (uintptr_t)run->data % (tensor.dtype.bits / 8) == 0;
}

/* ---- Adding -------------------------------------------------------------------------------------------------- */

#define DEFINE_ADD(TYPE)                                                                                      \
    static void add_##TYPE(const Quick *self, TYPE *restrict out, uint64_t parity, int64_t length) {          \
        if (self->size == 2) { /* the same operands on both ranks: of two NaNs the processor takes one */     \
            const TYPE *left = (const TYPE *)(self->slots[0] + parity * self->slot_bytes);                    \
            const TYPE *right = (const TYPE *)(self->slots[1] + parity * self->slot_bytes);                   \
            for (int64_t i = 0; i < length; i++) out[i] = left[i] + right[i];                                 \
            return;                                                                                           \
        }                                                                                                     \
        TYPE *sums = self->sums;                                                                              \
        for (int64_t start = 0; start < length; start += BLOCK) {                                             \
            int64_t width = length - start < BLOCK ? length - start : BLOCK;                                  \
            for (int rank = 0; rank < self->size; rank++) {                                                   \
                const char *slot = self->slots[rank] + parity * self->slot_bytes;                             \
                memcpy(sums + rank * BLOCK, (const TYPE *)slot + start, width * sizeof(TYPE));                \
            }                                                                                                 \
            for (int step = 0; step < self->size - 1; step++) {                                               \
                TYPE *left = sums + self->pairs[step][0] * BLOCK, *right = sums + self->pairs[step][1] * BLOCK;\
                for (int64_t i = 0; i < width; i++) left[i] += right[i];                                      \
            }                                                                                                 \
            memcpy(out + start, sums, width * sizeof(TYPE));                                                  \
        }                                                                                                     \
    }

typedef float f32;
typedef double f64;
typedef uint32_t u32; /* whole numbers wrap around, as torch's do */
typedef uint64_t u64;
DEFINE_ADD(f32)
DEFINE_ADD(f64)
DEFINE_ADD(u32)
DEFINE_ADD(u64)

static void add(const Quick *self, const Run *run, uint64_t parity) {
    switch (run->dtype) {
    case FLOAT32: add_f32(self, (f32 *)run->data, parity, run->length); break;
    case FLOAT64: add_f64(self, (f64 *)run->data, parity, run->length); break;
    case INT32: add_u32(self, (u32 *)run->data, parity, run->length); break;
    default: add_u64(self, (u64 *)run->data, parity, run->length);
    }
}

/* Copy small data. From some KiB on memcpy takes longer, where the memory was last in another core's cache. */
static void copy(char *restrict to, const char *restrict from, int64_t num_bytes) {
    int64_t start = 0;
    if (num_bytes <= MOST_COPIED)
        for (; start + LINE <= num_bytes; start += LINE) memcpy(to + start, from + start, LINE);
    memcpy(to + start, from + start, num_bytes - start);
}

/* Lay the tensor down and meet the others, offering nothing; 0 where that is an error. */
static int lay_and_meet(Quick *self, PyObject *list, Run *run, uint64_t *number) {
    *number = next_number(self);
    copy(self->slots[self->rank] + (*number & 1) * self->slot_bytes, run->data, run->num_bytes);
    int how = meet(self, purpose_of(self, run), 0, self->num_looks);
    if (how == WAITED) {
        Run before = *run;
        if (!take(self, list, run) || run->length != before.length || run->dtype != before.dtype) {
            PyErr_SetString(PyExc_RuntimeError, "the tensor was changed while the other ranks were waited for");
            return 0;
        }
    }
    return how != FAILED;
}

/* Whether a rank has offered its memory for a tensor at the last meeting. */
static int is_offered(const Quick *self) {
    for (int rank = 0; rank < self->size; rank++)
        if (told_by(self, rank)) return 1;
    return 0;
}

PyObject *reduce(Quick *self, PyObject *list, Turn *turn) {
    Run run;
    if (!takes_part(self) || !take(self, list, &run)) Py_RETURN_FALSE;
    if (!is_free(turn)) Py_RETURN_FALSE; /* from here on no other thread runs, unless this one takes the lock before */
    self->turn = turn;
    if (is_left(self, &run)) {
        Known known;
        if (!take_turn(turn)) return NULL;
        if (!find_known(self, &run, &known)) Py_RETURN_NONE;
        if (!add_known(self, &known, &run)) return NULL;
        Py_RETURN_TRUE;
    }
    if (run.num_bytes > self->most_bytes) Py_RETURN_FALSE;
    uint64_t number;
    if (!lay_and_meet(self, list, &run, &number)) return NULL;
    if (run.num_bytes >= self->offered_bytes && is_offered(self) && !lay_and_meet(self, list, &run, &number))
        return NULL; /* those who offer have laid nothing down before the second meeting */
    add(self, &run, number & 1);
    Py_RETURN_TRUE;
}
