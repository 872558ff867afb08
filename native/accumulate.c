/* Rows into running aggregates: each row's value into that of its key, and what the aggregate is then, row by row.
 *
 * A row that one of its aggregates cannot take (a sum would overflow) changes none of them. */
#include "accumulators.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    uint8_t *validity;
    void *values;
    PyObject *validity_object;
    PyObject *values_object;
    int64_t nulls;
    uint8_t *text; /* of texts: their bytes */
    size_t text_used, text_room;
} output_column;

/* What was, for each slot that a run has changed: the slot and its flags, then its accumulators. */
typedef struct {
    uint8_t *bytes;
    size_t used, room;
} kept_slots;

typedef struct {
    accumulators *self;
    const int32_t *slots;
    int64_t rows;
    input_column *inputs;
    output_column *outputs; /* NULL: none are wanted */
    kept_slots *kept;       /* NULL: none are wanted */
    uint32_t *failed;       /* pairs of a row and the aggregate that cannot take it */
    size_t n_failed, failed_room;
} run;

typedef enum { TAKEN, REFUSED, NO_MEMORY } taking;

/* ---------------------------------------------------------------- values */

static inline int64_t integer_at(const input_column *column, int64_t row) {
    return int64_at(column->values, column->offset + row);
}

static inline double number_at(const input_column *column, int64_t row) {
    return double_at(column->values, column->offset + row);
}

static inline wide wide_at(const input_column *column, int64_t row) {
    wide value; /* Arrow aligns by 8 */
    memcpy(&value, (const uint8_t *)column->values + 16 * (column->offset + row), sizeof value);
    return value;
}

static inline const uint8_t *text_at(const input_column *column, int64_t row, size_t *size) {
    int64_t i = column->offset + row;
    int32_t start = int32_at(column->values, i);
    *size = (size_t)(int32_at(column->values, i + 1) - start);
    return column->bytes == NULL ? (const uint8_t *)"" : column->bytes + start;
}

/* Not-a-number is larger than any number. */
static inline int is_less(double one, double other) { return one < other || (other != other && one == one); }

static inline int is_less_text(const uint8_t *one, size_t one_size, const uint8_t *other, size_t other_size) {
    size_t shorter = one_size < other_size ? one_size : other_size;
    int order = shorter == 0 ? 0 : memcmp(one, other, shorter);
    return order < 0 || (order == 0 && one_size < other_size);
}

/* Whether a row's text takes the place of the one so far. */
static int replaces_text(const accumulators *self, aggregate_kind kind, const accumulator *one,
                         const input_column *input, int64_t row) {
    if (!has_value(input, row)) return 0;
    if (one->count == 0) return 1;
    size_t size;
    const uint8_t *text = text_at(input, row, &size);
    const uint8_t *held = one->value.text.size == 0 ? (const uint8_t *)"" : self->texts + one->value.text.at;
    if (kind == MIN_TEXT) return is_less_text(text, size, held, one->value.text.size);
    return is_less_text(held, one->value.text.size, text, size);
}

/* ---------------------------------------------------------------- one row */

/* Whether an aggregate can take the row. */
static inline int can_take(const run *run, Py_ssize_t number, const accumulator *one, int64_t row) {
    const aggregate *what = &run->self->aggregates[number];
    const input_column *input = &run->inputs[number];
    switch (what->kind) {
    case SUM_INTEGER: {
        int64_t sum;
        return !has_value(input, row) ||
               !__builtin_add_overflow(one->value.integer, integer_at(input, row), &sum);
    }
    case SUM_WIDE: {
        wide sum;
        if (!has_value(input, row)) return 1;
        if (__builtin_add_overflow(wide_of(one), wide_at(input, row), &sum)) return 0;
        return sum < what->limit && sum > -what->limit;
    }
    case MIN_TEXT:
    case MAX_TEXT: {
        if (run->outputs == NULL) return 1;
        size_t size = one->value.text.size;
        if (replaces_text(run->self, what->kind, one, input, row)) text_at(input, row, &size);
        return size <= (size_t)INT32_MAX - run->outputs[number].text_used;
    }
    default:
        return 1;
    }
}

