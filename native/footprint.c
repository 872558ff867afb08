/* Bytes of memory that plain Python values take up: what ftlayer.state.tables.footprint counts for them. */
#include "native.h"

#define MAX_DEPTH 8
#define NOT_PLAIN (-1)

/* sys.getsizeof counts what the garbage collector has before an object. */
#define GC_HEAD ((Py_ssize_t)(2 * sizeof(void *)))

static Py_ssize_t text_bytes(PyObject *text) {
    Py_ssize_t length = PyUnicode_GET_LENGTH(text) + 1;
    if (PyUnicode_IS_COMPACT_ASCII(text)) return (Py_ssize_t)sizeof(PyASCIIObject) + length;
    /* Without UTF-8 that is kept beside it: whoever asks for that wants the text's size, not what was asked of it. */
    return (Py_ssize_t)sizeof(PyCompactUnicodeObject) + length * (Py_ssize_t)PyUnicode_KIND(text);
}

/* Bytes of an int with up to three digits of 30 bits. */
static Py_ssize_t int_bytes(PyObject *number) {
    int overflow;
    int64_t value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) return NOT_PLAIN;
    uint64_t size = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    Py_ssize_t digits = size >> 60 ? 3 : size >> 30 ? 2 : 1;
    return PyLong_Type.tp_basicsize + 4 * digits;
}

/* Bytes of a value with all that it consists of; NOT_PLAIN if it is no atom and no tuple of plain values. */
static Py_ssize_t bytes_of(PyObject *value, int depth) {
    if (PyLong_CheckExact(value) || PyBool_Check(value)) return int_bytes(value);
    if (PyUnicode_CheckExact(value)) return PyUnicode_IS_COMPACT(value) ? text_bytes(value) : NOT_PLAIN;
    if (PyBytes_CheckExact(value)) return PyBytes_Type.tp_basicsize + PyBytes_GET_SIZE(value);
    if (PyFloat_CheckExact(value)) return PyFloat_Type.tp_basicsize;
    if (value == Py_None) return Py_TYPE(value)->tp_basicsize;
    if (!PyTuple_CheckExact(value) || depth == 0) return NOT_PLAIN;
    Py_ssize_t items = PyTuple_GET_SIZE(value);
    Py_ssize_t bytes = PyTuple_Type.tp_basicsize + GC_HEAD + items * (Py_ssize_t)sizeof(PyObject *);
    for (Py_ssize_t i = 0; i < items; i++) {
        Py_ssize_t more = bytes_of(PyTuple_GET_ITEM(value, i), depth - 1);
        if (more == NOT_PLAIN) return NOT_PLAIN;
        bytes += more;
    }
    return bytes;
}

PyObject *native_plain_footprint(PyObject *self, PyObject *values) {
    (void)self;
    if (!PyList_CheckExact(values)) {
        PyErr_SetString(PyExc_TypeError, "plain_footprint: expected a list");
        return NULL;
    }
    Py_ssize_t bytes = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); i++) {
        Py_ssize_t more = bytes_of(PyList_GET_ITEM(values, i), MAX_DEPTH);
        if (more == NOT_PLAIN) Py_RETURN_NONE;
        bytes += more;
    }
    return PyLong_FromSsize_t(bytes);
}
