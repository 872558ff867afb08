/* How the loop of a reduce looks its aggregates up where there is an undo log: in one call, what UndoValues does by
 * several. It is the only thing between a record and its aggregate, so that its cost is the log's. */
#include "undo.h"

#include <structmember.h>

int log_change(PyObject *entries, PyObject *restore, PyObject *key, PyObject *old) {
    Py_ssize_t size = PyList_GET_SIZE(entries);
    if (PyList_Append(entries, restore) == 0 && PyList_Append(entries, key) == 0 && PyList_Append(entries, old) == 0) {
        return 0;
    }
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (PyList_SetSlice(entries, size, PyList_GET_SIZE(entries), NULL) != 0) PyErr_Clear();
    PyErr_Restore(type, error, traceback);
    return -1;
}

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *table; /* a dict */
    PyObject *get;   /* of the table: what the dict itself has not may lie below it */
    PyObject *entries;
    PyObject *restore;
    PyObject *read; /* called with (key, value) for what may be changed in place; None: nothing is */
    PyObject *absent;
} logged_lookup;

/* `lookup(key)`: the value that is about to be replaced, which is in the log now; KeyError where there is none. */
static PyObject *look_up(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
    logged_lookup *self = (logged_lookup *)object;
    if (PyVectorcall_NARGS(flags) != 1 || (names != NULL && PyTuple_GET_SIZE(names) != 0)) {
        PyErr_SetString(PyExc_TypeError, "a lookup takes a key, and nothing else");
        return NULL;
    }
    PyObject *key = args[0];
    PyObject *value = Py_XNewRef(PyDict_GetItemWithError(self->table, key));
    if (value == NULL) {
        if (PyErr_Occurred()) return NULL;
        value = PyObject_CallFunctionObjArgs(self->get, key, self->absent, NULL);
        if (value == NULL) return NULL;
    }
    if (value != self->absent && self->read != Py_None && !is_plainly_immutable(value)) {
        PyObject *done = PyObject_CallFunctionObjArgs(self->read, key, value, NULL);
        if (done == NULL) {
            Py_DECREF(value);
            return NULL;
        }
        Py_DECREF(done);
    }
    if (log_change(self->entries, self->restore, key, value) != 0) {
        Py_DECREF(value);
        return NULL;
    }
    if (value == self->absent) {
        Py_DECREF(value);
        PyErr_SetObject(PyExc_KeyError, key);
        return NULL;
    }
    return value;
}

/* ---------------------------------------------------------------- the type */

/* Cycles go through the dict or the list, which are cleared. */
static int lookup_traverse(logged_lookup *self, visitproc visit, void *arg) {
    Py_VISIT(self->table);
    Py_VISIT(self->get);
    Py_VISIT(self->entries);
    Py_VISIT(self->restore);
    Py_VISIT(self->read);
    Py_VISIT(self->absent);
    return 0;
}

static void lookup_dealloc(logged_lookup *self) {
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->table);
    Py_XDECREF(self->get);
    Py_XDECREF(self->entries);
    Py_XDECREF(self->restore);
    Py_XDECREF(self->read);
    Py_XDECREF(self->absent);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *lookup_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *table, *entries, *restore, *read, *absent;
    if (keywords != NULL && PyDict_GET_SIZE(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "LoggedLookup takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!OOO:LoggedLookup", &PyDict_Type, &table, &PyList_Type, &entries, &restore, &read,
                          &absent)) {
        return NULL;
    }
    PyObject *get = PyObject_GetAttrString(table, "get");
    if (get == NULL) return NULL;
    logged_lookup *self = (logged_lookup *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(get);
        return NULL;
    }
    self->call = look_up;
    self->table = Py_NewRef(table);
    self->get = get;
    self->entries = Py_NewRef(entries);
    self->restore = Py_NewRef(restore);
    self->read = Py_NewRef(read);
    self->absent = Py_NewRef(absent);
    return (PyObject *)self;
}

static PyMemberDef lookup_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(logged_lookup, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject logged_lookup_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ftlayer._native.LoggedLookup",
    .tp_doc = "lookup(key) returns the value that is about to be replaced, and logs it; KeyError where there is none.",
    .tp_basicsize = sizeof(logged_lookup),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = lookup_new,
    .tp_dealloc = (destructor)lookup_dealloc,
    .tp_traverse = (traverseproc)lookup_traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(logged_lookup, call),
    .tp_members = lookup_members,
};

int add_logged_lookup(PyObject *module) { return PyModule_AddType(module, &logged_lookup_type); }