static inline int take_text(accumulators *self, aggregate_kind kind, accumulator *one, const input_column *input,
                            int64_t row) {
    if (!replaces_text(self, kind, one, input, row)) return 1;
    size_t size;
    const uint8_t *text = text_at(input, row, &size);
    if (keep_text(self, text, size, one) != 0) return 0;
    one->count = 1;
    return 1;
}

/* Put the row into an aggregate that can take it; 0 without memory. */
static inline __attribute__((always_inline)) int take(accumulators *self, aggregate_kind kind, accumulator *one,
                                                      const input_column *input, int64_t row) {
    if (kind == COUNT_ROWS) {
        one->count++;
        return 1;
    }
    if (kind == MIN_TEXT || kind == MAX_TEXT) return take_text(self, kind, one, input, row);
    if (!has_value(input, row)) return 1;
    switch (kind) {
    case COUNT_VALUES:
        one->count++;
        break;
    case SUM_INTEGER:
        one->value.integer += integer_at(input, row);
        one->count = 1;
        break;
    case SUM_NUMBER:
        one->value.number = one->count == 0 ? number_at(input, row) : one->value.number + number_at(input, row);
        one->count = 1;
        break;
    case SUM_WIDE:
        set_wide(one, wide_of(one) + wide_at(input, row));
        one->count = 1;
        break;
    case MEAN:
        one->value.number += number_at(input, row);
        one->count++;
        break;
    case MIN_INTEGER:
    case MAX_INTEGER: {
        int64_t value = integer_at(input, row);
        if (one->count == 0 || (kind == MIN_INTEGER ? value < one->value.integer : value > one->value.integer)) {
            one->value.integer = value;
            one->count = 1;
        }
        break;
    }
    case MIN_NUMBER:
    case MAX_NUMBER: {
        double value = number_at(input, row), held = one->value.number;
        if (one->count == 0 || (kind == MIN_NUMBER ? is_less(value, held) : is_less(held, value))) {
            one->value.number = value;
            one->count = 1;
        }
        break;
    }
    default: { /* MIN_WIDE, MAX_WIDE */
        wide value = wide_at(input, row);
        if (one->count == 0 || (kind == MIN_WIDE ? value < wide_of(one) : value > wide_of(one))) {
            set_wide(one, value);
            one->count = 1;
        }
    }
    }
    return 1;
}

static int put_text(const accumulators *self, output_column *out, const accumulator *one, int64_t row) {
    size_t size = one == NULL ? 0 : one->value.text.size, needed = out->text_used + size;
    if (needed > out->text_room) {
        size_t room = 2 * needed + 1024;
        uint8_t *grown = realloc(out->text, room);
        if (grown == NULL) return 0;
        out->text = grown;
        out->text_room = room;
    }
    if (size > 0) memcpy(out->text + out->text_used, self->texts + one->value.text.at, size);
    out->text_used = needed;
    ((int32_t *)out->values)[row + 1] = (int32_t)needed;
    return 1;
}

/* Write what an aggregate is behind the row; 0 without memory. */
static inline __attribute__((always_inline)) int put(const accumulators *self, aggregate_kind kind, output_column *out,
                                                     const accumulator *one, int64_t row) {
    if (kind == COUNT_ROWS || kind == COUNT_VALUES) {
        ((int64_t *)out->values)[row] = one->count;
        return 1;
    }
    int is_null = one->count == 0;
    if (is_null) {
        out->validity[row >> 3] &= (uint8_t)~(1 << (row & 7));
        out->nulls++;
    }
    switch (kind) {
    case SUM_INTEGER:
    case MIN_INTEGER:
    case MAX_INTEGER:
        ((int64_t *)out->values)[row] = one->value.integer;
        return 1;
    case SUM_NUMBER:
    case MIN_NUMBER:
    case MAX_NUMBER:
        ((double *)out->values)[row] = one->value.number;
        return 1;
    case MEAN:
        ((double *)out->values)[row] = is_null ? 0.0 : one->value.number / (double)one->count;
        return 1;
    case MIN_TEXT:
    case MAX_TEXT:
        return put_text(self, out, is_null ? NULL : one, row);
    default:
        memcpy((uint8_t *)out->values + 16 * row, &one->value.wide, 16);
        return 1;
    }
}

