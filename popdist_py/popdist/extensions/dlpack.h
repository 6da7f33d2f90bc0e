/* How C sees a tensor: what of DLPack's ABI is needed, version 1.3. Python.h comes before. */

#ifndef POPDIST_DLPACK_H
#define POPDIST_DLPACK_H

#include <stdint.h>

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

/* The functions of a class of tensors, or NULL with an error. */
static inline const Exchange *exchange_of(PyObject *tensor_type) {
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    if (capsule == NULL) return NULL;
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* the class keeps it */
    if (exchange != NULL && (exchange->version.major != MAJOR_VERSION || exchange->look_at == NULL)) {
        PyErr_SetString(PyExc_ValueError, "tensors of this class speak another DLPack");
        return NULL;
    }
    return exchange;
}

#endif
