/* Seeds the Mersenne Twisters of Python and torch: their states are rows as popdist.data.process_generators copies
 * them. Each word of a state follows from the one before it, so four states are made side by side, which takes
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

/* What goes through a list of numbers: at each step it seeds a generator with the next one. */
typedef struct {
    PyObject_HEAD
    PyObject *numbers, *like, *generator;
    char *place;
    Py_ssize_t next;
    uint64_t seeds[LANES];
    uint32_t words[LANES][NUM_WORDS];
} Seeding;

static int is_of_torch(Py_ssize_t num_bytes) { return num_bytes > PYTHON_HEAD_BYTES + 4 * NUM_WORDS; }

/* Make the words for up to four numbers from the next one on. */
static int prepare_words(Seeding *self, Py_ssize_t count, int is_torch) {
    for (Py_ssize_t lane = 0; lane < LANES; lane++) {
        PyObject *number = PyList_GetItem(self->numbers, self->next + (lane < count ? lane : 0));
        self->seeds[lane] = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
        if (PyErr_Occurred()) return -1;
    }
    uint32_t *words[LANES] = {self->words[0], self->words[1], self->words[2], self->words[3]};
    (is_torch ? seed_words : key_words)(words, self->seeds);
    return 0;
}

static PyObject *seed_next(PyObject *object) {
    Seeding *self = (Seeding *)object;
    Py_ssize_t left = PyList_Size(self->numbers) - self->next, num_bytes = PyBytes_Size(self->like);
    if (left <= 0) return NULL;
    int lane = (int)(self->next % LANES), is_torch = is_of_torch(num_bytes);
    if (lane == 0 && prepare_words(self, left, is_torch) != 0) return NULL;
    const char *like = PyBytes_AsString(self->like);
    Py_ssize_t start = is_torch ? TORCH_HEAD_BYTES : PYTHON_HEAD_BYTES, stop = start + 4 * NUM_WORDS;
    memcpy(self->place, like, start);
    if (is_torch) memcpy(self->place, &self->seeds[lane], sizeof(uint64_t));
    memcpy(self->place + start, self->words[lane], stop - start);
    memcpy(self->place + stop, like + stop, num_bytes - stop);
    self->next++;
    if (self->generator != Py_None && PyObject_SetAttrString(self->generator, "gauss_next", Py_None) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static void forget(PyObject *object) {
    Seeding *self = (Seeding *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_DECREF(self->numbers), Py_DECREF(self->like), Py_DECREF(self->generator);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, seed_next},
    {Py_tp_dealloc, forget},
    {0, NULL},
};

static PyType_Spec spec = {"popdist.data._generators.Seeding", sizeof(Seeding), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyObject *seeding(PyObject *module, PyObject *args) {
    static PyTypeObject *type;
    PyObject *like, *generator, *numbers;
    unsigned long long place;
    (void)module;
    if (!PyArg_ParseTuple(args, "KSOO", &place, &like, &generator, &numbers)) return NULL;
    if (!PyList_Check(numbers) || PyBytes_Size(like) < PYTHON_HEAD_BYTES + 4 * NUM_WORDS) {
        PyErr_SetString(PyExc_TypeError, "seeding(place, row, generator, list of numbers)");
        return NULL;
    }
    if (type == NULL) {
        begun[0] = 19650218u;
        for (uint32_t i = 1; i < NUM_WORDS; i++) begun[i] = 1812433253u * spread(begun[i - 1]) + i;
        type = (PyTypeObject *)PyType_FromSpec(&spec);
        if (type == NULL) return NULL;
    }
    Seeding *made = PyObject_New(Seeding, type);
    if (made == NULL) return NULL;
    made->numbers = Py_NewRef(numbers), made->like = Py_NewRef(like), made->generator = Py_NewRef(generator);
    made->place = (char *)(uintptr_t)place, made->next = 0;
    return (PyObject *)made;
}