/* ---------------------------------------------------------------- all rows */

/* Keep what a slot was before this run; 0 without memory. */
static int keep_slot(run *run, uint32_t slot) {
    accumulators *self = run->self;
    kept_slots *kept = run->kept;
    size_t size = (size_t)self->width * sizeof(accumulator), needed = kept->used + 8 + size;
    if (needed > kept->room) {
        size_t room = 2 * needed + 4096;
        uint8_t *grown = realloc(kept->bytes, room);
        if (grown == NULL) return 0;
        kept->bytes = grown;
        kept->room = room;
    }
    uint32_t head[2] = {slot, self->flags[slot]};
    memcpy(kept->bytes + kept->used, head, 8);
    memcpy(kept->bytes + kept->used + 8, self->values + (size_t)slot * (size_t)self->width, size);
    kept->used = needed;
    self->stamps[slot] = self->stamp;
    return 1;
}

static int note_failure(run *run, int64_t row, Py_ssize_t number) {
    if (run->n_failed == run->failed_room) {
        size_t room = 2 * run->failed_room + 16;
        uint32_t *grown = realloc(run->failed, 2 * room * sizeof *grown);
        if (grown == NULL) return 0;
        run->failed = grown;
        run->failed_room = room;
    }
    run->failed[2 * run->n_failed] = (uint32_t)row;
    run->failed[2 * run->n_failed++ + 1] = (uint32_t)number;
    return 1;
}

/* A refused row's place in the outputs, which the caller leaves out. */
static int put_nothing(const run *run, int64_t row) {
    static const accumulator none;
    for (Py_ssize_t k = 0; k < run->self->width; k++) {
        if (!put(run->self, run->self->aggregates[k].kind, &run->outputs[k], &none, row)) return 0;
    }
    return 1;
}

static inline void mark(accumulators *self, uint32_t slot) {
    if ((self->flags[slot] & (IS_PRESENT | IS_DIRTY)) == (IS_PRESENT | IS_DIRTY)) return;
    if (!(self->flags[slot] & IS_DIRTY)) self->dirty[self->n_dirty++] = slot;
    self->flags[slot] |= IS_KNOWN | IS_PRESENT | IS_DIRTY;
}

static taking take_row(run *run, int64_t row) {
    accumulators *self = run->self;
    uint32_t slot = (uint32_t)run->slots[row];
    accumulator *own = self->values + (size_t)slot * (size_t)self->width;
    for (Py_ssize_t k = 0; k < self->width; k++) {
        if (can_take(run, k, &own[k], row)) continue;
        return note_failure(run, row, k) && (run->outputs == NULL || put_nothing(run, row)) ? REFUSED : NO_MEMORY;
    }
    if (run->kept != NULL && self->stamps[slot] != self->stamp && !keep_slot(run, slot)) return NO_MEMORY;
    mark(self, slot);
    for (Py_ssize_t k = 0; k < self->width; k++) {
        aggregate_kind kind = self->aggregates[k].kind;
        if (!take(self, kind, &own[k], &run->inputs[k], row)) return NO_MEMORY;
        if (run->outputs != NULL && !put(self, kind, &run->outputs[k], &own[k], row)) return NO_MEMORY;
    }
    return TAKEN;
}

/* A single aggregate that takes every row: its kind is known to the compiler. */
static inline __attribute__((always_inline)) void take_all(run *run, aggregate_kind kind) {
    accumulators *self = run->self;
    for (int64_t row = 0; row < run->rows; row++) {
        uint32_t slot = (uint32_t)run->slots[row];
        mark(self, slot);
        take(self, kind, &self->values[slot], run->inputs, row);
        if (run->outputs != NULL) put(self, kind, run->outputs, &self->values[slot], row);
    }
}

