/* The class Accumulators: running aggregates by slot, which are loaded from and exported to Arrow columns.
 *
 * A slot is known once `unknown` has told of it or it was loaded, present once a row came or it was loaded, and dirty
 * from its change until `take_dirty`. The methods hold the GIL; `add` releases it while it loops. */
#include "accumulators.h"

#include <stdlib.h>
#include <string.h>

#define MOST_DIGITS 38

/* ---------------------------------------------------------------- texts */

int keep_text(accumulators *self, const uint8_t *bytes, size_t size, accumulator *one) {
    if (size > self->texts_room - self->texts_used) {
        size_t room = 2 * (self->texts_used + size) + 1024;
        uint8_t *grown = realloc(self->texts, room);
        if (grown == NULL) return -1;
        self->texts = grown;
        self->texts_room = room;
    }
    if (size > 0) memcpy(self->texts + self->texts_used, bytes, size);
    self->texts_live += size;
    self->texts_live -= one->value.text.size;
    one->value.text.at = self->texts_used;
    one->value.text.size = size;
    self->texts_used += size;
    return 0;
}

static int is_text(aggregate_kind kind) { return kind == MIN_TEXT || kind == MAX_TEXT; }

/* ---------------------------------------------------------------- columns */

static int has_format(const char *format, aggregate_kind kind) {
    switch (kind) {
    case COUNT_ROWS:
    case COUNT_VALUES:
        return 1;
    case SUM_INTEGER:
    case MIN_INTEGER:
    case MAX_INTEGER:
        return strcmp(format, "l") == 0;
    case SUM_NUMBER:
    case MIN_NUMBER:
    case MAX_NUMBER:
    case MEAN:
        return strcmp(format, "g") == 0;
    case MIN_TEXT:
    case MAX_TEXT:
        return strcmp(format, "u") == 0 || strcmp(format, "z") == 0;
    default: { /* a decimal of 128 bits has no third number */
        const char *comma = strchr(format, ',');
        return strncmp(format, "d:", 2) == 0 && comma != NULL && strchr(comma + 1, ',') == NULL;
    }
    }
}

int open_input(const struct ArrowSchema *schema, const struct ArrowArray *array, int64_t first, aggregate_kind kind,
               input_column *out) {
    if (!has_format(schema->format, kind)) {
        PyErr_Format(PyExc_TypeError, "an aggregate cannot take a column of Arrow's type '%s'", schema->format);
        return -1;
    }
    memset(out, 0, sizeof *out);
    out->offset = array->offset + first;
    out->all_null = strcmp(schema->format, "n") == 0;
    if (array->n_buffers > 0 && array->null_count != 0) out->validity = array->buffers[0];
    if (array->n_buffers > 1) out->values = array->buffers[1];
    if (array->n_buffers > 2) out->bytes = array->buffers[2];
    return 0;
}

/* ---------------------------------------------------------------- slots */

static int grow(void **array, size_t room, size_t size) {
    void *grown = realloc(*array, room * size);
    if (grown == NULL) return -1;
    *array = grown;
    return 0;
}

/* reserve(slots): let there be so many, those that are new without anything. */
static PyObject *reserve(accumulators *self, PyObject *argument) {
    size_t slots = PyLong_AsSize_t(argument);
    if (slots == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (self->busy || slots > INT32_MAX) {
        PyErr_SetString(PyExc_RuntimeError, self->busy ? "another thread uses the accumulators" : "too many slots");
        return NULL;
    }
    size_t width = (size_t)self->width;
    if (slots > self->room) {
        size_t room = self->room == 0 ? 1024 : self->room;
        while (room < slots) room *= 2;
        if (grow((void **)&self->values, room, width * sizeof *self->values) != 0 ||
            grow((void **)&self->flags, room, sizeof *self->flags) != 0 ||
            grow((void **)&self->stamps, room, sizeof *self->stamps) != 0 ||
            grow((void **)&self->dirty, room, sizeof *self->dirty) != 0) {
            return PyErr_NoMemory();
        }
        self->room = room;
    }
    if (slots > self->slots) {
        size_t more = slots - self->slots;
        memset(self->values + self->slots * width, 0, more * width * sizeof *self->values);
        memset(self->flags + self->slots, 0, more);
        memset(self->stamps + self->slots, 0, more * sizeof *self->stamps);
        self->slots = slots;
    }
    Py_RETURN_NONE;
}

/* Take a view of slots, all of which there are. */
static int view_slots(const accumulators *self, PyObject *object, array_view *slots) {
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread uses the accumulators");
        return -1;
    }
    if (view_array(object, "slots", ITEM_I32, 0, slots) != 0) return -1;
    const int32_t *slot = slots->data;
    for (Py_ssize_t i = 0; i < slots->length; i++) {
        if (slot[i] < 0 || (size_t)slot[i] >= self->slots) {
            PyErr_Format(PyExc_IndexError, "slots[%zd] is %d, and there are %zu", i, (int)slot[i], self->slots);
            release_array(slots);
            return -1;
        }
    }
    return 0;
}

