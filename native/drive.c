/* ChainDriver: a chain's functions, and batches that are run through them. */
#include "drive.h"

#include <structmember.h>

/* ---------------------------------------------------------------- a batch */

/* Take back what a record has put out that fails, and tell of it. 0, or -1 where the error is none that fails a record,
 * or telling raised. */
static int tell_failure(driver *self, PyObject *fail, Py_ssize_t before, Py_ssize_t mark) {
    if (self->is_broken || PyErr_ExceptionMatches(self->passes)) return -1;
    if (self->rows > before && take_back(self, before) != 0) return -1;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) PyException_SetTraceback(error, traceback);
    PyObject *told = PyObject_CallFunction(fail, "nnOn", self->done, self->at, error, mark);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

/* The columns of the batch that is run. */
typedef struct {
    column_view *columns;
    int64_t width;
    int has_objects;
    PyObject *names, *empty; /* where records are dicts: of the columns, and a dict of these; else NULL */
} batch_view;

static void forget_columns(driver *self) {
    for (int64_t i = 0; i < self->n_known; i++) forget_column(&self->known[i]);
    PyMem_Free(self->known);
    self->known = NULL;
    self->n_known = 0;
    if (self->keeping >= 0) self->steps[self->keeping].known = NULL;
}

static int write_all_back(driver *self) {
    for (int64_t i = 0; i < self->n_known; i++) {
        if (write_back(&self->known[i]) != 0) return -1;
    }
    return 0;
}

/* Know what the columns have said, those of texts, and the key beside which aggregates are kept. 0, or -1 with an error.
 */
static int know_columns(driver *self, batch_view *batch) {
    if (self->n_known != batch->width) {
        if (write_all_back(self) != 0) return -1;
        forget_columns(self);
        self->known = PyMem_Calloc((size_t)batch->width, sizeof *self->known);
        if (self->known == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->n_known = batch->width;
    }
    step *keeping = self->keeping < 0 ? NULL : &self->steps[self->keeping];
    if (keeping != NULL) keeping->known = NULL;
    for (int64_t i = 0; i < batch->width; i++) {
        column_view *column = &batch->columns[i];
        known_column *known = &self->known[i];
        int is_key = keeping != NULL && i == (batch->width == 1 ? 0 : keeping->places[0].position);
        if (strchr(is_key ? "uUzZcsil" : "uUzZ", column->type) == NULL) continue;
        if (known->type != column->type) {
            if (write_back(known) != 0) return -1;
            forget_column(known);
        }
        known->type = column->type;
        column->known = known;
        if (!is_key) continue;
        known->table = keeping->table;
        keeping->known = known;
    }
    return 0;
}

/* Read a column from the list of its values, if `objects` has one: 1, 0 if not, -1 with an error. */
static int open_list(PyObject *objects, int64_t i, int64_t rows, column_view *out) {
    PyObject *list = objects == Py_None ? Py_None : PyTuple_GET_ITEM(objects, i);
    if (list == Py_None) return 0;
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != rows) {
        PyErr_SetString(PyExc_TypeError, "the values of a column are a list, as long as the batch, or None");
        return -1;
    }
    open_objects(list, out);
    return 1;
}

