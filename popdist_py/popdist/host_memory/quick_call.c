/* The method `allreduce` of a process group: from torch's call to the sum of a small tensor without a frame of Python.
 *
 * Whatever is not a synchronous sum of one list of tensors, made while nobody looks and nothing else of the group is
 * to be done, goes on to the group's method in Python, with the arguments that came.
 */

#include "quick.h"

#include <stddef.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *quick;                       /* None: the group has one rank, and nothing is to be added */
    PyObject *options_type, *sum;          /* the class of torch's options, and the operation that is done here */
    Turn turn;                             /* as it is between two calls */
    PyObject *num_modes, *profiler;        /* who looks: a function, and the names of a module */
    PyObject *work;                        /* what a call gives back */
    PyObject *large, *otherwise;           /* add what may lie where all can map it; give the method in Python */
    PyObject *async_op, *reduce_op, *is_profiling; /* names */
    unsigned long long num_sums;
} QuickCall;

int is_free(const Turn *turn) {
    if (PySet_Size(turn->pending) != 0) return 0;
    PyObject *is_taken = PyObject_CallNoArgs(turn->is_taken);
    Py_XDECREF(is_taken);
    return is_taken == Py_False;
}

int take_turn(Turn *turn) {
    PyObject *taken = turn->is_mine ? Py_NewRef(Py_True) : PyObject_CallNoArgs(turn->take);
    Py_XDECREF(taken);
    if (taken != NULL) turn->is_mine = 1;
    return taken != NULL;
}

static void end_turn(const Turn *turn) {
    PyObject *type, *value, *trace;
    if (!turn->is_mine) return;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(turn->end));
    PyErr_Restore(type, value, trace);
}

/* Whether these are the options of a synchronous sum. */
static int is_sum(const QuickCall *self, PyObject *options) {
    if ((PyObject *)Py_TYPE(options) != self->options_type) return 0;
    PyObject *is_async = PyObject_GetAttr(options, self->async_op);
    PyObject *op = is_async == Py_False ? PyObject_GetAttr(options, self->reduce_op) : NULL;
    PyObject *is_same = op == NULL ? NULL : PyObject_RichCompare(op, self->sum, Py_EQ);
    Py_XDECREF(is_async);
    Py_XDECREF(op);
    Py_XDECREF(is_same);
    return is_same == Py_True;
}

static int is_unseen(const QuickCall *self) {
    PyObject *found = PyObject_CallNoArgs(self->num_modes);
    long num_modes = found == NULL ? -1 : PyLong_AsLong(found);
    Py_XDECREF(found);
    return num_modes == 0 && PyDict_GetItemWithError(self->profiler, self->is_profiling) == Py_False;
}

/* Add the one tensor of a list: Py_True where that was done, Py_False where nothing was, NULL where it is an error. */
static PyObject *add(const QuickCall *self, PyObject *tensors) {
    Turn turn = self->turn;
    if (self->quick == Py_None) return PyBool_FromLong(is_free(&turn));
    PyObject *answer = reduce((Quick *)self->quick, tensors, &turn);
    if (answer == Py_None && self->large != Py_None) {
        PyObject *done = PyObject_CallFunctionObjArgs(self->large, tensors, NULL);
        Py_DECREF(answer);
        answer = done == NULL ? NULL : Py_NewRef(Py_True);
        Py_XDECREF(done);
    }
    end_turn(&turn);
    return answer;
}

static PyObject *call_otherwise(const QuickCall *self, PyObject *args, PyObject *named) {
    PyErr_Clear();
    PyObject *method = PyObject_CallNoArgs(self->otherwise);
    PyObject *work = method == NULL ? NULL : PyObject_Call(method, args, named);
    Py_XDECREF(method);
    return work;
}

static PyObject *call(QuickCall *self, PyObject *args, PyObject *named) {
    int is_plain = named == NULL && PyTuple_Size(args) == 2;
    if (!is_plain || !is_sum(self, PyTuple_GetItem(args, 1)) || !is_unseen(self)) return call_otherwise(self, args, named);
    PyObject *answer = add(self, PyTuple_GetItem(args, 0));
    if (answer == NULL) return NULL;
    Py_DECREF(answer);
    if (answer != Py_True) return call_otherwise(self, args, named);
    self->num_sums++;
    return Py_NewRef(self->work);
}

/* ---- The class ----------------------------------------------------------------------------------------------- */

static int set_names(QuickCall *self) {
    self->async_op = PyUnicode_InternFromString("asyncOp");
    self->reduce_op = PyUnicode_InternFromString("reduceOp");
    self->is_profiling = PyUnicode_InternFromString("_is_profiler_enabled");
    return self->async_op != NULL && self->reduce_op != NULL && self->is_profiling != NULL;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *quick, *options_type, *sum, *pending, *lock, *num_modes, *profiler, *work, *large, *otherwise;
    (void)named;
    if (!PyArg_ParseTuple(args, "OOOO!OOO!OOO", &quick, &options_type, &sum, &PySet_Type, &pending, &lock, &num_modes,
                          &PyDict_Type, &profiler, &work, &large, &otherwise))
        return NULL;
    QuickCall *self = (QuickCall *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->quick = Py_NewRef(quick);
    self->options_type = Py_NewRef(options_type), self->sum = Py_NewRef(sum);
    self->turn.pending = Py_NewRef(pending);
    self->turn.is_taken = PyObject_GetAttrString(lock, "locked");
    self->turn.take = PyObject_GetAttrString(lock, "acquire");
    self->turn.end = PyObject_GetAttrString(lock, "release");
    self->num_modes = Py_NewRef(num_modes), self->profiler = Py_NewRef(profiler);
    self->work = Py_NewRef(work), self->large = Py_NewRef(large), self->otherwise = Py_NewRef(otherwise);
    if (set_names(self) && self->turn.is_taken != NULL && self->turn.take != NULL && self->turn.end != NULL) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void destroy(QuickCall *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject *held[] = {self->quick,     self->options_type, self->sum,       self->turn.pending, self->turn.is_taken,
                        self->turn.take, self->turn.end,     self->num_modes, self->profiler,     self->work,
                        self->large,     self->otherwise,    self->async_op,  self->reduce_op,    self->is_profiling};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_XDECREF(held[i]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"num_sums", T_ULONGLONG, offsetof(QuickCall, num_sums), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, destroy}, {Py_tp_call, call}, {Py_tp_members, members}, {0, NULL}};

PyType_Spec quick_call_spec = {"popdist.host_memory._quick.QuickCall", sizeof(QuickCall), 0, Py_TPFLAGS_DEFAULT, slots};
