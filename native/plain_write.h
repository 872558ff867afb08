/* Plain Python values as the buffers of Arrow's columns. What is not plain is kept as it is, or found out. */
#ifndef FTLAYER_PLAIN_WRITE_H
#define FTLAYER_PLAIN_WRITE_H

#include "native.h"

#include <string.h>

typedef struct {
    char type; /* as above; 'O': anything, kept as a list */
    int nullable;
    Py_ssize_t nulls;
    PyObject *validity; /* bytes, NULL while nothing is null */
    PyObject *values;   /* bytes: the values, or the offsets of texts; a list for 'O' */
    PyObject *bytes;    /* bytes of texts; NULL for other types */
    Py_ssize_t used;    /* of `bytes` */
} column_maker;

/* What a value comes to: it is in, it needs another conversion than these, or there is a Python error. */
typedef enum { FITS, MISFIT, FAILED } fit;

static inline Py_ssize_t value_size(char type) {
    switch (type) {
    case 'c':
        return 1;
    case 's':
        return 2;
    case 'i':
    case 'u':
    case 'z':
        return 4;
    default:
        return 8;
    }
}

static inline PyObject *zeros(Py_ssize_t size) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (bytes != NULL) memset(PyBytes_AS_STRING(bytes), 0, (size_t)size);
    return bytes;
}

/* Bytes of the values of so many rows: of texts, of their offsets. */
static inline Py_ssize_t values_size(const column_maker *maker, Py_ssize_t rows) {
    if (maker->type == 'b') return (rows + 7) / 8;
    return (rows + (maker->type == 'u' || maker->type == 'z')) * value_size(maker->type);
}

static inline int open_maker(char type, int nullable, Py_ssize_t rows, column_maker *out) {
    memset(out, 0, sizeof *out);
    out->type = type;
    out->nullable = nullable;
    if (type == 'O') {
        out->values = PyList_New(rows);
        return out->values == NULL ? -1 : 0;
    }
    int text = type == 'u' || type == 'z';
    out->values = type == 'b' ? zeros(values_size(out, rows)) : PyBytes_FromStringAndSize(NULL, values_size(out, rows));
    if (text) out->bytes = PyBytes_FromStringAndSize(NULL, 16 * rows + 64);
    if (out->values == NULL || (text && out->bytes == NULL)) return -1;
    if (text) *(int32_t *)PyBytes_AS_STRING(out->values) = 0;
    return 0;
}

static inline void release_maker(column_maker *maker) {
    Py_CLEAR(maker->validity);
    Py_CLEAR(maker->values);
    Py_CLEAR(maker->bytes);
}

static inline fit put_null(column_maker *maker, Py_ssize_t row, Py_ssize_t rows) {
    if (!maker->nullable) return MISFIT;
    if (maker->validity == NULL) {
        maker->validity = PyBytes_FromStringAndSize(NULL, (rows + 7) / 8);
        if (maker->validity == NULL) return FAILED;
        memset(PyBytes_AS_STRING(maker->validity), 0xFF, (size_t)((rows + 7) / 8));
    }
    PyBytes_AS_STRING(maker->validity)[row >> 3] &= (char)~(1 << (row & 7));
    maker->nulls++;
    char *values = PyBytes_AS_STRING(maker->values);
    if (maker->bytes != NULL) {
        ((int32_t *)values)[row + 1] = (int32_t)maker->used;
    } else if (maker->type != 'b') {
        Py_ssize_t size = value_size(maker->type);
        memset(values + row * size, 0, (size_t)size);
    }
    return FITS;
}