static int take_rows(run *run) {
    if (run->self->width == 1 && run->kept == NULL) {
        switch (run->self->aggregates->kind) {
        case COUNT_ROWS:
            take_all(run, COUNT_ROWS);
            return 1;
        case SUM_NUMBER:
            take_all(run, SUM_NUMBER);
            return 1;
        default:
            break;
        }
    }
    for (int64_t row = 0; row < run->rows; row++) {
        if (take_row(run, row) == NO_MEMORY) return 0;
    }
    return 1;
}

/* ---------------------------------------------------------------- the method */

static int64_t value_bytes(aggregate_kind kind, int64_t rows) {
    switch (kind) {
    case SUM_WIDE:
    case MIN_WIDE:
    case MAX_WIDE:
        return 16 * rows;
    case MIN_TEXT:
    case MAX_TEXT:
        return 4 * (rows + 1);
    default:
        return 8 * rows;
    }
}

static int open_output(aggregate_kind kind, int64_t rows, output_column *out) {
    Py_ssize_t bits = (Py_ssize_t)((rows + 7) / 8);
    out->validity_object = PyBytes_FromStringAndSize(NULL, bits);
    out->values_object = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)value_bytes(kind, rows));
    if (out->validity_object == NULL || out->values_object == NULL) return -1;
    out->validity = (uint8_t *)PyBytes_AS_STRING(out->validity_object);
    out->values = PyBytes_AS_STRING(out->values_object);
    memset(out->validity, 0xFF, (size_t)bits);
    if (kind == MIN_TEXT || kind == MAX_TEXT) *(int32_t *)out->values = 0;
    return 0;
}

static PyObject *finished(aggregate_kind kind, const output_column *out) {
    PyObject *text = Py_NewRef(Py_None);
    if (kind == MIN_TEXT || kind == MAX_TEXT) {
        Py_SETREF(text, PyBytes_FromStringAndSize((const char *)out->text, (Py_ssize_t)out->text_used));
        if (text == NULL) return NULL;
    }
    PyObject *validity = out->nulls == 0 ? Py_None : out->validity_object;
    return Py_BuildValue("(OONL)", validity, out->values_object, text, (long long)out->nulls);
}

static PyObject *all_finished(const run *run) {
    if (run->outputs == NULL) return Py_NewRef(Py_None);
    PyObject *columns = PyList_New(run->self->width);
    for (Py_ssize_t k = 0; columns != NULL && k < run->self->width; k++) {
        PyObject *column = finished(run->self->aggregates[k].kind, &run->outputs[k]);
        if (column == NULL) {
            Py_CLEAR(columns);
        } else {
            PyList_SET_ITEM(columns, k, column);
        }
    }
    return columns;
}

static PyObject *failures_of(const run *run) {
    PyObject *failures = PyList_New((Py_ssize_t)run->n_failed);
    for (size_t i = 0; failures != NULL && i < run->n_failed; i++) {
        PyObject *pair = Py_BuildValue("(II)", run->failed[2 * i], run->failed[2 * i + 1]);
        if (pair == NULL) {
            Py_CLEAR(failures);
        } else {
            PyList_SET_ITEM(failures, (Py_ssize_t)i, pair);
        }
    }
    return failures;
}

static PyObject *result_of(const run *run) {
    PyObject *columns = all_finished(run), *failures = failures_of(run), *kept = Py_NewRef(Py_None);
    if (run->kept != NULL) {
        Py_SETREF(kept, PyBytes_FromStringAndSize((const char *)run->kept->bytes, (Py_ssize_t)run->kept->used));
    }
    if (columns != NULL && failures != NULL && kept != NULL) return Py_BuildValue("(NNN)", columns, failures, kept);
    Py_XDECREF(columns);
    Py_XDECREF(failures);
    Py_XDECREF(kept);
    return NULL;
}

