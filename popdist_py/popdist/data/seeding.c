/* States of the Mersenne Twisters of Python and torch, as they are after a seed: rows as popdist.data.process_generators
 * copies them. Each word of a state follows from the one before it, so four states are made side by side, which takes
 * little longer than one. The formulas: Matsumoto and Nishimura, mt19937ar.c, 2002. */

#include "seeding.h"

#include <stdint.h>
#include <string.h>

enum { NUM_WORDS = 624, LANES = 4, TORCH_HEAD_BYTES = 20, PYTHON_HEAD_BYTES = 4 };

typedef uint32_t *const Words[LANES];

static uint32_t spread(uint32_t word) { return word ^ (word >> 30); }

/* mt19937ar.c's init_genrand, of which torch takes the lower half of a seed. */
static void seed_words(Words words, const uint64_t *seeds) {
    uint32_t last[LANES];
    for (int lane = 0; lane < LANES; lane++) words[lane][0] = last[lane] = (uint32_t)seeds[lane];
    for (uint32_t i = 1; i < NUM_WORDS; i++)
        for (int lane = 0; lane < LANES; lane++) words[lane][i] = last[lane] = 1812433253u * spread(last[lane]) + i;
}

static uint32_t begun[NUM_WORDS]; /* what init_by_array begins with */

/* mt19937ar.c's init_by_array, of a key of one word, or of two where the seed is that long. */
static void key_words(Words words, const uint64_t *seeds) {
    uint32_t last[LANES], keys[2][LANES];
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t low = (uint32_t)seeds[lane], high = (uint32_t)(seeds[lane] >> 32);
        keys[0][lane] = low, keys[1][lane] = high ? high + 1 : low, last[lane] = begun[0];
    }
    for (uint32_t i = 1; i < NUM_WORDS; i++)
        for (int lane = 0; lane < LANES; lane++)
            words[lane][i] = last[lane] = (begun[i] ^ spread(last[lane]) * 1664525u) + keys[(i - 1) & 1][lane];
    for (int lane = 0; lane < LANES; lane++)
        words[lane][1] = last[lane] = (words[lane][1] ^ spread(last[lane]) * 1664525u) + keys[1][lane];
    for (uint32_t i = 2; i < NUM_WORDS; i++)
        for (int lane = 0; lane < LANES; lane++)
            words[lane][i] = last[lane] = (words[lane][i] ^ spread(last[lane]) * 1566083941u) - i;
    for (int lane = 0; lane < LANES; lane++) {
        words[lane][1] = (words[lane][1] ^ spread(last[lane]) * 1566083941u) - 1;
        words[lane][0] = 0x80000000u;
    }
}

/* Rows for up to four of the numbers of a list from `first` on, as new bytes in `made`; NULL is an error. */
static PyObject *append_rows(PyObject *made, PyObject *numbers, Py_ssize_t first, const char *like,
                             Py_ssize_t num_bytes) {
    int is_torch = num_bytes > PYTHON_HEAD_BYTES + 4 * NUM_WORDS;
    uint64_t seeds[LANES] = {0};
    uint32_t spare[LANES][NUM_WORDS], *words[LANES] = {spare[0], spare[1], spare[2], spare[3]};
    for (int lane = 0; lane < LANES && first + lane < PyList_Size(numbers); lane++) {
        seeds[lane] = PyLong_AsUnsignedLongLong(PyList_GetItem(numbers, first + lane));
        if (PyErr_Occurred()) return NULL;
        PyObject *row = PyBytes_FromStringAndSize(like, num_bytes);
        if (row == NULL) return NULL;
        char *bytes = PyBytes_AsString(row);
        if (is_torch) memcpy(bytes, &seeds[lane], sizeof seeds[lane]);
        words[lane] = (uint32_t *)(bytes + (is_torch ? TORCH_HEAD_BYTES : PYTHON_HEAD_BYTES));
        int status = PyList_Append(made, row);
        Py_DECREF(row); /* the list keeps it */
        if (status != 0) return NULL;
    }
    (is_torch ? seed_words : key_words)(words, seeds);
    return made;
}

PyObject *seeded_rows(PyObject *module, PyObject *args) {
    PyObject *like, *numbers;
    (void)module;
    if (!PyArg_ParseTuple(args, "SO", &like, &numbers)) return NULL;
    Py_ssize_t num_bytes = PyBytes_Size(like);
    if (!PyList_Check(numbers) || num_bytes < PYTHON_HEAD_BYTES + 4 * NUM_WORDS) {
        PyErr_SetString(PyExc_TypeError, "seeded_rows(row, list of numbers)");
        return NULL;
    }
    if (begun[0] == 0) {
        begun[0] = 19650218u;
        for (uint32_t i = 1; i < NUM_WORDS; i++) begun[i] = 1812433253u * spread(begun[i - 1]) + i;
    }
    PyObject *made = PyList_New(0);
    for (Py_ssize_t first = 0; made != NULL && first < PyList_Size(numbers); first += LANES)
        if (append_rows(made, numbers, first, PyBytes_AsString(like), num_bytes) == NULL) Py_CLEAR(made);
    return made;
}