/* 1 when the columns can be read, 0 when not, -1 with an error. `objects`: see driver_run. */
static int open_batch(driver *self, const struct ArrowSchema *schema, const struct ArrowArray *array,
                      PyObject *objects, batch_view *out) {
    *out = (batch_view){.width = schema->n_children};
    if (out->width == 0) return 0;
    out->columns = PyMem_Calloc((size_t)out->width, sizeof *out->columns);
    if (out->columns == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (objects != Py_None && (!PyTuple_CheckExact(objects) || PyTuple_GET_SIZE(objects) != out->width)) {
        PyErr_SetString(PyExc_TypeError, "objects says something of each column, in a tuple, or is None");
        return -1;
    }
    for (int64_t i = 0; i < out->width; i++) {
        int is_list = open_list(objects, i, array->length, &out->columns[i]);
        if (is_list < 0) return -1;
        if (is_list) out->has_objects = 1;
        if (!is_list && !open_view(schema->children[i], array->children[i], array->offset, &out->columns[i])) return 0;
    }
    if (know_columns(self, out) != 0) return -1;
    if (self->names == NULL) return 1;
    out->names = column_names(schema);
    if (out->names == Py_None) return 0;
    out->empty = out->names == NULL ? NULL : empty_record(out->names);
    return out->empty == NULL ? -1 : 1;
}

static void close_batch(batch_view *batch) {
    PyMem_Free(batch->columns);
    Py_CLEAR(batch->names);
    Py_CLEAR(batch->empty);
}

/* The row's values as a tuple. `used` is the one before it, or NULL: where no other reference to it is left, it becomes this one. */
static PyObject *next_tuple(const column_view *columns, int64_t width, int64_t row, PyObject *used) {
    int is_free = used != NULL && Py_REFCNT(used) == 1;
    PyObject *record = is_free ? Py_NewRef(used) : PyTuple_New(width);
#if PY_VERSION_HEX >= 0x030E0000
    if (is_free) ((PyTupleObject *)record)->ob_hash = -1;
#endif
    for (int64_t column = 0; record != NULL && column < width; column++) {
        PyObject *value = value_at(&columns[column], row);
        if (value == NULL) {
            Py_CLEAR(record);
        } else {
            PyObject *before = PyTuple_GET_ITEM(record, column);
            PyTuple_SET_ITEM(record, column, value);
            Py_XDECREF(before); /* a plain value: none of the user's code runs */
        }
    }
    return record;
}

static PyObject *next_record(const batch_view *batch, int64_t row, PyObject *used) {
    if (batch->empty != NULL) return read_dict(batch->empty, batch->names, batch->columns, row);
    if (batch->width == 1) return value_at(batch->columns, row);
    return next_tuple(batch->columns, batch->width, row, used);
}

/* The bytes of a value, as `known_object` takes them; of an integer they are put into `wide`. */
static const char *bytes_of(const column_view *column, int64_t i, int64_t *wide, Py_ssize_t *length) {
    int64_t start;
    *length = sizeof *wide;
    switch (column->type) {
    case 'c':
        *wide = ((const int8_t *)column->values)[i];
        return (const char *)wide;
    case 's':
        *wide = int16_at(column->values, i);
        return (const char *)wide;
    case 'i':
        *wide = int32_at(column->values, i);
        return (const char *)wide;
    case 'l':
        return (const char *)column->values + 8 * i;
    case 'u':
    case 'z':
        start = int32_at(column->values, i);
        *length = int32_at(column->values, i + 1) - start;
        return column->bytes + start;
    default:
        start = int64_at(column->values, i);
        *length = int64_at(column->values, i + 1) - start;
        return column->bytes + start;
    }
}

/* Fetch what is known of the values of the next rows. */
static void announce(const batch_view *batch, int64_t row, int64_t rows) {
    int count = rows - row < AHEAD ? (int)(rows - row) : AHEAD;
    for (int64_t c = 0; c < batch->width; c++) {
        column_view *column = &batch->columns[c];
        if (column->known == NULL) continue;
        for (int i = 0; i < count; i++) {
            int64_t wide;
            Py_ssize_t length;
            const char *bytes = bytes_of(column, column->offset + row + i, &wide, &length);
            column->tags[i] = announced(column->known, bytes, length);
        }
        fetch_announced(column->known, column->tags, count);
    }
}

/* Run all rows; `counts` is NULL, or gets how many results each has. 0, or -1 with an error. */
static int run_rows(driver *self, const batch_view *batch, int64_t rows, PyObject *fail, int32_t *counts) {
    PyObject *used = NULL;
    /* Of plain values no cycle can be made: it does not matter whether the garbage collector looks at the tuple. */
    int keeps = batch->empty == NULL && batch->width > 1 && !batch->has_objects;
    for (int64_t row = 0; row < rows; row++) {
        if (row % AHEAD == 0) announce(batch, row, rows);
        Py_ssize_t before = self->rows;
        Py_ssize_t mark = self->entries == NULL ? 0 : PyList_GET_SIZE(self->entries);
        self->at = -1; /* a record that Python cannot hold */
        PyObject *record = next_record(batch, row, used);
        Py_XSETREF(used, record);
        int found = record == NULL ? -1 : run_from(self, 0, record);
        if (found != 0 && tell_failure(self, fail, before, mark) != 0) {
            Py_XDECREF(used);
            return -1;
        }
        if (!keeps) Py_CLEAR(used);
        counts[row] = (int32_t)(self->rows - before);
        self->done = (Py_ssize_t)row + 1;
    }
    Py_XDECREF(used);
    return 0;
}

/* run(schema, array, objects, fail): capsules of a record batch; for each column None, or its values in a list where it
 * is not plain (or None for all of them). fail(row, step, error, mark) is told of those that fail; of one that Python
 * cannot hold the step is -1. */
static PyObject *driver_run(driver *self, PyObject *args) {
    PyObject *schema_capsule, *array_capsule, *objects, *fail;
    if (!PyArg_ParseTuple(args, "OOOO:run", &schema_capsule, &array_capsule, &objects, &fail)) return NULL;
    const struct ArrowSchema *schema = PyCapsule_GetPointer(schema_capsule, "arrow_schema");
    if (schema == NULL) return NULL;
    const struct ArrowArray *array = PyCapsule_GetPointer(array_capsule, "arrow_array");
    if (array == NULL) return NULL;
    if (strcmp(schema->format, "+s") != 0 || array->n_children != schema->n_children) {
        PyErr_SetString(PyExc_TypeError, "a driver runs record batches");
        return NULL;
    }
    if (self->is_running) {
        PyErr_SetString(PyExc_RuntimeError, "this driver runs a batch already");
        return NULL;
    }
    batch_view batch;
    self->is_running = 1;
    int readable = open_batch(self, schema, array, objects, &batch);
    if (readable != 1) {
        self->is_running = 0;
        close_batch(&batch);
        return readable == 0 ? Py_NewRef(Py_None) : NULL;
    }
    PyObject *counts = PyBytes_FromStringAndSize(NULL, array->length * (Py_ssize_t)sizeof(int32_t));
    PyObject *found = NULL;
    if (counts != NULL && open_results(self, array->length) == 0 &&
        run_rows(self, &batch, array->length, fail, (int32_t *)PyBytes_AS_STRING(counts)) == 0) {
        PyObject *results = finished_results(self);
        if (results != NULL) {
            PyObject *are_columns = self->list == NULL ? Py_True : Py_False;
            found = Py_BuildValue("(NnOO)", results, self->rows, counts, are_columns);
        }
    }
    /* What results hold may run code of the user's when it goes: with the error put aside. */
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    close_results(self);
    PyErr_Restore(type, error, traceback);
    self->is_running = 0;
    Py_XDECREF(counts);
    close_batch(&batch);
    return found;
}

/* write_back(): put all aggregates into their table that lie beside their keys. */
static PyObject *driver_write_back(driver *self, PyObject *nothing) {
    (void)nothing;
    if (self->is_running) {
        PyErr_SetString(PyExc_RuntimeError, "this driver runs a batch");
        return NULL;
    }
    self->is_running = 1; /* an aggregate that is replaced may run code of the user's when it goes */
    int found = write_all_back(self);
    self->is_running = 0;
    return found == 0 ? Py_NewRef(Py_None) : NULL;
}

/* forget(): as write_back(), and look all of them up in the table again from now on. */
static PyObject *driver_forget(driver *self, PyObject *nothing) {
    PyObject *written = driver_write_back(self, nothing);
    if (written != NULL) forget_columns(self);
    return written;
}

static PyObject *driver_unwritten(driver *self, void *closure) {
    (void)closure;
    size_t unwritten = 0;
    for (int64_t i = 0; i < self->n_known; i++) unwritten += self->known[i].n_changed;
    return PyLong_FromSize_t(unwritten);
}

/* take_done(): the number of records that are done, which is 0 then. */
static PyObject *driver_take_done(driver *self, PyObject *nothing) {
    (void)nothing;
    Py_ssize_t done = self->done;
    self->done = 0;
    return PyLong_FromSsize_t(done);
}

/* ---------------------------------------------------------------- the type */

/* Of a key: the places of its parts in a record (None: the record is the key), and whether each is a float. */
static int open_places(PyObject *positions, PyObject *floats, step *out) {
    Py_ssize_t parts = PyTuple_GET_SIZE(positions);
    if (parts < 1 || parts != PyBytes_GET_SIZE(floats)) {
        PyErr_SetString(PyExc_ValueError, "a key has columns, and floats says something of each");
        return -1;
    }
    out->places = PyMem_Calloc((size_t)parts, sizeof *out->places);
    if (out->places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (out->parts = 0; out->parts < parts; out->parts++) {
        PyObject *given = PyTuple_GET_ITEM(positions, out->parts);
        Py_ssize_t position = given == Py_None ? -1 : PyLong_AsSsize_t(given);
        if (position < 0 && given != Py_None) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "there is no column %zd", position);
            return -1;
        }
        out->places[out->parts] = (key_place){position, PyBytes_AS_STRING(floats)[out->parts] != 0};
    }
    return 0;
}

