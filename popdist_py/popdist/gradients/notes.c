/* The module that Python imports, popdist.gradients._notes: a model's parameters and buffers found, and gradients taken
 * and noted, as popdist.gradients.notes does where there is no extension. Every step does all of it. */

#include "notes.h"

static PyObject *parameters_name, *buffers_name, *modules_name; /* names of attributes */
static PyObject *version_name, *used_name, *reduced_name, *detach_name;
PyObject *grad_name;

/* ---- Parameters and buffers ------------------------------------------------------------------------------------ */

/* What a module has under a name, as a new reference: in its own dictionary most of the time. */
static PyObject *find(PyObject *module, PyObject *name) {
    PyObject *attributes = PyObject_GenericGetDict(module, NULL);
    if (attributes == NULL) return NULL;
    PyObject *found = Py_XNewRef(PyDict_GetItemWithError(attributes, name));
    Py_DECREF(attributes);
    return found != NULL || PyErr_Occurred() ? found : PyObject_GetAttr(module, name);
}

/* Append what a module's dictionary of this name holds to a list; how many entries it has, or -1. */
static Py_ssize_t append_values(PyObject *list, PyObject *module, PyObject *name) {
    PyObject *dictionary = find(module, name);
    Py_ssize_t count = dictionary == NULL ? -1 : PyMapping_Size(dictionary);
    PyObject *values = count > 0 ? PyMapping_Values(dictionary) : NULL;
    if (count > 0 && values == NULL) count = -1;
    for (Py_ssize_t i = 0; count > 0 && i < PyList_Size(values); i++)
        if (PyList_GetItem(values, i) != Py_None && PyList_Append(list, PyList_GetItem(values, i)) != 0) count = -1;
    Py_XDECREF(dictionary);
    Py_XDECREF(values);
    return count;
}

/* Find what each module of the list `waiting`, to which the children of each are appended once, has under a name. */
static int walk(PyObject *waiting, PyObject *seen, PyObject *name, PyObject *found) {
    for (Py_ssize_t i = 0; i < PyList_Size(waiting); i++) {
        PyObject *module = PyList_GetItem(waiting, i);
        if (append_values(found, module, name) < 0) return -1;
        int is_known = PySet_Size(seen) == 0 ? 0 : PySet_Contains(seen, module);
        if (is_known < 0) return -1;
        Py_ssize_t count = is_known ? 0 : append_values(waiting, module, modules_name);
        if (count < 0 || (count > 0 && PySet_Add(seen, module) != 0)) return -1;
    }
    return 0;
}

static PyObject *tensors_of(PyObject *module, PyObject *name) {
    PyObject *waiting = PyList_New(0), *seen = PySet_New(NULL), *found = PyList_New(0);
    int is_right = waiting != NULL && seen != NULL && found != NULL;
    if (is_right && module != Py_None)
        is_right = PyList_Append(waiting, module) == 0 && walk(waiting, seen, name, found) == 0;
    Py_XDECREF(waiting);
    Py_XDECREF(seen);
    if (is_right) return found;
    Py_XDECREF(found);
    return NULL;
}

static PyObject *module_parameters(PyObject *self, PyObject *module) {
    (void)self;
    return tensors_of(module, parameters_name);
}

static PyObject *module_buffers(PyObject *self, PyObject *module) {
    (void)self;
    return tensors_of(module, buffers_name);
}

/* ---- Gradients ------------------------------------------------------------------------------------------------- */

