/* The handle of a single value of keyed state, in a table that is a dict: ftlayer.functions.handles.ValueHandle, whose
 * calls cost more than all else in a short process function. With an undo log it does what UndoValues does.
 *
 * What the dict itself has is found here; what it has not, its `get` is asked for: there may be layers below it. */
#include "undo.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *context;
    Py_ssize_t key_offset; /* of the context's slot `key`; 0 when it has none */
    PyObject *table;
    PyObject *get; /* of the table */
    PyObject *pop; /* of the table; with a log, what logs it too */
    PyObject *initial;
    PyObject *ttl; /* None; read where handles are looked up */
    PyObject *own; /* makes what may be changed in place the function's, or the table's, alone; NULL: it is shared */
    /* NULL without a log: */
    PyObject *entries; /* restore, key, old; and so on */
    PyObject *restore;
    PyObject *read;   /* called with (key, value) for what may be changed in place */
    PyObject *absent; /* logged where there was no value */
} value_handle;

/* ---------------------------------------------------------------- the key */

static PyObject *key_name;

/* Where the slot `key` lies in the objects of a class that has it in `__slots__`; 0, or -1 with an error.
 *
 * A class with a `__getattr__`, as Context, finds its slots by a long way otherwise. */
static int find_key(PyObject *context, Py_ssize_t *offset) {
    *offset = 0;
    PyObject *found = PyObject_GetAttr((PyObject *)Py_TYPE(context), key_name);
    if (found == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) && PyType_IsSubtype(Py_TYPE(context), PyDescr_TYPE(found))) {
        const PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (member->type == T_OBJECT_EX) *offset = member->offset;
    }
    Py_DECREF(found);
    return 0;
}

static PyObject *current_key(const value_handle *self) {
    if (self->key_offset != 0) {
        PyObject *key = *(PyObject **)((char *)self->context + self->key_offset);
        if (key != NULL) return Py_NewRef(key);
    }
    return PyObject_GetAttr(self->context, key_name);
}

/* ---------------------------------------------------------------- the table */

/* The key's value, or `otherwise`; NULL with an error. */
static PyObject *found_or(const value_handle *self, PyObject *key, PyObject *otherwise) {
    PyObject *value = PyDict_GetItemWithError(self->table, key);
    if (value != NULL) return Py_NewRef(value);
    if (PyErr_Occurred()) return NULL;
    return PyObject_CallFunctionObjArgs(self->get, key, otherwise, NULL);
}

/* ---------------------------------------------------------------- methods */

static PyObject *handle_get(value_handle *self, PyObject *unused) {
    (void)unused;
    if (self->initial == NULL) {
        PyErr_SetString(PyExc_AttributeError, "default");
        return NULL;
    }
    PyObject *key = current_key(self);
    if (key == NULL) return NULL;
    PyObject *value = found_or(self, key, self->entries == NULL ? self->initial : self->absent);
    if (value != NULL && (self->entries != NULL || self->own != NULL) && !is_plainly_immutable(value)) {
        if (self->entries != NULL && value == self->absent) {
            Py_SETREF(value, Py_NewRef(self->initial));
        } else if (self->own != NULL) {
            if (value != self->initial) Py_SETREF(value, PyObject_CallOneArg(self->own, value));
        } else {
            PyObject *done = PyObject_CallFunctionObjArgs(self->read, key, value, NULL);
            if (done == NULL) Py_CLEAR(value);
            Py_XDECREF(done);
        }
    }
    Py_DECREF(key);
    return value;
}

