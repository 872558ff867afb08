/* Columns of Arrow's as plain Python values: None, bool, int, float, str and bytes. */
#ifndef FTLAYER_PLAIN_READ_H
#define FTLAYER_PLAIN_READ_H

#include "arrow_c.h"
#include "known.h"
#include "native.h"

typedef struct {
    char type;               /* Arrow's format: b, c, s, i, l, f, g, u, z, U, Z; or O: objects, in a list */
    int64_t offset;          /* of the first row */
    const uint8_t *validity; /* NULL when nothing is null */
    const void *values;      /* offsets of texts; of objects the list, borrowed */
    const char *bytes;       /* of texts */
    known_column *known;     /* of texts and integers; NULL: each is made anew */
    uint32_t tags[AHEAD];    /* with `known`: of the rows from a multiple of AHEAD on */
} column_view;

static inline PyObject *text_at(const column_view *column, int64_t row, int64_t start, int64_t end) {
    const char *bytes = column->bytes + start;
    if (column->known != NULL) return known_object(column->known, column->tags[row % AHEAD], bytes, end - start);
    if (column->type == 'z' || column->type == 'Z') return PyBytes_FromStringAndSize(bytes, end - start);
    return PyUnicode_DecodeUTF8(bytes, end - start, NULL);
}

static inline PyObject *integer_at(const column_view *column, int64_t row, int64_t value) {
    if (column->known == NULL) return PyLong_FromLongLong(value);
    return known_object(column->known, column->tags[row % AHEAD], (const char *)&value, sizeof value);
}

static inline PyObject *value_at(const column_view *column, int64_t row) {
    int64_t i = column->offset + row;
    if (column->validity != NULL && !bit_is_set(column->validity, i)) return Py_NewRef(Py_None);
    switch (column->type) {
    case 'O':
        return Py_NewRef(PyList_GET_ITEM((PyObject *)column->values, i));
    case 'b':
        return PyBool_FromLong(bit_is_set(column->values, i));
    case 'c':
        return integer_at(column, row, ((const int8_t *)column->values)[i]);
    case 's':
        return integer_at(column, row, int16_at(column->values, i));
    case 'i':
        return integer_at(column, row, int32_at(column->values, i));
    case 'l':
        return integer_at(column, row, int64_at(column->values, i));
    case 'f':
        return PyFloat_FromDouble(float_at(column->values, i));
    case 'g':
        return PyFloat_FromDouble(double_at(column->values, i));
    case 'u':
    case 'z':
        return text_at(column, row, int32_at(column->values, i), int32_at(column->values, i + 1));
    default:
        return text_at(column, row, int64_at(column->values, i), int64_at(column->values, i + 1));
    }
}

/* A column whose values are in a list. */
static inline void open_objects(PyObject *list, column_view *out) { *out = (column_view){.type = 'O', .values = list}; }

/* 1 when the column is of a type that is read here, 0 when not. */
static inline int open_view(const struct ArrowSchema *schema, const struct ArrowArray *array, int64_t first, column_view *out) {
    const char *format = schema->format;
    if (schema->dictionary != NULL || format[0] == '\0' || format[1] != '\0') return 0;
    if (strchr("bcsilfguzUZ", format[0]) == NULL) return 0;
    out->type = format[0];
    out->offset = array->offset + first;
    out->validity = array->null_count == 0 ? NULL : array->buffers[0];
    out->values = array->buffers[1];
    out->bytes = array->n_buffers > 2 ? array->buffers[2] : NULL;
    out->known = NULL;
    return 1;
}

static inline PyObject *read_single(const column_view *column, int64_t rows) {
    PyObject *records = PyList_New(rows);
    if (records == NULL) return NULL;
    for (int64_t row = 0; row < rows; row++) {
        PyObject *value = value_at(column, row);
        if (value == NULL) {
            Py_DECREF(records);
            return NULL;
        }
        PyList_SET_ITEM(records, row, value);
    }
    return records;
}

static inline PyObject *read_tuples(const column_view *columns, int64_t width, int64_t rows) {
    PyObject *records = PyList_New(rows);
    if (records == NULL) return NULL;
    for (int64_t row = 0; row < rows; row++) {
        PyObject *record = PyTuple_New(width);
        if (record == NULL) goto failed;
        PyList_SET_ITEM(records, row, record);
        for (int64_t column = 0; column < width; column++) {
            PyObject *value = value_at(&columns[column], row);
            if (value == NULL) goto failed;
            PyTuple_SET_ITEM(record, column, value);
        }
    }
    return records;
failed:
    Py_DECREF(records);
    return NULL;
}

#endif