/* Whether the note on a gradient says that it was used as it is now; -1 is an error. */
static int is_used(PyObject *gradient) {
    PyObject *noted = PyObject_GetAttr(gradient, used_name);
    if (noted == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    PyObject *version = PyObject_GetAttr(gradient, version_name);
    int answer = version == NULL ? -1 : PyObject_RichCompareBool(noted, version, Py_EQ);
    Py_DECREF(noted);
    Py_XDECREF(version);
    return answer;
}

/* Take the gradient of one parameter: 1 for one that was used, 0 for none and for one that is put among those waited
 * for, -1 for an error. */
static int take(PyObject *parameter, PyObject *waited_for) {
    PyObject *gradient = PyObject_GetAttr(parameter, grad_name);
    if (gradient == NULL) return -1;
    int answer = 0;
    if (gradient != Py_None) {
        answer = PyObject_SetAttr(parameter, grad_name, Py_None) == 0 ? is_used(gradient) : -1;
        PyObject *key = answer == 0 ? PyLong_FromVoidPtr(parameter) : NULL;
        if (answer == 0) answer = key == NULL ? -1 : PyObject_SetItem(waited_for, key, gradient);
        Py_XDECREF(key);
    }
    Py_DECREF(gradient);
    return answer;
}

static PyObject *take_gradients(PyObject *self, PyObject *parameters) {
    PyObject *each = PyObject_GetIter(parameters), *waited_for = PyDict_New(), *parameter;
    int are_some_used = 0, answer = each == NULL || waited_for == NULL ? -1 : 0;
    (void)self;
    while (answer >= 0 && (parameter = PyIter_Next(each)) != NULL) {
        answer = take(parameter, waited_for);
        are_some_used |= answer > 0;
        Py_DECREF(parameter);
    }
    Py_XDECREF(each);
    if (answer >= 0 && !PyErr_Occurred()) return Py_BuildValue("NO", waited_for, are_some_used ? Py_True : Py_False);
    Py_XDECREF(waited_for);
    return NULL;
}

static int note(PyObject *parameter) {
    PyObject *gradient = PyObject_GetAttr(parameter, grad_name);
    if (gradient == NULL) return -1;
    PyObject *version = gradient == Py_None ? NULL : PyObject_GetAttr(gradient, version_name);
    int status = version == NULL ? 0 : PyObject_SetAttr(gradient, used_name, version);
    if (gradient != Py_None && version == NULL) status = -1;
    Py_XDECREF(version);
    Py_DECREF(gradient);
    return status;
}

static PyObject *note_used(PyObject *self, PyObject *parameters) {
    PyObject *each = PyObject_GetIter(parameters), *parameter;
    int status = each == NULL ? -1 : 0;
    (void)self;
    while (status == 0 && (parameter = PyIter_Next(each)) != NULL) {
        status = note(parameter);
        Py_DECREF(parameter);
    }
    Py_XDECREF(each);
    if (status != 0 || PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* ---- Gradients of all replicas --------------------------------------------------------------------------------- */

static int give(PyObject *parameter, PyObject *slot) {
    PyObject *gradient = PyObject_CallMethodObjArgs(slot, detach_name, NULL);
    int status = gradient == NULL ? -1 : PyObject_SetAttr(gradient, reduced_name, Py_True);
    if (status == 0) status = PyObject_SetAttr(parameter, grad_name, gradient);
    Py_XDECREF(gradient);
    return status;
}

static PyObject *give_slots(PyObject *self, PyObject *args) {
    PyObject *parameters, *slots;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &parameters, &PyList_Type, &slots)) return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(parameters) && i < PyList_Size(slots); i++)
        if (give(PyList_GetItem(parameters, i), PyList_GetItem(slots, i)) != 0) return NULL;
    Py_RETURN_NONE;
}

/* Whether a parameter has a gradient that was not made by popdist: 1 or 0, -1 for an error. */
static int is_unreduced(PyObject *parameter) {
    PyObject *gradient = PyObject_GetAttr(parameter, grad_name);
    if (gradient == NULL || gradient == Py_None) {
        Py_XDECREF(gradient);
        return gradient == NULL ? -1 : 0;
    }
    PyObject *noted = PyObject_GetAttr(gradient, reduced_name);
    Py_DECREF(gradient);
    if (noted == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 1;
    }
    int answer = PyObject_Not(noted);
    Py_DECREF(noted);
    return answer;
}

static PyObject *unreduced(PyObject *self, PyObject *parameters) {
    PyObject *each = PyObject_GetIter(parameters), *found = PyList_New(0), *parameter;
    int answer = each == NULL || found == NULL ? -1 : 0;
    (void)self;
    while (answer >= 0 && (parameter = PyIter_Next(each)) != NULL) {
        answer = is_unreduced(parameter);
        if (answer > 0) answer = PyList_Append(found, parameter);
        Py_DECREF(parameter);
    }
    Py_XDECREF(each);
    if (answer >= 0 && !PyErr_Occurred()) return found;
    Py_XDECREF(found);
    return NULL;
}

/* ---- Module ---------------------------------------------------------------------------------------------------- */

static int name_attributes(PyObject *module) {
    (void)module;
    parameters_name = PyUnicode_InternFromString("_parameters");
    buffers_name = PyUnicode_InternFromString("_buffers");
    modules_name = PyUnicode_InternFromString("_modules");
    grad_name = PyUnicode_InternFromString("grad");
    version_name = PyUnicode_InternFromString("_version");
    used_name = PyUnicode_InternFromString("_popdist_used");
    reduced_name = PyUnicode_InternFromString("_popdist_reduced");
    detach_name = PyUnicode_InternFromString("detach");
    return parameters_name && buffers_name && modules_name && grad_name && version_name && used_name &&
           reduced_name && detach_name ? 0 : -1;
}

static PyMethodDef functions[] = {
    {"module_parameters", module_parameters, METH_O, NULL},
    {"module_buffers", module_buffers, METH_O, NULL},
    {"take_gradients", take_gradients, METH_O, NULL},
    {"note_used", note_used, METH_O, NULL},
    {"fill_slots", fill_slots, METH_VARARGS, NULL},
    {"give_slots", give_slots, METH_VARARGS, NULL},
    {"unreduced", unreduced, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, name_attributes}, {0, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_notes", NULL, 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__notes(void) { return PyModuleDef_Init(&definition); }