/* unknown(slots) -> bytes of int32: those that were not known, each once; they are known from now on. */
static PyObject *unknown(accumulators *self, PyObject *argument) {
    array_view slots;
    if (view_slots(self, argument, &slots) != 0) return NULL;
    const int32_t *slot = slots.data;
    PyObject *found = NULL;
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < slots.length; i++) {
        if (self->flags[slot[i]] & IS_KNOWN) continue;
        if (found == NULL) {
            found = PyBytes_FromStringAndSize(NULL, 4 * (slots.length - i));
            if (found == NULL) break;
        }
        self->flags[slot[i]] |= IS_KNOWN;
        memcpy(PyBytes_AS_STRING(found) + 4 * count++, &slot[i], 4);
    }
    if (found == NULL && !PyErr_Occurred()) {
        found = PyBytes_FromStringAndSize(NULL, 0);
    } else if (found != NULL) {
        _PyBytes_Resize(&found, 4 * count);
    }
    release_array(&slots);
    return found;
}

/* take_dirty() -> bytes of int32: the slots that have changed; they are not dirty any more. */
static PyObject *take_dirty(accumulators *self, PyObject *unused) {
    (void)unused;
    PyObject *found = PyBytes_FromStringAndSize(NULL, 4 * (Py_ssize_t)self->n_dirty);
    if (found == NULL) return NULL;
    size_t count = 0;
    for (size_t i = 0; i < self->n_dirty; i++) {
        uint32_t slot = self->dirty[i];
        self->flags[slot] &= (uint8_t)~IS_DIRTY;
        /* A row that was taken back may have left a slot that has nothing. */
        if (self->flags[slot] & IS_PRESENT) memcpy(PyBytes_AS_STRING(found) + 4 * count++, &slot, 4);
    }
    self->n_dirty = 0;
    _PyBytes_Resize(&found, 4 * (Py_ssize_t)count);
    return found;
}

/* restore(kept): the slots that a run has changed are what they were. */
static PyObject *restore(accumulators *self, PyObject *argument) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(argument, &bytes, &length) != 0) return NULL;
    size_t size = (size_t)self->width * sizeof(accumulator);
    if ((size_t)length % (8 + size) != 0 || self->busy) {
        PyErr_SetString(PyExc_ValueError, "this is not what these accumulators have kept");
        return NULL;
    }
    for (Py_ssize_t at = 0; at < length; at += (Py_ssize_t)(8 + size)) {
        uint32_t head[2];
        memcpy(head, bytes + at, 8);
        if (head[0] >= self->slots) {
            PyErr_SetString(PyExc_ValueError, "this is not what these accumulators have kept");
            return NULL;
        }
        accumulator *own = self->values + (size_t)head[0] * (size_t)self->width;
        for (Py_ssize_t k = 0; k < self->width; k++) {
            if (is_text(self->aggregates[k].kind)) self->texts_live -= own[k].value.text.size;
        }
        memcpy(own, bytes + at + 8, size);
        for (Py_ssize_t k = 0; k < self->width; k++) {
            if (is_text(self->aggregates[k].kind)) self->texts_live += own[k].value.text.size;
        }
        /* It stays in the list of dirty ones. */
        self->flags[head[0]] = (uint8_t)((self->flags[head[0]] & IS_DIRTY) | (head[1] & (IS_KNOWN | IS_PRESENT)));
    }
    Py_RETURN_NONE;
}

