/* The meetings of a group, as popdist.host_memory.flags has them; waiting long for a rank is Python's. */

#define _POSIX_C_SOURCE 199309L

#include "quick.h"

#include <sched.h>
#include <time.h>

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
static int have_come(const Quick *self, uint64_t number, int looks) {
    for (int rank = 0; rank < self->size; rank++)
        while (load(&self->pages[rank][COUNTER]) < number) {
            if (looks-- <= 0) return 0;
            if (looks & 3) pause_processor();
        }
    return 1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* Leave the core to others, and the lock of Python, until all have come; 0 where that takes long, or is an error. */
static int come_meanwhile(const Quick *self, uint64_t number, double until) {
    if (!take_turn(self->turn)) return 0;
    int is_done = 0;
    Py_BEGIN_ALLOW_THREADS
    do {
        sched_yield();
        is_done = have_come(self, number, 0);
    } while (!is_done && now() < until);
    Py_END_ALLOW_THREADS
    return is_done;
}

/* Whether to yield in this wait, as CrowdedYields.next_seconds. */
static int may_yield(Quick *self) {
    if (self->num_sleeps == 0) return 1;
    self->num_sleeps--;
    return 0;
}

/* Learn from a wait that began with yielding, as CrowdedYields.judge. */
static void judge(Quick *self, double waited) {
    if (waited < self->yield_seconds) self->distrust -= self->distrust > 0;
    else {
        int more = 2 * self->distrust + 1;
        self->distrust = self->num_sleeps = more < self->most_sleeps ? more : self->most_sleeps;
    }
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

/* Have Python wait for those who are late; FAILED where one is lost or came for something else. */
static int wait_for_all(Quick *self, uint64_t purpose) {
    if (PyErr_Occurred() || !take_turn(self->turn)) return FAILED;
    PyObject *number = PyLong_FromUnsignedLongLong(purpose);
    PyObject *done = number == NULL ? NULL : PyObject_CallMethodObjArgs(self->flags, self->go_on, number, NULL);
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done == NULL ? FAILED : WAITED;
}

int takes_part(const Quick *self) {
    PyObject *failure = PyObject_GetAttr(self->flags, self->failure);
    if (failure == NULL) PyErr_Clear();
    Py_XDECREF(failure);
    return failure == Py_None;
}

uint64_t next_number(const Quick *self) { return load(&self->pages[self->rank][COUNTER]) + 1; }

int meet(Quick *self, uint64_t purpose, uint64_t told, int num_looks) {
    _Atomic uint64_t *mine = self->pages[self->rank];
    uint64_t number = load(&mine[COUNTER]) + 1;
    store(&mine[PURPOSES + (number & 1)], purpose);
    store(&mine[NUMBERS + (number & 1)], told);
    store(&mine[COUNTER], number);
    if (!has_sleeper(self) && have_come(self, number, num_looks) && agree(self, number, purpose)) return CAME;
    if (!may_yield(self)) return wait_for_all(self, purpose);
    double start = now();
    int is_awake = !has_sleeper(self) && come_meanwhile(self, number, start + self->yield_seconds);
    int how = is_awake && agree(self, number, purpose) ? WAITED : wait_for_all(self, purpose);
    judge(self, now() - start);
    return how;
}

uint64_t told_by(const Quick *self, int rank) {
    return load(&self->pages[rank][NUMBERS + (load(&self->pages[self->rank][COUNTER]) & 1)]);
}