static inline fit put_text(column_maker *maker, PyObject *value, Py_ssize_t row) {
    const char *text;
    Py_ssize_t size;
    if (maker->type == 'z') {
        if (!PyBytes_CheckExact(value)) return MISFIT;
        text = PyBytes_AS_STRING(value);
        size = PyBytes_GET_SIZE(value);
    } else {
        if (!PyUnicode_CheckExact(value)) return MISFIT;
        if (PyUnicode_IS_COMPACT_ASCII(value)) {
            text = (const char *)PyUnicode_DATA(value);
            size = PyUnicode_GET_LENGTH(value);
        } else {
            text = PyUnicode_AsUTF8AndSize(value, &size);
        }
        if (text == NULL) { /* half a surrogate pair: the next conversion says so */
            if (!PyErr_ExceptionMatches(PyExc_UnicodeError)) return FAILED;
            PyErr_Clear();
            return MISFIT;
        }
    }
    if (size > INT32_MAX - maker->used) return MISFIT;
    Py_ssize_t room = PyBytes_GET_SIZE(maker->bytes);
    if (size > room - maker->used) {
        room = 2 * (maker->used + size);
        if (_PyBytes_Resize(&maker->bytes, room) != 0) return FAILED;
    }
    memcpy(PyBytes_AS_STRING(maker->bytes) + maker->used, text, (size_t)size);
    maker->used += size;
    ((int32_t *)PyBytes_AS_STRING(maker->values))[row + 1] = (int32_t)maker->used;
    return FITS;
}

/* As PyLong_AsLongLongAndOverflow, without a call for most. */
static inline long long integer_of(PyObject *value, int *overflow) {
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)value)) {
        *overflow = 0;
        return PyUnstable_Long_CompactValue((PyLongObject *)value);
    }
#else
    Py_ssize_t size = Py_SIZE(value);
    if (size >= -1 && size <= 1) {
        *overflow = 0;
        return size == 0 ? 0 : (long long)size * (long long)((PyLongObject *)value)->ob_digit[0];
    }
#endif
    return PyLong_AsLongLongAndOverflow(value, overflow);
}

static inline fit put_integer(column_maker *maker, PyObject *value, Py_ssize_t row) {
    if (!PyLong_CheckExact(value)) return MISFIT;
    int overflow;
    long long number = integer_of(value, &overflow);
    if (overflow != 0) return MISFIT;
    char *values = PyBytes_AS_STRING(maker->values);
    switch (maker->type) {
    case 'c':
        if (number != (int8_t)number) return MISFIT;
        ((int8_t *)values)[row] = (int8_t)number;
        break;
    case 's':
        if (number != (int16_t)number) return MISFIT;
        ((int16_t *)values)[row] = (int16_t)number;
        break;
    case 'i':
        if (number != (int32_t)number) return MISFIT;
        ((int32_t *)values)[row] = (int32_t)number;
        break;
    default:
        ((int64_t *)values)[row] = number;
    }
    return FITS;
}

static inline fit put_value(column_maker *maker, PyObject *value, Py_ssize_t row, Py_ssize_t rows) {
    if (maker->type == 'O') {
        if (value == Py_None && !maker->nullable) return MISFIT;
        PyObject *before = PyList_GET_ITEM(maker->values, row); /* of a record that has failed in a later column */
        PyList_SET_ITEM(maker->values, row, Py_NewRef(value));
        Py_XDECREF(before);
        return FITS;
    }
    if (value == Py_None) return put_null(maker, row, rows);
    switch (maker->type) {
    case 'u':
    case 'z':
        return put_text(maker, value, row);
    case 'b':
        if (!PyBool_Check(value)) return MISFIT;
        if (value == Py_True) PyBytes_AS_STRING(maker->values)[row >> 3] |= (char)(1 << (row & 7));
        return FITS;
    case 'g':
        if (!PyFloat_CheckExact(value)) return MISFIT;
        ((double *)PyBytes_AS_STRING(maker->values))[row] = PyFloat_AS_DOUBLE(value);
        return FITS;
    default:
        return put_integer(maker, value, row);
    }
}

static inline fit put_record(column_maker *makers, Py_ssize_t width, PyObject *record, Py_ssize_t row, Py_ssize_t rows) {
    if (width == 1) return put_value(makers, record, row, rows);
    if (!PyTuple_CheckExact(record) || PyTuple_GET_SIZE(record) != width) return MISFIT;
    for (Py_ssize_t column = 0; column < width; column++) {
        fit found = put_value(&makers[column], PyTuple_GET_ITEM(record, column), row, rows);
        if (found != FITS) return found;
    }
    return FITS;
}