/* compact(): give back what texts that were replaced take up. Not while something is kept for `restore`. */
static PyObject *compact(accumulators *self, PyObject *unused) {
    (void)unused;
    if (self->busy || self->texts_used < 2 * self->texts_live + (1 << 20)) Py_RETURN_NONE;
    uint8_t *texts = malloc(self->texts_live + 1);
    if (texts == NULL) return PyErr_NoMemory();
    size_t used = 0;
    for (size_t i = 0; i < self->slots * (size_t)self->width; i++) {
        accumulator *one = &self->values[i];
        if (!is_text(self->aggregates[i % (size_t)self->width].kind) || one->value.text.size == 0) continue;
        memcpy(texts + used, self->texts + one->value.text.at, one->value.text.size);
        one->value.text.at = used;
        used += one->value.text.size;
    }
    free(self->texts);
    self->texts = texts;
    self->texts_used = used;
    self->texts_room = self->texts_live + 1;
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- state */

static Py_ssize_t state_width(const accumulators *self) {
    Py_ssize_t width = self->width;
    for (Py_ssize_t k = 0; k < self->width; k++) width += self->aggregates[k].kind == MEAN;
    return width;
}

static int load_one(accumulators *self, aggregate_kind kind, const input_column *column, int64_t row, accumulator *one) {
    int64_t i = column->offset + row;
    int valid = has_value(column, row);
    switch (kind) {
    case COUNT_ROWS:
    case COUNT_VALUES:
        one->count = valid ? int64_at(column->values, i) : 0;
        return 0;
    case MEAN: /* the sum; the count has a column of its own */
        one->value.number = valid ? double_at(column->values, i) : 0.0;
        return 0;
    case MIN_TEXT:
    case MAX_TEXT: {
        one->count = valid;
        if (!valid) return 0;
        int32_t start = int32_at(column->values, i);
        return keep_text(self, column->bytes + start, (size_t)(int32_at(column->values, i + 1) - start), one);
    }
    case SUM_WIDE:
    case MIN_WIDE:
    case MAX_WIDE:
        one->count = valid;
        if (valid) memcpy(&one->value.wide, (const uint8_t *)column->values + 16 * i, 16);
        return 0;
    default:
        one->count = valid;
        if (valid) memcpy(&one->value, (const uint8_t *)column->values + 8 * i, 8);
        return 0;
    }
}

static int load_all(accumulators *self, const array_view *slots, const struct ArrowSchema *schema,
                    const struct ArrowArray *array) {
    const int32_t *slot = slots->data;
    Py_ssize_t place = 0;
    for (Py_ssize_t k = 0; k < self->width; k++) {
        aggregate_kind kind = self->aggregates[k].kind;
        int counts = kind == COUNT_ROWS || kind == COUNT_VALUES;
        input_column column, number;
        aggregate_kind read = counts ? SUM_INTEGER : kind;
        if (open_input(schema->children[place], array->children[place], array->offset, read, &column) != 0) return -1;
        place++;
        if (kind == MEAN) {
            if (open_input(schema->children[place], array->children[place], array->offset, SUM_INTEGER, &number) != 0) {
                return -1;
            }
            place++;
        }
        for (Py_ssize_t row = 0; row < slots->length; row++) {
            accumulator *one = &self->values[(size_t)slot[row] * (size_t)self->width + (size_t)k];
            if (load_one(self, kind, &column, row, one) != 0) {
                PyErr_NoMemory();
                return -1;
            }
            if (kind == MEAN) one->count = has_value(&number, row) ? int64_at(number.values, number.offset + row) : 0;
        }
    }
    for (Py_ssize_t row = 0; row < slots->length; row++) self->flags[slot[row]] |= IS_KNOWN | IS_PRESENT;
    return 0;
}

/* load(slots, schema, array): the columns of `export`. */
static PyObject *load(accumulators *self, PyObject *args) {
    PyObject *slots_object, *schema_capsule, *array_capsule;
    if (!PyArg_ParseTuple(args, "OOO:load", &slots_object, &schema_capsule, &array_capsule)) return NULL;
    const struct ArrowSchema *schema = PyCapsule_GetPointer(schema_capsule, "arrow_schema");
    if (schema == NULL) return NULL;
    const struct ArrowArray *array = PyCapsule_GetPointer(array_capsule, "arrow_array");
    if (array == NULL) return NULL;
    array_view slots;
    if (view_slots(self, slots_object, &slots) != 0) return NULL;
    PyObject *result = NULL;
    if (strcmp(schema->format, "+s") != 0 || schema->n_children != state_width(self) ||
        array->n_children != schema->n_children) {
        PyErr_Format(PyExc_TypeError, "expected a record batch of %zd columns", state_width(self));
    } else if (check_length(&slots, "slots", (Py_ssize_t)array->length) == 0 &&
               load_all(self, &slots, schema, array) == 0) {
        result = Py_NewRef(Py_None);
    }
    release_array(&slots);
    return result;
}

static PyObject *integers(const accumulators *self, const array_view *slots, Py_ssize_t k) {
    PyObject *values = PyBytes_FromStringAndSize(NULL, 8 * slots->length);
    if (values == NULL) return NULL;
    const int32_t *slot = slots->data;
    for (Py_ssize_t row = 0; row < slots->length; row++) {
        const accumulator *one = &self->values[(size_t)slot[row] * (size_t)self->width + (size_t)k];
        memcpy(PyBytes_AS_STRING(values) + 8 * row, &one->count, 8);
    }
    return Py_BuildValue("(ONOi)", Py_None, values, Py_None, 0);
}

static PyObject *texts_of(const accumulators *self, const array_view *slots, Py_ssize_t k, PyObject *validity,
                          Py_ssize_t nulls) {
    const int32_t *slot = slots->data;
    size_t total = 0;
    for (Py_ssize_t row = 0; row < slots->length; row++) {
        total += self->values[(size_t)slot[row] * (size_t)self->width + (size_t)k].value.text.size;
    }
    if (total > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "texts of more than 2 GiB are to be exported at once");
        return NULL;
    }
    PyObject *ends = PyBytes_FromStringAndSize(NULL, 4 * (slots->length + 1));
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    if (ends == NULL || bytes == NULL) {
        Py_XDECREF(ends);
        Py_XDECREF(bytes);
        return NULL;
    }
    int32_t *end = (int32_t *)PyBytes_AS_STRING(ends);
    size_t used = 0;
    for (Py_ssize_t row = 0; row < slots->length; row++) {
        const accumulator *one = &self->values[(size_t)slot[row] * (size_t)self->width + (size_t)k];
        end[row] = (int32_t)used;
        if (one->value.text.size == 0) continue;
        memcpy(PyBytes_AS_STRING(bytes) + used, self->texts + one->value.text.at, one->value.text.size);
        used += one->value.text.size;
    }
    end[slots->length] = (int32_t)used;
    return Py_BuildValue("(ONNn)", nulls == 0 ? Py_None : validity, ends, bytes, nulls);
}

