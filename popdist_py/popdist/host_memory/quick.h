/* What the files of the extension share: a group's memory, and how C sees a tensor. */

#ifndef POPDIST_QUICK_H
#define POPDIST_QUICK_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* ---- What of DLPack's ABI is needed -------------------------------------------------------------------------- */

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t num_dimensions;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *older;
    void *allocate, *from_object, *to_object;
    int (*look_at)(void *object, Tensor *out); /* what lies where, owned by the object */
} Exchange;

enum { ON_CPU = 1, MAJOR_VERSION = 1, SIGNED = 0, FLOAT = 2 };

/* ---- A group's memory ---------------------------------------------------------------------------------------- */

enum { MOST_RANKS = 64 };

enum { BLOCK = 512 }; /* numbers of each rank that are added at once */

/* Words of a rank's page; see popdist.host_memory.flags and waiting. */
enum { COUNTER = 0, PURPOSES = 1, NUMBERS = 4, SLEEPS = 10 };

/* The dtypes that are added here, in the order of popdist.host_memory.addition.SLOT_DTYPES. */
enum { FLOAT32, FLOAT64, INT32, INT64, NUM_DTYPES };

typedef struct {
    PyObject_HEAD
    PyObject *tensor_type, *flags, *memory; /* `memory` is kept mapped */
    PyObject *failure, *go_on;              /* names */
    const Exchange *exchange;
    _Atomic uint64_t *pages[MOST_RANKS];
    char *slots[MOST_RANKS];
    int pairs[MOST_RANKS][2];
    void *sums; /* room for a block of each rank: threads may have little of their own */
    int rank, size, num_looks;
    int64_t slot_bytes, most_bytes, offered_bytes; /* from there on ranks may offer their memory */
    uintptr_t *left; /* where tensors are left to Python that can be offered: begins and ends */
    int num_left;
    uint64_t purposes[NUM_DTYPES];
} Quick;

/* Whether the one tensor of the list has become the sum over the ranks; if not, nothing has happened. None: it may lie
 * where all ranks can map it, so Python adds it. */
PyObject *reduce(Quick *self, PyObject *list);

/* Add flat rows into all of them: their addresses, how many numbers, whether these are doubles, the divisor. */
PyObject *add_rows(PyObject *module, PyObject *args);

/* Numbers that Python hands over as the bytes of an array of 64-bit numbers. */
typedef struct {
    const char *bytes;
    Py_ssize_t length;
} Numbers;

static inline uint64_t number_at(Numbers numbers, int i) {
    uint64_t number;
    memcpy(&number, numbers.bytes + i * sizeof number, sizeof number);
    return number;
}

#endif
