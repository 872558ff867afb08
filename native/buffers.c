#include "native.h"

#include <string.h>

static const struct {
    const char *name;
    const char *codes; /* of Python's struct module */
    Py_ssize_t size;
} ITEMS[] = {
    [ITEM_U64] = {"uint64", "QL", 8},
    [ITEM_I64] = {"int64", "ql", 8},
    [ITEM_I32] = {"int32", "il", 4},
};

static int format_is(const char *format, item_type type) {
    if (format == NULL) return 0;
    if (*format == '@' || *format == '=' || *format == '<') format++;
    if (*format == '\0' || format[1] != '\0') return 0;
    return strchr(ITEMS[type].codes, *format) != NULL;
}

int view_array(PyObject *object, const char *name, item_type type, int writable, array_view *view) {
    const char *type_name = ITEMS[type].name;
    Py_ssize_t item_size = ITEMS[type].size;
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    view->buffer.obj = NULL;
    if (PyObject_GetBuffer(object, &view->buffer, flags) != 0) {
        PyErr_Format(PyExc_TypeError, "%s must be a contiguous%s buffer of %s, not %s", name,
                     writable ? " writable" : "", type_name, Py_TYPE(object)->tp_name);
        return -1;
    }
    view->data = view->buffer.buf;
    if (view->buffer.ndim != 1 || view->buffer.itemsize != item_size || !format_is(view->buffer.format, type)) {
        PyErr_Format(PyExc_TypeError, "%s must be one-dimensional %s, not %d-dimensional with format '%s'", name,
                     type_name, view->buffer.ndim, view->buffer.format ? view->buffer.format : "B");
        release_array(view);
        return -1;
    }
    view->length = view->buffer.len / item_size;
    if ((uintptr_t)view->data % (uintptr_t)item_size == 0) return 0;
    /* Bytes of a message may begin anywhere, and C reads integers where they are aligned alone. */
    if (writable) {
        PyErr_Format(PyExc_ValueError, "%s must be aligned to %zd bytes", name, item_size);
        release_array(view);
        return -1;
    }
    void *copy = PyMem_Malloc(view->buffer.len);
    if (copy == NULL) {
        release_array(view);
        PyErr_NoMemory();
        return -1;
    }
    view->data = memcpy(copy, view->buffer.buf, view->buffer.len);
    return 0;
}

void release_array(array_view *view) {
    if (view->buffer.obj == NULL) return;
    if (view->data != view->buffer.buf) PyMem_Free(view->data);
    PyBuffer_Release(&view->buffer);
}

int check_length(const array_view *view, const char *name, Py_ssize_t length) {
    if (view->length == length) return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd items, expected %zd", name, view->length, length);
    return -1;
}

int read_u64(PyObject *object, const char *name, uint64_t *value) {
    PyObject *integer = PyNumber_Index(object);
    if (integer == NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be an int, not %s", name, Py_TYPE(object)->tp_name);
        return -1;
    }
    unsigned long long read = PyLong_AsUnsignedLongLong(integer);
    Py_DECREF(integer);
    if (read == (unsigned long long)-1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_OverflowError, "%s must lie in 0..2**64-1", name);
        return -1;
    }
    *value = (uint64_t)read;
    return 0;
}