static PyObject *values_of(const accumulators *self, const array_view *slots, Py_ssize_t k) {
    aggregate_kind kind = self->aggregates[k].kind;
    Py_ssize_t size = kind == SUM_WIDE || kind == MIN_WIDE || kind == MAX_WIDE ? 16 : 8, nulls = 0;
    PyObject *validity = PyBytes_FromStringAndSize(NULL, (slots->length + 7) / 8);
    if (validity == NULL) return NULL;
    uint8_t *bits = (uint8_t *)PyBytes_AS_STRING(validity);
    memset(bits, 0xFF, (size_t)PyBytes_GET_SIZE(validity));
    const int32_t *slot = slots->data;
    for (Py_ssize_t row = 0; row < slots->length; row++) {
        const accumulator *one = &self->values[(size_t)slot[row] * (size_t)self->width + (size_t)k];
        if (one->count != 0 || kind == MEAN) continue;
        bits[row >> 3] &= (uint8_t)~(1 << (row & 7));
        nulls++;
    }
    PyObject *column = NULL;
    if (is_text(kind)) {
        column = texts_of(self, slots, k, validity, nulls);
    } else {
        PyObject *values = PyBytes_FromStringAndSize(NULL, size * slots->length);
        for (Py_ssize_t row = 0; values != NULL && row < slots->length; row++) {
            const accumulator *one = &self->values[(size_t)slot[row] * (size_t)self->width + (size_t)k];
            memcpy(PyBytes_AS_STRING(values) + size * row, &one->value, (size_t)size);
        }
        if (values != NULL) {
            column = Py_BuildValue("(ONOn)", nulls == 0 ? Py_None : validity, values, Py_None, nulls);
        }
    }
    Py_DECREF(validity);
    return column;
}

/* export(slots) -> [(validity or None, values, texts or None, nulls), ...]: of a mean its sum and its count. */
static PyObject *export(accumulators *self, PyObject *argument) {
    array_view slots;
    if (view_slots(self, argument, &slots) != 0) return NULL;
    PyObject *columns = PyList_New(0);
    for (Py_ssize_t k = 0; columns != NULL && k < self->width; k++) {
        aggregate_kind kind = self->aggregates[k].kind;
        int counts = kind == COUNT_ROWS || kind == COUNT_VALUES;
        for (int part = 0; columns != NULL && part <= (kind == MEAN); part++) {
            PyObject *column = counts || part == 1 ? integers(self, &slots, k) : values_of(self, &slots, k);
            if (column == NULL || PyList_Append(columns, column) != 0) Py_CLEAR(columns);
            Py_XDECREF(column);
        }
    }
    release_array(&slots);
    return columns;
}