static int open_reduce(PyObject *given, step *out) {
    PyObject *kind, *positions, *floats, *lookup, *create, *own;
    out->kind = REDUCE;
    if (!PyArg_ParseTuple(given, "OOO!SO!OOOOp:reduce", &kind, &out->function, &PyTuple_Type, &positions, &floats,
                          &PyDict_Type, &out->table, &lookup, &create, &own, &out->unhashable, &out->keeps)) {
        return -1;
    }
    out->lookup = lookup == Py_None ? NULL : lookup;
    out->create = create == Py_None ? NULL : create;
    out->own = own == Py_None ? NULL : own;
    return open_places(positions, floats, out);
}

static int open_step(PyObject *given, step *out) {
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) < 2 || !PyUnicode_Check(PyTuple_GET_ITEM(given, 0))) {
        PyErr_SetString(PyExc_TypeError, "a step is a tuple: its kind, its function, and what belongs to that");
        return -1;
    }
    PyObject *kind = PyTuple_GET_ITEM(given, 0);
    int found = 0;
    if (PyUnicode_CompareWithASCIIString(kind, "reduce") == 0) {
        found = open_reduce(given, out);
    } else if (PyUnicode_CompareWithASCIIString(kind, "map") == 0) {
        out->kind = MAP;
        found = PyArg_ParseTuple(given, "OO:map", &kind, &out->function) ? 0 : -1;
    } else if (PyUnicode_CompareWithASCIIString(kind, "filter") == 0 ||
               PyUnicode_CompareWithASCIIString(kind, "flat_map") == 0) {
        out->kind = PyUnicode_CompareWithASCIIString(kind, "filter") == 0 ? FILTER : FLAT_MAP;
        found = PyArg_ParseTuple(given, "OOO:step", &kind, &out->function, &out->results) ? 0 : -1;
    } else {
        PyErr_Format(PyExc_ValueError, "there is no step %R", kind);
        found = -1;
    }
    if (found != 0) {
        PyMem_Free(out->places);
        memset(out, 0, sizeof *out);
        return -1;
    }
    PyObject **held[] = {&out->function, &out->results, &out->table, &out->lookup, &out->create, &out->own, &out->unhashable};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_XINCREF(*held[i]);
    return 0;
}