/* Make room for more rows than `rows`; 0, or -1 with an error. */
static inline int grow_maker(column_maker *maker, Py_ssize_t rows, Py_ssize_t wanted) {
    if (maker->type == 'O') {
        PyObject *longer = PyList_New(wanted);
        if (longer == NULL) return -1;
        for (Py_ssize_t row = 0; row < rows; row++) {
            PyList_SET_ITEM(longer, row, PyList_GET_ITEM(maker->values, row));
            PyList_SET_ITEM(maker->values, row, NULL);
        }
        Py_SETREF(maker->values, longer);
        return 0;
    }
    Py_ssize_t before = PyBytes_GET_SIZE(maker->values);
    Py_ssize_t size = values_size(maker, wanted);
    if (_PyBytes_Resize(&maker->values, size) != 0) return -1;
    if (maker->type == 'b') memset(PyBytes_AS_STRING(maker->values) + before, 0, (size_t)(size - before));
    if (maker->validity == NULL) return 0;
    before = PyBytes_GET_SIZE(maker->validity);
    size = (wanted + 7) / 8;
    if (_PyBytes_Resize(&maker->validity, size) != 0) return -1;
    memset(PyBytes_AS_STRING(maker->validity) + before, 0xFF, (size_t)(size - before));
    return 0;
}

/* Take back rows from `rows` up to `behind`, of which some may have been put. */
static inline void shorten_maker(column_maker *maker, Py_ssize_t rows, Py_ssize_t behind) {
    if (maker->values == NULL) return; /* there was no memory to make it longer */
    if (maker->type == 'O') {
        for (Py_ssize_t row = rows; row < behind; row++) {
            PyObject *object = PyList_GET_ITEM(maker->values, row);
            PyList_SET_ITEM(maker->values, row, NULL);
            Py_XDECREF(object);
        }
        return;
    }
    uint8_t *values = (uint8_t *)PyBytes_AS_STRING(maker->values);
    uint8_t *validity = maker->validity == NULL ? NULL : (uint8_t *)PyBytes_AS_STRING(maker->validity);
    if (maker->bytes != NULL) maker->used = ((int32_t *)values)[rows];
    for (Py_ssize_t row = rows; row < behind; row++) {
        if (maker->type == 'b') values[row >> 3] &= (uint8_t)~(1 << (row & 7));
        if (validity != NULL && !((validity[row >> 3] >> (row & 7)) & 1)) {
            validity[row >> 3] |= (uint8_t)(1 << (row & 7));
            maker->nulls--;
        }
    }
}

/* Let go of much room that is not used: who gets the column holds on to all of it. */
static inline int trim_bytes(PyObject **bytes, Py_ssize_t used) {
    return PyBytes_GET_SIZE(*bytes) - used <= used / 8 ? 0 : _PyBytes_Resize(bytes, used);
}

/* The finished column of so many rows: (validity or None, values, bytes or None, nulls). Takes what it returns from the
 * maker. */
static inline PyObject *column_of(column_maker *maker, Py_ssize_t rows) {
    if (maker->type == 'O') {
        if (PyList_SetSlice(maker->values, rows, PyList_GET_SIZE(maker->values), NULL) != 0) return NULL;
    } else {
        if (maker->bytes != NULL && _PyBytes_Resize(&maker->bytes, maker->used) != 0) return NULL;
        if (trim_bytes(&maker->values, values_size(maker, rows)) != 0) return NULL;
        if (maker->validity != NULL && trim_bytes(&maker->validity, (rows + 7) / 8) != 0) return NULL;
    }
    return Py_BuildValue("(OOOn)", maker->validity ? maker->validity : Py_None, maker->values,
                         maker->bytes ? maker->bytes : Py_None, maker->nulls);
}

#endif
