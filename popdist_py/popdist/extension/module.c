/* The module that Python imports, popdist.extension._extension, and how threads share the rounding of rows.
 *
 * The threads are those of torch: a pool of one's own would wait for a core while these, which have just worked, spin. */

#define _GNU_SOURCE
#include "extension.h"

#include <dlfcn.h>
#include <stdatomic.h>

/* ---- Threads ------------------------------------------------------------------------------------------------------- */

enum { BLOCKS_AT_ONCE = 128 };

typedef struct {
    const Rows *rows;
    Work *work;
    _Atomic int64_t next;
    int64_t end;
} Job;

static int64_t num_blocks_of(const Row *row) { return (row->length + BLOCK - 1) / BLOCK; }

/* Take blocks until none is left. The blocks of a column's rows are counted through. */
static void take_part(void *argument) {
    Job *job = argument;
    const Rows *rows = job->rows;
    int64_t i = 0, before = 0, start;
    while ((start = atomic_fetch_add(&job->next, BLOCKS_AT_ONCE)) < job->end) {
        int64_t stop = start + BLOCKS_AT_ONCE < job->end ? start + BLOCKS_AT_ONCE : job->end;
        for (; i < rows->num_rows; before += num_blocks_of(&rows->rows[i++])) {
            int64_t first = start > before ? start - before : 0, num_blocks = num_blocks_of(&rows->rows[i]);
            int64_t last = stop - before < num_blocks ? stop - before : num_blocks;
            for (int64_t column = 0; first < last && column < rows->num_columns; column++)
                job->work(rows, &rows->rows[column * rows->num_rows + i], first, last - first);
            if (stop <= before + num_blocks) break;
        }
    }
}

/* The start of a parallel region of OpenMP, in the library that torch has loaded. */
typedef void Parallel(void (*)(void *), void *, unsigned, unsigned);

static void work_on(const Rows *rows, Work *work, int64_t start, int64_t end, int num_threads) {
    Job job = {rows, work, start, end};
    Parallel *parallel = NULL;
    if (num_threads > 1 && end - start > 2 * BLOCKS_AT_ONCE) *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (parallel != NULL) parallel(take_part, &job, (unsigned)num_threads, 0);
    else take_part(&job);
}

/* ---- Called from Python -------------------------------------------------------------------------------------------- */

/* Each row as seven 64-bit numbers, column by column; how many columns; the blocks of a column that are worked on; then
 * the random bits' seed and step, and the number of threads. */
static PyObject *run(PyObject *args, Work *work) {
    const char *bytes;
    Py_ssize_t num_bytes;
    long long num_columns, start, end;
    unsigned long long seed;
    unsigned int step;
    int num_threads;
    if (!PyArg_ParseTuple(args, "y#LLLKIi", &bytes, &num_bytes, &num_columns, &start, &end, &seed, &step, &num_threads))
        return NULL;
    int64_t num_rows = num_bytes / (7 * (Py_ssize_t)sizeof(uint64_t));
    Row *each = PyMem_Calloc(num_rows + 1, sizeof(Row));
    if (each == NULL) return PyErr_NoMemory();
    for (int64_t i = 0; i < num_rows; i++) {
        uint64_t field[7];
        memcpy(field, bytes + i * sizeof field, sizeof field);
        uint64_t wide = field[0] - (uint64_t)start * BLOCK * sizeof(float);
        each[i] = (Row){(char *)(uintptr_t)wide, (char *)(uintptr_t)field[1], (int64_t)field[2],
                        (int64_t)field[3],       (int64_t)field[4],           (int64_t)field[5],
                        (int64_t)field[6]};
    }
    Rows rows = {each, num_rows / num_columns, num_columns, {(uint32_t)seed, (uint32_t)(seed >> 32)}, step, best_draw()};
    Py_BEGIN_ALLOW_THREADS
    work_on(&rows, work, start, end, num_threads);
    Py_END_ALLOW_THREADS
    PyMem_Free(each);
    Py_RETURN_NONE;
}

static PyObject *widen_rows(PyObject *module, PyObject *args) {
    (void)module;
    return run(args, widen_blocks);
}

static PyObject *round_rows(PyObject *module, PyObject *args) {
    (void)module;
    return run(args, round_blocks);
}

static PyMethodDef functions[] = {
    {"add_rows", add_rows, METH_VARARGS, NULL},
    {"square_sum", square_sum, METH_VARARGS, NULL},
    {"widen_rows", widen_rows, METH_VARARGS, NULL},
    {"round_rows", round_rows, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_extension", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__extension(void) { return PyModuleDef_Init(&definition); }