static int driver_traverse(driver *self, visitproc visit, void *arg) {
    for (Py_ssize_t i = 0; i < self->n_steps; i++) {
        step *each = &self->steps[i];
        Py_VISIT(each->function);
        Py_VISIT(each->results);
        Py_VISIT(each->table);
        Py_VISIT(each->lookup);
        Py_VISIT(each->create);
        Py_VISIT(each->own);
        Py_VISIT(each->unhashable);
    }
    Py_VISIT(self->passes);
    Py_VISIT(self->entries);
    Py_VISIT(self->list);
    return 0;
}

static int driver_clear(driver *self) {
    forget_columns(self);
    for (Py_ssize_t i = 0; i < self->n_steps; i++) {
        step *each = &self->steps[i];
        Py_CLEAR(each->function);
        Py_CLEAR(each->results);
        PyMem_Free(each->places);
        Py_CLEAR(each->table);
        Py_CLEAR(each->lookup);
        Py_CLEAR(each->create);
        Py_CLEAR(each->own);
        Py_CLEAR(each->unhashable);
    }
    self->n_steps = 0;
    self->keeping = -1;
    Py_CLEAR(self->types);
    Py_CLEAR(self->nullable);
    Py_CLEAR(self->names);
    Py_CLEAR(self->passes);
    Py_CLEAR(self->entries);
    Py_CLEAR(self->nan);
    return 0;
}

