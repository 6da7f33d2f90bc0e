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

typedef struct {
    void *data;
    int64_t length, num_bytes;
    int dtype;
} Run;

static int dtype_of(const Tensor *tensor) {
    if (tensor->dtype.lanes != 1) return -1;
    int is_wide = tensor->dtype.bits == 64;
    if (!is_wide && tensor->dtype.bits != 32) return -1;
    if (tensor->dtype.code == FLOAT) return is_wide ? FLOAT64 : FLOAT32;
    if (tensor->dtype.code == SIGNED) return is_wide ? INT64 : INT32;
    return -1;
}

/* A single number may be one that torch negates when it is read; of more, such a tensor has strides. */
static int is_negated(PyObject *tensor) {
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
    run->data = (char *)tensor.data + tensor.byte_offset;
    return (uintptr_t)run->data % (tensor.dtype.bits / 8) == 0;
}

/* Whether Python may have an offer to make for the tensor. An address proves nothing, and Python looks again. */
static int is_left(const Quick *self, const Run *run) {
    uintptr_t start = (uintptr_t)run->data;
    if (run->num_bytes < self->offered_bytes) return 0;
    for (int i = 0; i < self->num_left; i++)
        if (start >= self->left[2 * i] && start < self->left[2 * i + 1]) return 1;
    return 0;
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
    case FLOAT32: add_f32(self, run->data, parity, run->length); break;
    case FLOAT64: add_f64(self, run->data, parity, run->length); break;
    case INT32: add_u32(self, run->data, parity, run->length); break;
    default: add_u64(self, run->data, parity, run->length);
    }
}

/* ---- Meeting ------------------------------------------------------------------------------------------------- */

static uint64_t load(_Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_acquire); }

static void store(_Atomic uint64_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_release);
}

static void pause_processor(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Whether all have come within the looks of one rank. */
static int have_come(const Quick *self, uint64_t number) {
    int looks = self->num_looks;
    for (int rank = 0; rank < self->size; rank++)
        while (load(&self->pages[rank][COUNTER]) < number) {
            if (looks-- <= 0) return 0;
            if (looks & 3) pause_processor();
        }
    return 1;
}

static int has_sleeper(const Quick *self) {
    for (int rank = 0; rank < self->size; rank++)
        if (rank != self->rank && load(&self->pages[rank][SLEEPS])) return 1;
    return 0;
}

static int agree(const Quick *self, uint64_t number, uint64_t purpose) {
    for (int rank = 0; rank < self->size; rank++)
        if (load(&self->pages[rank][PURPOSES + (number & 1)]) != purpose) return 0;
    return 1;
}

/* Whether this rank still meets the others; where it does not, Python says why. */
static int takes_part(const Quick *self) {
    PyObject *failure = PyObject_GetAttr(self->flags, self->failure);
    if (failure == NULL) PyErr_Clear();
    Py_XDECREF(failure);
    return failure == Py_None;
}

/* Have Python wait for those who are late; -1 where one is lost or came for something else. */
static int wait_for_all(Quick *self, uint64_t purpose) {
    PyObject *number = PyLong_FromUnsignedLongLong(purpose);
    PyObject *done = number == NULL ? NULL : PyObject_CallMethodObjArgs(self->flags, self->go_on, number, NULL);
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Whether a rank has offered its memory for a tensor at the last meeting. */
static int is_offered(const Quick *self, uint64_t number) {
    for (int rank = 0; rank < self->size; rank++)
        if (load(&self->pages[rank][NUMBERS + (number & 1)])) return 1;
    return 0;
}

/* Lay the tensor down and meet the others, offering nothing; 0 where that is an error. */
static int meet(Quick *self, PyObject *list, Run *run, uint64_t *meeting) {
    _Atomic uint64_t *mine = self->pages[self->rank];
    uint64_t number = load(&mine[COUNTER]) + 1, purpose = self->purposes[run->dtype] | (uint64_t)run->length << 28;
    memcpy(self->slots[self->rank] + (number & 1) * self->slot_bytes, run->data, run->num_bytes);
    store(&mine[PURPOSES + (number & 1)], purpose);
    store(&mine[NUMBERS + (number & 1)], 0);
    store(&mine[COUNTER], number);
    if (has_sleeper(self) || !have_come(self, number) || !agree(self, number, purpose)) {
        if (wait_for_all(self, purpose) != 0) return 0;
        Run before = *run;
        if (!take(self, list, run) || run->length != before.length || run->dtype != before.dtype) {
            PyErr_SetString(PyExc_RuntimeError, "the tensor was changed while the other ranks were waited for");
            return 0;
        }
    }
    *meeting = number;
    return 1;
}

PyObject *reduce(Quick *self, PyObject *list) {
    Run run;
    if (!takes_part(self) || !take(self, list, &run)) Py_RETURN_FALSE;
    if (is_left(self, &run)) Py_RETURN_NONE;
    if (run.num_bytes > self->most_bytes) Py_RETURN_FALSE;
    uint64_t number;
    if (!meet(self, list, &run, &number)) return NULL;
    if (run.num_bytes >= self->offered_bytes && is_offered(self, number) && !meet(self, list, &run, &number))
        return NULL; /* those who offer have laid nothing down before the second meeting */
    add(self, &run, number & 1);
    Py_RETURN_TRUE;
}