static PyObject *handle_set(value_handle *self, PyObject *value) {
    PyObject *key = current_key(self);
    if (key == NULL) return NULL;
    int is_own = self->own == NULL || is_plainly_immutable(value);
    value = is_own ? Py_NewRef(value) : PyObject_CallOneArg(self->own, value);
    if (value == NULL) {
        Py_DECREF(key);
        return NULL;
    }
    int done = 0;
    if (self->entries != NULL) {
        PyObject *old = found_or(self, key, self->absent);
        done = old == NULL ? -1 : log_change(self->entries, self->restore, key, old);
        Py_XDECREF(old);
    }
    if (done == 0) done = PyDict_SetItem(self->table, key, value);
    Py_DECREF(value);
    Py_DECREF(key);
    return done == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *handle_clear(value_handle *self, PyObject *unused) {
    (void)unused;
    PyObject *key = current_key(self);
    if (key == NULL) return NULL;
    PyObject *old = PyObject_CallFunctionObjArgs(self->pop, key, Py_None, NULL);
    Py_DECREF(key);
    if (old == NULL) return NULL;
    Py_DECREF(old);
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- the type */

static int handle_traverse(value_handle *self, visitproc visit, void *arg) {
    Py_VISIT(self->context);
    Py_VISIT(self->table);
    Py_VISIT(self->get);
    Py_VISIT(self->pop);
    Py_VISIT(self->initial);
    Py_VISIT(self->ttl);
    Py_VISIT(self->own);
    Py_VISIT(self->entries);
    Py_VISIT(self->restore);
    Py_VISIT(self->read);
    Py_VISIT(self->absent);
    return 0;
}

/* All other cycles go through the context or a dict, which are cleared. */
static int handle_tp_clear(value_handle *self) {
    Py_CLEAR(self->initial);
    Py_CLEAR(self->ttl);
    return 0;
}

static void handle_dealloc(value_handle *self) {
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->context);
    Py_XDECREF(self->table);
    Py_XDECREF(self->get);
    Py_XDECREF(self->pop);
    Py_XDECREF(self->initial);
    Py_XDECREF(self->ttl);
    Py_XDECREF(self->own);
    Py_XDECREF(self->entries);
    Py_XDECREF(self->restore);
    Py_XDECREF(self->read);
    Py_XDECREF(self->absent);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *handle_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *context, *table, *pop, *initial, *own = Py_None, *entries = NULL, *restore = NULL, *read = NULL, *absent = NULL;
    if (keywords != NULL && PyDict_GET_SIZE(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "DictValueHandle takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OO!OO|OO!OOO:DictValueHandle", &context, &PyDict_Type, &table, &pop, &initial,
                          &own, &PyList_Type, &entries, &restore, &read, &absent)) {
        return NULL;
    }
    if (entries != NULL && absent == NULL) {
        PyErr_SetString(PyExc_TypeError, "a log is entries, restore, read and absent");
        return NULL;
    }
    Py_ssize_t key_offset;
    if (find_key(context, &key_offset) != 0) return NULL;
    PyObject *get = PyObject_GetAttrString(table, "get");
    if (get == NULL) return NULL;
    value_handle *self = (value_handle *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(get);
        return NULL;
    }
    self->context = Py_NewRef(context);
    self->key_offset = key_offset;
    self->table = Py_NewRef(table);
    self->get = get;
    self->pop = Py_NewRef(pop);
    self->initial = Py_NewRef(initial);
    self->ttl = Py_NewRef(Py_None);
    self->own = own == Py_None ? NULL : Py_NewRef(own);
    self->entries = Py_XNewRef(entries);
    self->restore = Py_XNewRef(restore);
    self->read = Py_XNewRef(read);
    self->absent = Py_XNewRef(absent);
    return (PyObject *)self;
}

static PyMethodDef handle_methods[] = {
    {"get", (PyCFunction)handle_get, METH_NOARGS,
     "get($self, /)\n--\n\nReturn the value, the default if there is none. After changing it in place, `set` it."},
    {"set", (PyCFunction)handle_set, METH_O, "set($self, value, /)\n--\n\nReplace the value."},
    {"clear", (PyCFunction)handle_clear, METH_NOARGS, "clear($self, /)\n--\n\nRemove the value."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef handle_members[] = {
    {"default", T_OBJECT_EX, offsetof(value_handle, initial), 0, NULL},
    {"ttl", T_OBJECT_EX, offsetof(value_handle, ttl), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject value_handle_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ftlayer._native.DictValueHandle",
    .tp_doc = "One value a key.",
    .tp_basicsize = sizeof(value_handle),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = handle_new,
    .tp_dealloc = (destructor)handle_dealloc,
    .tp_traverse = (traverseproc)handle_traverse,
    .tp_clear = (inquiry)handle_tp_clear,
    .tp_methods = handle_methods,
    .tp_members = handle_members,
};

int add_value_handle(PyObject *module) {
    if (key_name == NULL) key_name = PyUnicode_InternFromString("key");
    return key_name == NULL ? -1 : PyModule_AddType(module, &value_handle_type);
}
