/* What the files of the extension share: a group's memory. */

#ifndef POPDIST_QUICK_H
#define POPDIST_QUICK_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "../extensions/dlpack.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* ---- A group's memory ---------------------------------------------------------------------------------------- */

enum { MOST_RANKS = 64 };

enum { MOST_ROWS = 4 }; /* that are added in one pass */

enum { BLOCK = 512 }; /* numbers of each rank that are added at once */

/* Words of a rank's page; see popdist.host_memory.flags and waiting. */
enum { COUNTER = 0, PURPOSES = 1, NUMBERS = 4, SLEEPS = 10 };

/* The dtypes that are added here, in the order of popdist.host_memory.addition.SLOT_DTYPES. */
enum { FLOAT32, FLOAT64, INT32, INT64, NUM_DTYPES };

/* A tensor in a shared storage, of which all ranks know where it lies. */
typedef struct {
    uintptr_t key, address;   /* torch's object of the storage, which a weak reference keeps, and where it begins */
    uint64_t storage_bytes;   /* its length */
    char *data;               /* where the tensor begins */
    int64_t length;
    int dtype;
    uint64_t places[MOST_ROWS]; /* what each rank tells */
    char *rows[MOST_ROWS];      /* this rank's share of each */
    int64_t share;
    PyObject *memory; /* keeps the rows mapped, and the weak reference */
} Known;

/* The turn of a thread among those of a process that use a group. While a thread runs C alone, Python's lock is enough. */
typedef struct {
    PyObject *pending, *is_taken, *take, *end; /* what is still to be done, and methods of the lock */
    int is_mine;                               /* whether this thread has taken the lock */
} Turn;

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
    double yield_seconds; /* before Python waits */
    int most_sleeps, num_sleeps, distrust; /* as popdist.host_memory.waiting.CrowdedYields */
    int64_t slot_bytes, most_bytes, offered_bytes; /* from there on ranks may offer their memory */
    uintptr_t *left; /* where tensors are left to Python that can be offered: begins and ends */
    int num_left;
    uint64_t purposes[NUM_DTYPES];
    Known *known; /* shared tensors that are added without Python */
    int num_known;
    unsigned long long num_shared; /* how often that was done */
    PyObject *settle;              /* gives the method with which Python goes on */
    Turn *turn;                    /* of the call that is going on */
} Quick;

/* One tensor of numbers in a row. */
typedef struct {
    PyObject *object;
    char *data;
    int64_t length, num_bytes;
    int dtype;
} Run;

/* ---- quick_meetings.c ---------------------------------------------------------------------------------------- */

/* Whether this rank still meets the others; where it does not, Python says why. */
int takes_part(const Quick *self);

/* The number of the next meeting. */
uint64_t next_number(const Quick *self);

/* Meet for a purpose and tell all a number; after so many looks this rank yields, and then Python waits. Whether all came
 * at once, or other threads may have run meanwhile, or FAILED. */
enum { CAME, WAITED, FAILED };
int meet(Quick *self, uint64_t purpose, uint64_t told, int num_looks);

/* What a rank told at the last meeting. */
uint64_t told_by(const Quick *self, int rank);

/* ---- quick_shared.c ------------------------------------------------------------------------------------------ */

/* Whether Python may have an offer to make for the tensor. An address proves nothing, and Python looks again. */
int is_left(const Quick *self, const Run *run);

/* Whether the tensor is known, and what of it, with a reference; if not, Python has to look at it. */
int find_known(const Quick *self, const Run *run, Known *known);

/* Add a known tensor where all ranks have theirs, or have Python add it; 0 where that is an error. Takes the reference. */
int add_known(Quick *self, const Known *known, const Run *run);

/* From now on, large tensors that begin in these places are left to Python, or known. */
PyObject *leave(Quick *self, PyObject *args);

/* Know a tensor: what Known says of it, the places, the rows, and what keeps these mapped. */
PyObject *know(Quick *self, PyObject *args);

/* Know no tensor any more. */
PyObject *forget(Quick *self, PyObject *none);

/* ---- quick_call.c -------------------------------------------------------------------------------------------- */

/* Whether nobody else does a collective, or has one to do before. */
int is_free(const Turn *turn);

/* Take the lock, once, before other threads may run; 0 where that is an error. */
int take_turn(Turn *turn);

/* The class of the method that torch calls, which a group has in place of its own in Python. */
extern PyType_Spec quick_call_spec;

/* ---- quick.c, quick_rows.c ----------------------------------------------------------------------------------- */

/* The purpose of a meeting for the sum of such a tensor. */
uint64_t purpose_of(const Quick *self, const Run *run);

/* Whether torch negates the tensor's numbers when they are read. */
int is_negated(PyObject *tensor);

/* Whether the one tensor of the list has become the sum over the ranks; if not, nothing has happened. None: it may lie
 * where all ranks can map it, so Python adds it. */
PyObject *reduce(Quick *self, PyObject *list, Turn *turn);

/* Add two flat rows or four into all of them. */
void add_into_all(char *const *rows, int num_rows, int64_t length, int is_double, double over);

/* The same for Python: their addresses, how many numbers, whether these are doubles, the divisor. */
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
