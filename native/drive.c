/* The loop of a chain's functions over a batch: records from Arrow, results to Arrow, nothing in between.
 *
 * It does what the loop does that ftlayer.functions.chains.fused writes out in Python, which is the reference, and
 * serves what this cannot do: records and results that are not plain, and functions with a context. */
#include "dict_records.h"
#include "plain_read.h"
#include "plain_write.h"

#include <structmember.h>

typedef enum { MAP, FILTER, FLAT_MAP, REDUCE } step_kind;

typedef struct {
    step_kind kind;
    PyObject *function;
    PyObject *results;    /* flat_map: makes what is no list one to iterate over; filter: looks at what is not True */
    PyObject *positions;  /* reduce, here and below: of the key's columns, ints; () where the record is the key */
    const char *floats;   /* for each of them, whether it is a float; borrowed from `float_bytes` */
    PyObject *float_bytes;
    PyObject *table;
    PyObject *lookup;     /* instead of table[key], or NULL */
    PyObject *create;     /* makes the first aggregate, or NULL: it is the record */
    PyObject *unhashable; /* called with the key that the table cannot hold; raises */
} step;

typedef struct {
    PyObject_HEAD
    Py_ssize_t n_steps;
    step *steps;
    PyObject *types, *nullable; /* bytes: of the columns of results */
    PyObject *names;            /* where records are dicts, those of the columns of results, a tuple; else NULL */
    PyObject *passes, *fails;   /* tuples of exceptions: those that go up, and of the others those that fail a record */
    PyObject *entries;          /* of the undo log, a list; or NULL */
    PyObject *nan;
    Py_ssize_t done;            /* of the batch that is run; other threads look at it */
    /* Of the batch that is run. */
    int is_running;
    Py_ssize_t at;              /* the step that works, or has raised */
    column_maker *makers;
    Py_ssize_t width, rows, capacity;
    PyObject *list;             /* results as they are, once one of them is not plain; else NULL */
} driver;

/* ---------------------------------------------------------------- results */

static int grow(driver *self) {
    Py_ssize_t wanted = 2 * self->capacity;
    for (Py_ssize_t i = 0; i < self->width; i++) {
        column_maker *maker = &self->makers[i];
        Py_ssize_t size = maker->type == 'b' ? (wanted + 7) / 8
                                             : (wanted + (maker->bytes != NULL)) * value_size(maker->type);
        Py_ssize_t before = PyBytes_GET_SIZE(maker->values);
        if (_PyBytes_Resize(&maker->values, size) != 0) return -1;
        if (maker->type == 'b') memset(PyBytes_AS_STRING(maker->values) + before, 0, (size_t)(size - before));
        if (maker->validity != NULL) {
            before = PyBytes_GET_SIZE(maker->validity);
            if (_PyBytes_Resize(&maker->validity, (wanted + 7) / 8) != 0) return -1;
            memset(PyBytes_AS_STRING(maker->validity) + before, 0xFF, (size_t)((wanted + 7) / 8 - before));
        }
    }
    self->capacity = wanted;
    return 0;
}

