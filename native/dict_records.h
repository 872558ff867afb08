/* Records as dicts from the names of columns to values: the form in which functions of wrapped queries get them. */
#ifndef FTLAYER_DICT_RECORDS_H
#define FTLAYER_DICT_RECORDS_H

#include "plain_read.h"
#include "plain_write.h"

/* The names of a record batch's columns as a tuple of interned str, which dicts of literals find without comparing.
 * NULL with an error; None where two columns are named the same, which is no dict. */
static inline PyObject *column_names(const struct ArrowSchema *schema) {
    PyObject *names = PyTuple_New(schema->n_children);
    for (int64_t i = 0; names != NULL && i < schema->n_children; i++) {
        const char *text = schema->children[i]->name;
        PyObject *name = PyUnicode_FromString(text == NULL ? "" : text);
        if (name == NULL) {
            Py_DECREF(names);
            return NULL;
        }
        PyUnicode_InternInPlace(&name);
        for (int64_t other = 0; other < i; other++) {
            if (PyTuple_GET_ITEM(names, other) == name) {
                Py_DECREF(name);
                Py_DECREF(names);
                Py_RETURN_NONE;
            }
        }
        PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}

/* A dict of these names, each with None: one of these copied is a record that does not grow any more. */
static inline PyObject *empty_record(PyObject *names) {
    PyObject *record = PyDict_New();
    for (Py_ssize_t i = 0; record != NULL && i < PyTuple_GET_SIZE(names); i++) {
        if (PyDict_SetItem(record, PyTuple_GET_ITEM(names, i), Py_None) != 0) Py_CLEAR(record);
    }
    return record;
}

static inline PyObject *read_dict(PyObject *empty, PyObject *names, const column_view *columns, int64_t row) {
    PyObject *record = PyDict_Copy(empty);
    for (Py_ssize_t column = 0; record != NULL && column < PyTuple_GET_SIZE(names); column++) {
        PyObject *value = value_at(&columns[column], row);
        if (value == NULL || PyDict_SetItem(record, PyTuple_GET_ITEM(names, column), value) != 0) Py_CLEAR(record);
        Py_XDECREF(value);
    }
    return record;
}

static inline PyObject *read_dicts(PyObject *names, const column_view *columns, int64_t rows) {
    PyObject *empty = empty_record(names);
    PyObject *records = empty == NULL ? NULL : PyList_New(rows);
    for (int64_t row = 0; records != NULL && row < rows; row++) {
        PyObject *record = read_dict(empty, names, columns, row);
        if (record == NULL) {
            Py_CLEAR(records);
        } else {
            PyList_SET_ITEM(records, row, record);
        }
    }
    Py_XDECREF(empty);
    return records;
}

/* What a name that is missing stands for is null; what is beside the names is left out where `lax`, else a misfit. */
static inline fit put_dict(column_maker *makers, PyObject *names, PyObject *record, Py_ssize_t row, Py_ssize_t rows,
                           int lax) {
    if (!PyDict_CheckExact(record)) return MISFIT;
    Py_ssize_t known = 0;
    for (Py_ssize_t column = 0; column < PyTuple_GET_SIZE(names); column++) {
        PyObject *value = PyDict_GetItemWithError(record, PyTuple_GET_ITEM(names, column));
        if (value == NULL) {
            if (PyErr_Occurred()) return FAILED; /* a key of the user's cannot be compared */
            value = Py_None;
        } else {
            known++;
        }
        fit found = put_value(&makers[column], value, row, rows);
        if (found != FITS) return found;
    }
    return lax || known == PyDict_GET_SIZE(record) ? FITS : MISFIT;
}

#endif