/* ---------------------------------------------------------------- the type */

static int kind_of(char function, char type, aggregate_kind *kind) {
    static const struct {
        char function, type;
        aggregate_kind kind;
    } KINDS[] = {
        {'n', '-', COUNT_ROWS}, {'c', '-', COUNT_VALUES}, {'s', 'l', SUM_INTEGER}, {'s', 'g', SUM_NUMBER},
        {'s', 'd', SUM_WIDE},   {'m', 'g', MEAN},         {'<', 'l', MIN_INTEGER}, {'>', 'l', MAX_INTEGER},
        {'<', 'g', MIN_NUMBER}, {'>', 'g', MAX_NUMBER},   {'<', 'd', MIN_WIDE},    {'>', 'd', MAX_WIDE},
        {'<', 'z', MIN_TEXT},   {'>', 'z', MAX_TEXT},
    };
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        if (KINDS[i].function == function && KINDS[i].type == type) {
            *kind = KINDS[i].kind;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "there is no aggregate '%c' of '%c'", function, type);
    return -1;
}

static PyObject *accumulators_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    const char *functions, *types, *digits;
    Py_ssize_t width, n_types, n_digits;
    if (options != NULL && PyDict_GET_SIZE(options) > 0) {
        PyErr_SetString(PyExc_TypeError, "Accumulators takes no named arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y#y#y#:Accumulators", &functions, &width, &types, &n_types, &digits, &n_digits)) {
        return NULL;
    }
    if (width == 0 || n_types != width || n_digits != width) {
        PyErr_SetString(PyExc_ValueError, "functions, types and digits have one character an aggregate");
        return NULL;
    }
    accumulators *self = (accumulators *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->width = width;
    self->aggregates = PyMem_Calloc((size_t)width, sizeof *self->aggregates);
    if (self->aggregates == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t k = 0; k < width; k++) {
        if (digits[k] < 0 || digits[k] > MOST_DIGITS || kind_of(functions[k], types[k], &self->aggregates[k].kind) != 0) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a decimal has at most 38 digits");
            Py_DECREF(self);
            return NULL;
        }
        self->aggregates[k].limit = 1;
        for (int i = 0; i < digits[k]; i++) self->aggregates[k].limit *= 10;
    }
    return (PyObject *)self;
}

static void accumulators_dealloc(accumulators *self) {
    PyMem_Free(self->aggregates);
    free(self->values);
    free(self->flags);
    free(self->stamps);
    free(self->dirty);
    free(self->texts);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *bytes_used(accumulators *self, void *unused) {
    (void)unused;
    size_t slot = (size_t)self->width * sizeof *self->values + 1 + sizeof *self->stamps + sizeof *self->dirty;
    return PyLong_FromSize_t(self->room * slot + self->texts_room);
}

static PyObject *dirty_count(accumulators *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(self->n_dirty);
}

static PyMethodDef accumulators_methods[] = {
    {"reserve", (PyCFunction)reserve, METH_O, "reserve(slots): let there be so many."},
    {"unknown", (PyCFunction)unknown, METH_O, "unknown(slots) -> those not known so far, each once, as int32."},
    {"add", (PyCFunction)accumulators_add, METH_VARARGS,
     "add(slots, schema, array, results, undo) -> (columns or None, [(row, aggregate)], kept or None)"},
    {"restore", (PyCFunction)restore, METH_O, "restore(kept): take a run back, the latest first."},
    {"load", (PyCFunction)load, METH_VARARGS, "load(slots, schema, array): set what `export` has returned."},
    {"export", (PyCFunction)export, METH_O, "export(slots) -> the columns of the state."},
    {"take_dirty", (PyCFunction)take_dirty, METH_NOARGS, "take_dirty() -> the slots that have changed, as int32."},
    {"compact", (PyCFunction)compact, METH_NOARGS, "Give memory of texts that were replaced back."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef accumulators_attributes[] = {
    {"nbytes", (getter)bytes_used, NULL, "bytes of memory", NULL},
    {"dirty", (getter)dirty_count, NULL, "how many slots have changed, at most", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject accumulators_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ftlayer._native.Accumulators",
    .tp_doc = "Running aggregates by slot: Accumulators(functions, types, digits).",
    .tp_basicsize = sizeof(accumulators),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = accumulators_new,
    .tp_dealloc = (destructor)accumulators_dealloc,
    .tp_methods = accumulators_methods,
    .tp_getset = accumulators_attributes,
};

int add_accumulators(PyObject *module) { return PyModule_AddType(module, &accumulators_type); }
