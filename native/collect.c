/* RecordCollector: records of an iterator become Arrow's columns as they come.
 *
 * One thread collects, and may be within the iterator for as long as that likes. Another one may cut off meanwhile what
 * has come. All of it holds the GIL, and no record is half in when the iterator's code runs. */
#include "plain_write.h"

#define FEWEST_ROWS 16

typedef struct {
    PyObject_HEAD
    Py_ssize_t width, rows, capacity, limit;
    column_maker *makers; /* NULL: it has been cut off */
    int is_collecting, is_interrupted, has_ended;
    int is_broken; /* there was no memory for a record */
} collector;

static void release_makers(collector *self) {
    for (Py_ssize_t i = 0; self->makers != NULL && i < self->width; i++) release_maker(&self->makers[i]);
    PyMem_Free(self->makers);
    self->makers = NULL;
}

static fit try_to_put(collector *self, PyObject *record) {
    if (self->rows == self->capacity) {
        Py_ssize_t wanted = 2 * self->capacity < self->limit ? 2 * self->capacity : self->limit;
        for (Py_ssize_t i = 0; i < self->width; i++) {
            if (grow_maker(&self->makers[i], self->capacity, wanted) != 0) return FAILED;
        }
        self->capacity = wanted;
    }
    fit found = put_record(self->makers, self->width, record, self->rows, self->capacity);
    if (found == FITS) {
        self->rows++;
    } else if (found == MISFIT) {
        for (Py_ssize_t i = 0; i < self->width; i++) shorten_maker(&self->makers[i], self->rows, self->rows + 1);
    }
    return found;
}

static fit put(collector *self, PyObject *record) {
    fit found = try_to_put(self, record);
    if (found == FAILED) { /* columns are of different lengths now, or gone */
        self->is_broken = 1;
        release_makers(self);
    }
    return found;
}

/* put(record): whether it is in; False: it is not plain, or does not fit, and nothing has changed. */
static PyObject *collector_put(collector *self, PyObject *record) {
    if (self->makers == NULL || self->is_collecting || self->rows >= self->limit) {
        PyErr_SetString(PyExc_RuntimeError, "it collects, is full, or was cut off");
        return NULL;
    }
    fit found = put(self, record);
    return found == FAILED ? NULL : PyBool_FromLong(found == FITS);
}

/* collect(iterator): until it is full, is interrupted, the iterator ends, or a record is not plain. Returns, in a list,
 * the record that was read and is not in, if there is one. Raises what the iterator raises. */
static PyObject *collector_collect(collector *self, PyObject *iterator) {
    if (!PyIter_Check(iterator)) {
        PyErr_Format(PyExc_TypeError, "collect takes an iterator, not %s", Py_TYPE(iterator)->tp_name);
        return NULL;
    }
    if (self->is_collecting) {
        PyErr_SetString(PyExc_RuntimeError, "it collects already");
        return NULL;
    }
    iternextfunc next = Py_TYPE(iterator)->tp_iternext;
    PyObject *left = PyList_New(0);
    if (left == NULL) return NULL;
    self->is_collecting = 1;
    fit found = FITS;
    while (found == FITS && self->makers != NULL && !self->is_interrupted && self->rows < self->limit) {
        PyObject *record = next(iterator);
        if (record == NULL) {
            if (!PyErr_Occurred()) {
                self->has_ended = 1;
            } else if (PyErr_ExceptionMatches(PyExc_StopIteration)) {
                PyErr_Clear();
                self->has_ended = 1;
            } else {
                found = FAILED;
            }
            break;
        }
        /* It was interrupted while the iterator ran: this record comes too late for what was cut off. */
        found = self->is_interrupted ? MISFIT : put(self, record);
        if (found == MISFIT && PyList_Append(left, record) != 0) found = FAILED;
        Py_DECREF(record);
    }
    self->is_collecting = 0;
    if (found == FAILED) Py_CLEAR(left);
    return left;
}

/* interrupt(): collect() comes back with the next record. */
static PyObject *collector_interrupt(collector *self, PyObject *nothing) {
    (void)nothing;
    self->is_interrupted = 1;
    Py_RETURN_NONE;
}

/* cut(): interrupt, and take off what was collected: (rows, columns), as write_records returns columns. Once. */
static PyObject *collector_cut(collector *self, PyObject *nothing) {
    (void)nothing;
    self->is_interrupted = 1;
    if (self->is_broken) return PyErr_NoMemory();
    if (self->makers == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "it was cut off");
        return NULL;
    }
    PyObject *columns = PyList_New(self->width);
    for (Py_ssize_t i = 0; columns != NULL && i < self->width; i++) {
        PyObject *column = column_of(&self->makers[i], self->rows);
        if (column == NULL) {
            Py_CLEAR(columns);
        } else {
            PyList_SET_ITEM(columns, i, column);
        }
    }
    release_makers(self);
    return columns == NULL ? NULL : Py_BuildValue("nN", self->rows, columns);
}

static PyObject *collector_ended(collector *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(self->has_ended);
}

static void collector_dealloc(collector *self) {
    release_makers(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *collector_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    const char *types, *nullable;
    Py_ssize_t width, width_again, limit, expected;
    if (keywords != NULL && PyDict_GET_SIZE(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "RecordCollector takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y#y#nn:RecordCollector", &types, &width, &nullable, &width_again, &limit, &expected)) {
        return NULL;
    }
    if (width < 1 || width != width_again) {
        PyErr_SetString(PyExc_ValueError, "types and nullable say something of each column, and there is at least one");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < width; i++) {
        if (types[i] == '\0' || strchr("bcsilguz", types[i]) == NULL) {
            PyErr_Format(PyExc_ValueError, "columns of type '%c' are not collected here", types[i]);
            return NULL;
        }
    }
    if (limit < 1 || limit > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "limit lies in 1..2**31-1, not %zd", limit);
        return NULL;
    }
    collector *self = (collector *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->width = width;
    self->limit = limit;
    self->capacity = expected < FEWEST_ROWS ? FEWEST_ROWS : expected;
    if (self->capacity > limit) self->capacity = limit;
    self->makers = PyMem_Calloc((size_t)width, sizeof *self->makers);
    if (self->makers == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < width; i++) {
        if (open_maker(types[i], nullable[i], self->capacity, &self->makers[i]) != 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static PyMethodDef collector_methods[] = {
    {"put", (PyCFunction)collector_put, METH_O, "Add a record; False: it does not fit, and is not in."},
    {"collect", (PyCFunction)collector_collect, METH_O, "Add an iterator's records; return those it read and left."},
    {"interrupt", (PyCFunction)collector_interrupt, METH_NOARGS, "Have `collect` come back with the next record."},
    {"cut", (PyCFunction)collector_cut, METH_NOARGS, "Interrupt it, and take off (rows, columns)."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef collector_properties[] = {
    {"ended", (getter)collector_ended, NULL, "whether the iterator is known to have ended", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject collector_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ftlayer._native.RecordCollector",
    .tp_doc = "Records of an iterator as columns.",
    .tp_basicsize = sizeof(collector),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = collector_new,
    .tp_dealloc = (destructor)collector_dealloc,
    .tp_methods = collector_methods,
    .tp_getset = collector_properties,
};

int add_record_collector(PyObject *module) { return PyModule_AddType(module, &collector_type); }
