/* One record on its way through a chain's functions. */
#include "drive.h"
#include "undo.h"

static PyObject *call_one(PyObject *function, PyObject *argument) {
    PyObject *arguments[2] = {NULL, argument};
    return PyObject_Vectorcall(function, arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

static PyObject *call_two(PyObject *function, PyObject *first, PyObject *second) {
    PyObject *arguments[3] = {NULL, first, second};
    return PyObject_Vectorcall(function, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* A part of the key; all that is not equal to itself is one and the same. */
static PyObject *key_part(const driver *self, const key_place *place, PyObject *record) {
    PyObject *value;
    if (place->position < 0) {
        value = Py_NewRef(record);
    } else if (PyTuple_CheckExact(record) && place->position < PyTuple_GET_SIZE(record)) {
        value = Py_NewRef(PyTuple_GET_ITEM(record, place->position));
    } else {
        PyObject *position = PyLong_FromSsize_t(place->position);
        value = position == NULL ? NULL : PyObject_GetItem(record, position);
        Py_XDECREF(position);
    }
    if (value == NULL || !place->is_float) return value;
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
    if (reduce->parts == 1) return key_part(self, &reduce->places[0], record);
    PyObject *key = PyTuple_New(reduce->parts);
    for (Py_ssize_t part = 0; key != NULL && part < reduce->parts; part++) {
        PyObject *value = key_part(self, &reduce->places[part], record);
        if (value == NULL) {
            Py_CLEAR(key);
        } else {
            PyTuple_SET_ITEM(key, part, value);
        }
    }
    return key;
}

/* table[key]; what the dict itself has not may lie below it. `place` is the key's in `known`, or SIZE_MAX. */
static PyObject *looked_up(const step *reduce, PyObject *key, size_t place) {
    if (place != SIZE_MAX) {
        PyObject *kept = reduce->known->aggregates[place];
        if (kept != NULL) return Py_NewRef(kept);
    }
    if (reduce->lookup != NULL) return call_one(reduce->lookup, key);
    PyObject *old = PyDict_GetItemWithError(reduce->table, key);
    if (old != NULL) {
        Py_INCREF(old);
    } else if (!PyErr_Occurred()) {
        old = PyObject_GetItem(reduce->table, key);
    }
    if (old != NULL && place != SIZE_MAX) found_aggregate(reduce->known, place, old);
    return old;
}

static PyObject *reduced(const step *reduce, PyObject *key, size_t place, PyObject *record) {
    PyObject *old = looked_up(reduce, key, place);
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

static int run_reduce(driver *self, Py_ssize_t at, PyObject *record) {
    const step *reduce = &self->steps[at];
    PyObject *key = key_of(self, reduce, record);
    if (key == NULL) return -1;
    size_t place = reduce->known == NULL ? SIZE_MAX : place_of_key(reduce->known, key);
    PyObject *result = reduced(reduce, key, place, record);
    PyObject *kept = result == NULL || reduce->own == NULL || is_plainly_immutable(result)
                         ? Py_XNewRef(result)
                         : call_one(reduce->own, result);
    /* The aggregate is what it was until all that follows has gone well. */
    int found = kept == NULL ? -1 : run_from(self, at + 1, result);
    if (found == 0) {
        found = place != SIZE_MAX ? put_aggregate(reduce->known, place, kept)
                                  : PyDict_SetItem(reduce->table, key, kept);
    }
    Py_XDECREF(kept);
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

int run_from(driver *self, Py_ssize_t at, PyObject *record) {
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
    found = put_result(self, record);
    Py_XDECREF(mine);
    return found;
}
