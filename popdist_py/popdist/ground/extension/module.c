/* The module that Python imports, popdist.ground.extension._extension, and how threads share the rounding of a tensor.
 *
 * The threads are those of torch: a pool of one's own would wait for a core while these, which have just worked, spin. */

#define _GNU_SOURCE
#include "extension.h"

#include <dlfcn.h>
#include <stdatomic.h>

/* ---- Threads ------------------------------------------------------------------------------------------------------- */

enum { BLOCKS_AT_ONCE = 128 };

typedef struct {
    const Rounding *rounding;
    _Atomic int64_t next;
    int64_t end;
} Job;

/* Round blocks until none is left. */
static void take_part(void *argument) {
    Job *job = argument;
    int64_t start;
    while ((start = atomic_fetch_add(&job->next, BLOCKS_AT_ONCE)) < job->end)
        round_blocks(job->rounding, start, job->end - start < BLOCKS_AT_ONCE ? job->end - start : BLOCKS_AT_ONCE);
}

/* The start of a parallel region of OpenMP, in the library that torch has loaded. */
typedef void Parallel(void (*)(void *), void *, unsigned, unsigned);

static void round_all(const Rounding *rounding, int num_threads) {
    Job job = {rounding, 0, (rounding->length + BLOCK - 1) / BLOCK};
    Parallel *parallel = NULL;
    if (num_threads > 1 && job.end > 2 * BLOCKS_AT_ONCE) *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (parallel != NULL) parallel(take_part, &job, (unsigned)num_threads, 0);
    else take_part(&job);
}

/* ---- Called from Python -------------------------------------------------------------------------------------------- */

static PyObject *round_by_chance(PyObject *module, PyObject *args) {
    unsigned long long wide, held, seed;
    long long length, first;
    int dtype, num_threads;
    Rounding of = {.draw = best_draw()};
    (void)module;
    if (!PyArg_ParseTuple(args, "KKLiLIIKIi", &wide, &held, &length, &dtype, &first, &of.position, &of.tensor, &seed,
                          &of.step, &num_threads))
        return NULL;
    of.wide = (const char *)(uintptr_t)wide, of.held = (uint16_t *)(uintptr_t)held;
    of.length = length, of.dtype = dtype, of.first = first;
    of.seed[0] = (uint32_t)seed, of.seed[1] = (uint32_t)(seed >> 32);
    Py_BEGIN_ALLOW_THREADS
    round_all(&of, num_threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"add_rows", add_rows, METH_VARARGS, NULL},
    {"square_sum", square_sum, METH_VARARGS, NULL},
    {"round_by_chance", round_by_chance, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_extension", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__extension(void) { return PyModuleDef_Init(&definition); }