static void driver_dealloc(driver *self) {
    PyObject_GC_UnTrack(self);
    driver_clear(self);
    PyMem_Free(self->steps);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int check_columns(PyObject *types, PyObject *nullable) {
    Py_ssize_t width = PyBytes_GET_SIZE(types);
    if (width < 1 || width != PyBytes_GET_SIZE(nullable)) {
        PyErr_SetString(PyExc_ValueError, "types and nullable say something of each column, and there is at least one");
        return -1;
    }
    for (Py_ssize_t i = 0; i < width; i++) {
        char type = PyBytes_AS_STRING(types)[i];
        if (type == '\0' || strchr("bcsilguzO", type) == NULL) {
            PyErr_Format(PyExc_ValueError, "columns of type '%c' are not written here", type);
            return -1;
        }
    }
    return 0;
}

static int check_names(PyObject *names, PyObject *types) {
    if (names == Py_None) return 0;
    if (!PyTuple_CheckExact(names) || PyTuple_GET_SIZE(names) != PyBytes_GET_SIZE(types)) {
        PyErr_SetString(PyExc_TypeError, "names is a tuple with the name of each column, or None");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(names, i))) {
            PyErr_SetString(PyExc_TypeError, "the name of a column is a str");
            return -1;
        }
    }
    return 0;
}

/* The reduce whose aggregates may lie beside their keys: its key is a column of the batch, as nothing before it makes
 * other records. -1: there is none. */
static Py_ssize_t keeping_step(const driver *self) {
    for (Py_ssize_t at = 0; at < self->n_steps; at++) {
        const step *each = &self->steps[at];
        if (each->kind == FILTER) continue;
        if (each->kind != REDUCE || !each->keeps || each->parts != 1 || each->lookup != NULL) break;
        return at;
    }
    return -1;
}

static PyObject *driver_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *steps, *types, *nullable, *names, *passes, *entries, *nan;
    int lax;
    if (keywords != NULL && PyDict_GET_SIZE(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "ChainDriver takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!SSOO!OOp:ChainDriver", &PyTuple_Type, &steps, &types, &nullable, &names,
                          &PyTuple_Type, &passes, &entries, &nan, &lax)) {
        return NULL;
    }
    if (check_columns(types, nullable) != 0 || check_names(names, types) != 0) return NULL;
    if (entries != Py_None && !PyList_CheckExact(entries)) {
        PyErr_SetString(PyExc_TypeError, "entries is a list, or None");
        return NULL;
    }
    Py_ssize_t n_steps = PyTuple_GET_SIZE(steps);
    driver *self = (driver *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->keeping = -1;
    self->steps = PyMem_Calloc((size_t)(n_steps > 0 ? n_steps : 1), sizeof *self->steps);
    if (self->steps == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->types = Py_NewRef(types);
    self->nullable = Py_NewRef(nullable);
    self->names = names == Py_None ? NULL : Py_NewRef(names);
    self->width = PyBytes_GET_SIZE(types);
    self->passes = Py_NewRef(passes);
    self->entries = entries == Py_None ? NULL : Py_NewRef(entries);
    self->nan = Py_NewRef(nan);
    self->lax = lax;
    for (; self->n_steps < n_steps; self->n_steps++) {
        if (open_step(PyTuple_GET_ITEM(steps, self->n_steps), &self->steps[self->n_steps]) != 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    self->keeping = self->names == NULL ? keeping_step(self) : -1;
    return (PyObject *)self;
}

static PyMethodDef driver_methods[] = {
    {"run", (PyCFunction)driver_run, METH_VARARGS,
     "run(schema, array, objects, fail) -> (columns or list, rows, counts, whether columns); None: a column is not read."},
    {"write_back", (PyCFunction)driver_write_back, METH_NOARGS,
     "Put the aggregates into their table that it does not have yet."},
    {"forget", (PyCFunction)driver_forget, METH_NOARGS, "As `write_back`, and look them up there from now on."},
    {"take_done", (PyCFunction)driver_take_done, METH_NOARGS, "Return `done`, and set it to 0."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef driver_properties[] = {
    {"unwritten", (getter)driver_unwritten, NULL, "how many aggregates their table does not have yet", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef driver_members[] = {
    {"done", T_PYSSIZET, offsetof(driver, done), READONLY, "records that were run since it was taken last"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject driver_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ftlayer._native.ChainDriver",
    .tp_doc = "The loop of a chain's functions over record batches.",
    .tp_basicsize = sizeof(driver),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = driver_new,
    .tp_dealloc = (destructor)driver_dealloc,
    .tp_traverse = (traverseproc)driver_traverse,
    .tp_clear = (inquiry)driver_clear,
    .tp_methods = driver_methods,
    .tp_members = driver_members,
    .tp_getset = driver_properties,
};

int add_chain_driver(PyObject *module) { return PyModule_AddType(module, &driver_type); }
