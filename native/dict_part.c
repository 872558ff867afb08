/* A dict that does not change, read bit by bit: what a snapshot writes of a table's base. */
#include "native.h"

/* Append a key, and its value unless it is marked as deleted; 0, or -1 with an error. */
static int append_entry(PyObject *lists, PyObject *key, PyObject *value, PyObject *deleted) {
    if (value == deleted) return PyList_Append(PyTuple_GET_ITEM(lists, 3), key);
    if (PyList_Append(PyTuple_GET_ITEM(lists, 1), key) != 0) return -1;
    return PyList_Append(PyTuple_GET_ITEM(lists, 2), value);
}

/* Take up to `most` entries from `*at` on, but those whose keys are in `seen`; 0, or -1 with an error. */
static int append_entries(PyObject *dict, Py_ssize_t *at, Py_ssize_t most, PyObject *seen, PyObject *deleted,
                          PyObject *lists) {
    PyObject *key, *value;
    Py_ssize_t size = PyDict_GET_SIZE(dict);
    for (Py_ssize_t taken = 0; taken < most; taken++) {
        /* Whether a key is seen may be asked of Python code. */
        if (PyDict_GET_SIZE(dict) != size) {
            PyErr_SetString(PyExc_RuntimeError, "the dict changed while it was read");
            return -1;
        }
        if (!PyDict_Next(dict, at, &key, &value)) {
            *at = -1;
            return 0;
        }
        Py_INCREF(key);
        Py_INCREF(value);
        int is_seen = PyDict_GET_SIZE(seen) == 0 ? 0 : PyDict_Contains(seen, key);
        int failed = is_seen < 0 || (!is_seen && append_entry(lists, key, value, deleted) != 0);
        Py_DECREF(key);
        Py_DECREF(value);
        if (failed) return -1;
    }
    return 0;
}

PyObject *native_dict_part(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *dict, *seen, *deleted;
    Py_ssize_t at, most;
    if (!PyArg_ParseTuple(args, "O!nnO!O:dict_part", &PyDict_Type, &dict, &at, &most, &PyDict_Type, &seen, &deleted)) {
        return NULL;
    }
    if (at < 0 || most < 1) {
        PyErr_SetString(PyExc_ValueError, "dict_part: expected a place that it has returned, and at least one entry");
        return NULL;
    }
    PyObject *lists = Py_BuildValue("N[][][]", Py_NewRef(Py_None));
    if (lists == NULL) return NULL;
    PyObject *next = append_entries(dict, &at, most, seen, deleted, lists) == 0 ? PyLong_FromSsize_t(at) : NULL;
    if (next == NULL) {
        Py_DECREF(lists);
        return NULL;
    }
    PyObject *none = PyTuple_GET_ITEM(lists, 0);
    PyTuple_SET_ITEM(lists, 0, next); /* nobody else has seen it yet */
    Py_DECREF(none);
    return lists;
}
