/* What reads and changes tables of keyed state with an undo log: ftlayer.functions.undo. */
#ifndef FTLAYER_UNDO_H
#define FTLAYER_UNDO_H

#include "native.h"

/* ftlayer.functions.keyed.ATOMS */
static inline int is_atom(PyObject *value) {
    return PyLong_CheckExact(value) || PyUnicode_CheckExact(value) || PyFloat_CheckExact(value) || value == Py_None ||
           PyBool_Check(value) || PyBytes_CheckExact(value);
}

/* Whether nothing can change `value`, as far as that is quick to see. */
static inline int is_plainly_immutable(PyObject *value) {
    if (is_atom(value)) return 1;
    if (!PyTuple_CheckExact(value)) return 0;
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(value); place++) {
        if (!is_atom(PyTuple_GET_ITEM(value, place))) return 0;
    }
    return 1;
}

/* Append restore, key and old to the list `entries`: all of them, or none and -1 with an error. */
int log_change(PyObject *entries, PyObject *restore, PyObject *key, PyObject *old);

#endif