static int check_rows(const accumulators *self, const struct ArrowSchema *schema, const struct ArrowArray *array,
                      const array_view *slots) {
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread uses the accumulators");
        return -1;
    }
    if (strcmp(schema->format, "+s") != 0 || array->n_children != schema->n_children ||
        schema->n_children != self->width) {
        PyErr_Format(PyExc_TypeError, "expected a record batch of %zd columns", self->width);
        return -1;
    }
    if (slots->length > INT32_MAX || check_length(slots, "slots", (Py_ssize_t)array->length) != 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_OverflowError, "more than 2**31 - 1 rows");
        return -1;
    }
    const int32_t *slot = slots->data;
    for (Py_ssize_t row = 0; row < slots->length; row++) {
        if (slot[row] < 0 || (size_t)slot[row] >= self->slots) {
            PyErr_Format(PyExc_IndexError, "slots[%zd] is %d, and there are %zu", row, (int)slot[row], self->slots);
            return -1;
        }
    }
    return 0;
}

static PyObject *run_all(run *run) {
    accumulators *self = run->self;
    if (run->kept != NULL && ++self->stamp == 0) {
        memset(self->stamps, 0, self->slots * sizeof *self->stamps);
        self->stamp = 1;
    }
    int done;
    self->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    done = take_rows(run);
    Py_END_ALLOW_THREADS
    self->busy = 0;
    return done ? result_of(run) : PyErr_NoMemory();
}

static PyObject *open_and_run(run *run, const struct ArrowSchema *schema, const struct ArrowArray *array) {
    for (Py_ssize_t k = 0; k < run->self->width; k++) {
        aggregate_kind kind = run->self->aggregates[k].kind;
        if (open_input(schema->children[k], array->children[k], array->offset, kind, &run->inputs[k]) != 0) return NULL;
        if (run->outputs != NULL && open_output(kind, run->rows, &run->outputs[k]) != 0) return NULL;
    }
    return run_all(run);
}

static void release_outputs(output_column *outputs, Py_ssize_t width) {
    for (Py_ssize_t k = 0; outputs != NULL && k < width; k++) {
        Py_XDECREF(outputs[k].validity_object);
        Py_XDECREF(outputs[k].values_object);
        free(outputs[k].text);
    }
    PyMem_Free(outputs);
}

/* add(slots, schema, array, results, undo) -> (columns or None, failures, kept or None) */
PyObject *accumulators_add(accumulators *self, PyObject *args) {
    PyObject *slots_object, *schema_capsule, *array_capsule;
    int wants_results, wants_undo;
    if (!PyArg_ParseTuple(args, "OOOpp:add", &slots_object, &schema_capsule, &array_capsule, &wants_results,
                          &wants_undo)) {
        return NULL;
    }
    const struct ArrowSchema *schema = PyCapsule_GetPointer(schema_capsule, "arrow_schema");
    if (schema == NULL) return NULL;
    const struct ArrowArray *array = PyCapsule_GetPointer(array_capsule, "arrow_array");
    if (array == NULL) return NULL;
    array_view slots;
    if (view_array(slots_object, "slots", ITEM_I32, 0, &slots) != 0) return NULL;
    kept_slots kept = {0};
    run run = {.self = self, .slots = slots.data, .rows = slots.length, .kept = wants_undo ? &kept : NULL};
    PyObject *result = NULL;
    if (check_rows(self, schema, array, &slots) == 0) {
        run.inputs = PyMem_Calloc((size_t)self->width, sizeof *run.inputs);
        if (wants_results) run.outputs = PyMem_Calloc((size_t)self->width, sizeof *run.outputs);
        int has_memory = run.inputs != NULL && (!wants_results || run.outputs != NULL);
        result = has_memory ? open_and_run(&run, schema, array) : PyErr_NoMemory();
    }
    release_outputs(run.outputs, self->width);
    PyMem_Free(run.inputs);
    free(run.failed);
    free(kept.bytes);
    release_array(&slots);
    return result;
}