/* Make a list of the rows so far: what is plain comes out as it went in. */
static int turn_to_list(driver *self) {
    column_view few[16];
    column_view *columns = few;
    if (self->width > (Py_ssize_t)(sizeof few / sizeof *few)) {
        columns = PyMem_Calloc((size_t)self->width, sizeof *columns);
        if (columns == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < self->width; i++) {
        const column_maker *maker = &self->makers[i];
        columns[i] = (column_view){
            .type = maker->type,
            .validity = maker->validity == NULL ? NULL : (const uint8_t *)PyBytes_AS_STRING(maker->validity),
            .values = PyBytes_AS_STRING(maker->values),
            .bytes = maker->bytes == NULL ? NULL : PyBytes_AS_STRING(maker->bytes),
        };
    }
    self->list = self->names != NULL ? read_dicts(self->names, columns, self->rows)
                 : self->width == 1  ? read_single(columns, self->rows)
                                     : read_tuples(columns, self->width, self->rows);
    if (columns != few) PyMem_Free(columns);
    return self->list == NULL ? -1 : 0;
}

static int put(driver *self, PyObject *result) {
    if (self->list == NULL) {
        if (self->rows == self->capacity && grow(self) != 0) return -1;
        fit found = self->names != NULL ? put_dict(self->makers, self->names, result, self->rows, self->capacity)
                                        : put_record(self->makers, self->width, result, self->rows, self->capacity);
        switch (found) {
        case FITS:
            self->rows++;
            return 0;
        case FAILED:
            return -1;
        case MISFIT:
            if (turn_to_list(self) != 0) return -1;
        }
    }
    if (PyList_Append(self->list, result) != 0) return -1;
    self->rows++;
    return 0;
}

/* Take back the results behind the first `rows`: a record has failed. */
static int take_back(driver *self, Py_ssize_t rows) {
    Py_ssize_t behind = self->rows;
    self->rows = rows;
    if (self->list != NULL) return PyList_SetSlice(self->list, rows, behind, NULL);
    for (Py_ssize_t i = 0; i < self->width; i++) {
        column_maker *maker = &self->makers[i];
        uint8_t *values = (uint8_t *)PyBytes_AS_STRING(maker->values);
        uint8_t *validity = maker->validity == NULL ? NULL : (uint8_t *)PyBytes_AS_STRING(maker->validity);
        if (maker->bytes != NULL) maker->used = ((int32_t *)values)[rows];
        for (Py_ssize_t row = rows; row < behind; row++) {
            if (maker->type == 'b') values[row >> 3] &= (uint8_t)~(1 << (row & 7));
            if (validity != NULL && !bit_is_set(validity, row)) {
                validity[row >> 3] |= (uint8_t)(1 << (row & 7));
                maker->nulls--;
            }
        }
    }
    return 0;
}

/* ---------------------------------------------------------------- one record */

static PyObject *call_one(PyObject *function, PyObject *argument) {
    PyObject *arguments[2] = {NULL, argument};
    return PyObject_Vectorcall(function, arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

static PyObject *call_two(PyObject *function, PyObject *first, PyObject *second) {
    PyObject *arguments[3] = {NULL, first, second};
    return PyObject_Vectorcall(function, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* A part of the key; all that is not equal to itself is one and the same. */
static PyObject *key_part(const driver *self, const step *reduce, PyObject *record, Py_ssize_t part) {
    PyObject *position = PyTuple_GET_ITEM(reduce->positions, part);
    PyObject *value;
    if (position == Py_None) {
        value = Py_NewRef(record);
    } else {
        Py_ssize_t place = PyLong_AsSsize_t(position);
        if (PyTuple_CheckExact(record) && place < PyTuple_GET_SIZE(record)) {
            value = Py_NewRef(PyTuple_GET_ITEM(record, place));
        } else {
            value = PyObject_GetItem(record, position);
        }
    }
    if (value == NULL || !reduce->floats[part]) return value;
    int differs;
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        differs = number != number;
    } else {
        PyObject *answer = PyObject_RichCompare(value, value, Py_NE);
        differs = answer == NULL ? -1 : PyObject_IsTrue(answer);
        Py_XDECREF(answer);
    }
    if (differs == 0) return value;
    Py_DECREF(value);
    return differs < 0 ? NULL : Py_NewRef(self->nan);
}

static PyObject *key_of(const driver *self, const step *reduce, PyObject *record) {
    Py_ssize_t parts = PyTuple_GET_SIZE(reduce->positions);
    if (parts == 1) return key_part(self, reduce, record, 0);
    PyObject *key = PyTuple_New(parts);
    for (Py_ssize_t part = 0; key != NULL && part < parts; part++) {
        PyObject *value = key_part(self, reduce, record, part);
        if (value == NULL) {
            Py_CLEAR(key);
        } else {
            PyTuple_SET_ITEM(key, part, value);
        }
    }
    return key;
}

static PyObject *reduced(const step *reduce, PyObject *key, PyObject *record) {
    PyObject *old = reduce->lookup != NULL ? call_one(reduce->lookup, key) : PyObject_GetItem(reduce->table, key);
    if (old == NULL) {
        if (PyErr_ExceptionMatches(PyExc_KeyError)) {
            PyErr_Clear();
            if (reduce->create == NULL) return Py_NewRef(record);
            old = PyObject_CallNoArgs(reduce->create);
            if (old == NULL) return NULL;
        } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            Py_XDECREF(call_one(reduce->unhashable, key));
            return NULL;
        } else {
            return NULL;
        }
    }
    PyObject *result = call_two(reduce->function, old, record);
    Py_DECREF(old);
    return result;
}

static int run_from(driver *self, Py_ssize_t at, PyObject *record);

static int run_reduce(driver *self, Py_ssize_t at, PyObject *record) {
    const step *reduce = &self->steps[at];
    PyObject *key = key_of(self, reduce, record);
    if (key == NULL) return -1;
    PyObject *result = reduced(reduce, key, record);
    /* The aggregate is what it was until all that follows has gone well. */
    int found = result == NULL ? -1 : run_from(self, at + 1, result);
    if (found == 0) found = PyObject_SetItem(reduce->table, key, result);
    Py_XDECREF(result);
    Py_DECREF(key);
    return found;
}

static int run_each_of_list(driver *self, Py_ssize_t at, PyObject *list) {
    /* Its size is looked at each time: a function behind this one may change it. */
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *record = Py_NewRef(PyList_GET_ITEM(list, i));
        int found = run_from(self, at + 1, record);
        Py_DECREF(record);
        if (found != 0) return -1;
        self->at = at;
    }
    return 0;
}

static int run_each(driver *self, Py_ssize_t at, PyObject *returned) {
    PyObject *results = call_one(self->steps[at].results, returned);
    if (results == NULL) return -1;
    PyObject *iterator = PyObject_GetIter(results);
    Py_DECREF(results);
    if (iterator == NULL) return -1;
    int found = 0;
    PyObject *record;
    while (found == 0 && (record = PyIter_Next(iterator)) != NULL) {
        found = run_from(self, at + 1, record);
        Py_DECREF(record);
        if (found == 0) self->at = at;
    }
    if (found == 0 && PyErr_Occurred()) found = -1;
    if (found != 0) {
        /* A generator is closed now: what it does on its way out belongs to this record. */
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        Py_DECREF(iterator);
        PyErr_Restore(type, error, traceback);
        return -1;
    }
    Py_DECREF(iterator);
    return 0;
}

/* 1: it passes, 0: it does not, -1: an error. */
static int passes(const step *filter, PyObject *record) {
    PyObject *answer = call_one(filter->function, record);
    if (answer == NULL) return -1;
    int found = answer == Py_True ? 1 : PyObject_IsTrue(answer);
    if (found == 1 && answer != Py_True) {
        /* Of what is true without being True, some was returned by an async function. */
        PyObject *has_run = call_one(filter->results, answer);
        if (has_run == NULL) found = -1;
        Py_XDECREF(has_run);
    }
    Py_DECREF(answer);
    return found;
}

/* Have a record go through the functions from the one at `at` on. 0, or -1 with an error; self->at says whose. */
static int run_from(driver *self, Py_ssize_t at, PyObject *record) {
    PyObject *mine = NULL; /* what a map has returned */
    int found = 0;
    for (; at < self->n_steps; at++) {
        const step *next = &self->steps[at];
        self->at = at;
        if (next->kind == MAP) {
            PyObject *result = call_one(next->function, record);
            Py_XSETREF(mine, result);
            record = result;
            if (result == NULL) return -1;
            continue;
        }
        if (next->kind == FILTER) {
            found = passes(next, record);
            if (found == 1) continue;
        } else if (next->kind == REDUCE) {
            found = run_reduce(self, at, record);
        } else {
            PyObject *returned = call_one(next->function, record);
            if (returned == NULL) {
                found = -1;
            } else {
                found = PyList_CheckExact(returned) ? run_each_of_list(self, at, returned)
                                                    : run_each(self, at, returned);
                Py_DECREF(returned);
            }
        }
        Py_XDECREF(mine);
        return found;
    }
    found = put(self, record);
    Py_XDECREF(mine);
    return found;
}

/* ---------------------------------------------------------------- a batch */

/* Tell of a record that has failed. 0, or -1 where the error is none that fails a record, or telling raised. */
static int tell_failure(driver *self, PyObject *fail, Py_ssize_t mark) {
    if (PyErr_ExceptionMatches(self->passes) || !PyErr_ExceptionMatches(self->fails)) return -1;
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
    PyObject *names, *empty; /* where records are dicts: of the columns, and a dict of these; else NULL */
} batch_view;

/* 1 when the columns can be read, 0 when not, -1 with an error. */
static int open_batch(const driver *self, const struct ArrowSchema *schema, const struct ArrowArray *array,
                      batch_view *out) {
    *out = (batch_view){.width = schema->n_children};
    if (out->width == 0) return 0;
    out->columns = PyMem_Calloc((size_t)out->width, sizeof *out->columns);
    if (out->columns == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t i = 0; i < out->width; i++) {
        if (!open_view(schema->children[i], array->children[i], array->offset, &out->columns[i])) return 0;
    }
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

static PyObject *next_record(const batch_view *batch, int64_t row) {
    const column_view *columns = batch->columns;
    int64_t width = batch->width;
    if (batch->empty != NULL) return read_dict(batch->empty, batch->names, columns, row);
    if (width == 1) return value_at(columns, row);
    PyObject *record = PyTuple_New(width);
    for (int64_t column = 0; record != NULL && column < width; column++) {
        PyObject *value = value_at(&columns[column], row);
        if (value == NULL) {
            Py_CLEAR(record);
        } else {
            PyTuple_SET_ITEM(record, column, value);
        }
    }
    return record;
}

/* Run all rows; `counts` is NULL, or gets how many results each has. 0, or -1 with an error. */
static int run_rows(driver *self, const batch_view *batch, int64_t rows, PyObject *fail, int32_t *counts) {
    for (int64_t row = 0; row < rows; row++) {
        Py_ssize_t before = self->rows;
        Py_ssize_t mark = self->entries == NULL ? 0 : PyList_GET_SIZE(self->entries);
        self->at = -1; /* a record that Python cannot hold */
        PyObject *record = next_record(batch, row);
        int found = record == NULL ? -1 : run_from(self, 0, record);
        if (found != 0) {
            if (self->rows > before && take_back(self, before) != 0) {
                Py_XDECREF(record);
                return -1;
            }
            found = tell_failure(self, fail, mark);
        }
        Py_XDECREF(record);
        if (found != 0) return -1;
        counts[row] = (int32_t)(self->rows - before);
        self->done = (Py_ssize_t)row + 1;
    }
    return 0;
}

static PyObject *finished(driver *self) {
    if (self->list != NULL) return Py_NewRef(self->list);
    PyObject *columns = PyList_New(self->width);
    for (Py_ssize_t i = 0; columns != NULL && i < self->width; i++) {
        column_maker *maker = &self->makers[i];
        PyObject *column = column_of(maker);
        if (column == NULL) {
            Py_CLEAR(columns);
        } else {
            PyList_SET_ITEM(columns, i, column);
        }
    }
    return columns;
}

static int open_makers(driver *self, Py_ssize_t rows) {
    self->rows = 0;
    self->capacity = rows > 0 ? rows : 1;
    self->list = NULL;
    self->makers = PyMem_Calloc((size_t)self->width, sizeof *self->makers);
    if (self->makers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const char *types = PyBytes_AS_STRING(self->types), *nullable = PyBytes_AS_STRING(self->nullable);
    for (Py_ssize_t i = 0; i < self->width; i++) {
        if (open_maker(types[i], nullable[i], self->capacity, &self->makers[i]) != 0) return -1;
    }
    return 0;
}

static void close_makers(driver *self) {
    for (Py_ssize_t i = 0; self->makers != NULL && i < self->width; i++) release_maker(&self->makers[i]);
    PyMem_Free(self->makers);
    self->makers = NULL;
    Py_CLEAR(self->list);
}

/* run(schema, array, fail): capsules of a record batch; fail(row, step, error, mark) is told of those that fail;
 * of one that Python cannot hold the step is -1. */
static PyObject *driver_run(driver *self, PyObject *args) {
    PyObject *schema_capsule, *array_capsule, *fail;
    if (!PyArg_ParseTuple(args, "OOO:run", &schema_capsule, &array_capsule, &fail)) return NULL;
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
    int readable = open_batch(self, schema, array, &batch);
    if (readable != 1) {
        close_batch(&batch);
        return readable == 0 ? Py_NewRef(Py_None) : NULL;
    }
    PyObject *counts = PyBytes_FromStringAndSize(NULL, array->length * (Py_ssize_t)sizeof(int32_t));
    PyObject *found = NULL;
    self->is_running = 1;
    if (counts != NULL && open_makers(self, array->length) == 0 &&
        run_rows(self, &batch, array->length, fail, (int32_t *)PyBytes_AS_STRING(counts)) == 0) {
        PyObject *results = finished(self);
        if (results != NULL) {
            PyObject *are_columns = self->list == NULL ? Py_True : Py_False;
            found = Py_BuildValue("(NnOO)", results, self->rows, counts, are_columns);
        }
    }
    /* What results hold may run code of the user's when it goes: with the error put aside. */
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    close_makers(self);
    PyErr_Restore(type, error, traceback);
    self->is_running = 0;
    Py_XDECREF(counts);
    close_batch(&batch);
    return found;
}

/* take_done(): the number of records that are done, which is 0 then. */
static PyObject *driver_take_done(driver *self, PyObject *nothing) {
    (void)nothing;
    Py_ssize_t done = self->done;
    self->done = 0;
    return PyLong_FromSsize_t(done);
}

/* ---------------------------------------------------------------- the type */

static int open_reduce(PyObject *given, step *out) {
    PyObject *lookup, *create;
    if (!PyArg_ParseTuple(given, "sOO!SOOOO:reduce", &(const char *){NULL}, &out->function, &PyTuple_Type,
                          &out->positions, &out->float_bytes, &out->table, &lookup, &create, &out->unhashable)) {
        return -1;
    }
    if (PyTuple_GET_SIZE(out->positions) < 1 ||
        PyTuple_GET_SIZE(out->positions) != PyBytes_GET_SIZE(out->float_bytes)) {
        PyErr_SetString(PyExc_ValueError, "a key has columns, and floats says something of each");
        return -1;
    }
    out->lookup = lookup == Py_None ? NULL : lookup;
    out->create = create == Py_None ? NULL : create;
    out->floats = PyBytes_AS_STRING(out->float_bytes);
    out->kind = REDUCE;
    return 0;
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
        memset(out, 0, sizeof *out);
        return -1;
    }
    PyObject **held[] = {&out->function, &out->results, &out->positions, &out->float_bytes,
                         &out->table,    &out->lookup,  &out->create,    &out->unhashable};
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
        Py_VISIT(each->unhashable);
    }
    Py_VISIT(self->passes);
    Py_VISIT(self->fails);
    Py_VISIT(self->entries);
    Py_VISIT(self->list);
    return 0;
}

static int driver_clear(driver *self) {
    for (Py_ssize_t i = 0; i < self->n_steps; i++) {
        step *each = &self->steps[i];
        Py_CLEAR(each->function);
        Py_CLEAR(each->results);
        Py_CLEAR(each->positions);
        Py_CLEAR(each->float_bytes);
        Py_CLEAR(each->table);
        Py_CLEAR(each->lookup);
        Py_CLEAR(each->create);
        Py_CLEAR(each->unhashable);
    }
    self->n_steps = 0;
    Py_CLEAR(self->types);
    Py_CLEAR(self->nullable);
    Py_CLEAR(self->names);
    Py_CLEAR(self->passes);
    Py_CLEAR(self->fails);
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
        if (type == '\0' || strchr("bcsilguz", type) == NULL) {
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

static PyObject *driver_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *steps, *types, *nullable, *names, *passes, *fails, *entries, *nan;
    if (keywords != NULL && PyDict_GET_SIZE(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "ChainDriver takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!SSOO!O!OO:ChainDriver", &PyTuple_Type, &steps, &types, &nullable, &names,
                          &PyTuple_Type, &passes, &PyTuple_Type, &fails, &entries, &nan)) {
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
    self->fails = Py_NewRef(fails);
    self->entries = entries == Py_None ? NULL : Py_NewRef(entries);
    self->nan = Py_NewRef(nan);
    for (; self->n_steps < n_steps; self->n_steps++) {
        if (open_step(PyTuple_GET_ITEM(steps, self->n_steps), &self->steps[self->n_steps]) != 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static PyMethodDef driver_methods[] = {
    {"run", (PyCFunction)driver_run, METH_VARARGS,
     "run(schema, array, fail) -> (columns or list, rows, counts, whether columns); None: a column is not plain."},
    {"take_done", (PyCFunction)driver_take_done, METH_NOARGS, "Return `done`, and set it to 0."},
    {NULL, NULL, 0, NULL},
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
};

int add_chain_driver(PyObject *module) { return PyModule_AddType(module, &driver_type); }
