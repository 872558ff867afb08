/* Running aggregates of many keys, each key by its number (`KeyIndex`), in memory of their own. */
#ifndef FTLAYER_ACCUMULATORS_H
#define FTLAYER_ACCUMULATORS_H

#include "arrow_c.h"
#include "native.h"

typedef __int128 wide;

typedef enum {
    COUNT_ROWS,
    COUNT_VALUES,
    SUM_INTEGER, /* int64 */
    SUM_NUMBER,  /* double */
    SUM_WIDE,    /* decimal of 128 bits */
    MEAN,        /* of doubles */
    MIN_INTEGER,
    MAX_INTEGER,
    MIN_NUMBER,
    MAX_NUMBER,
    MIN_WIDE,
    MAX_WIDE,
    MIN_TEXT, /* strings and binary, by their bytes */
    MAX_TEXT,
} aggregate_kind;

typedef struct {
    aggregate_kind kind;
    wide limit; /* of SUM_WIDE: what its magnitude stays below */
} aggregate;

typedef struct {
    union {
        int64_t integer;
        double number;
        struct {
            uint64_t low, high;
        } wide;
        struct {
            size_t at, size; /* in `texts` */
        } text;
    } value;
    int64_t count; /* of rows or of values that are not null; of a sum, minimum or maximum whether there are any */
} accumulator;

enum { IS_KNOWN = 1, IS_PRESENT = 2, IS_DIRTY = 4 };

typedef struct {
    PyObject_HEAD
    Py_ssize_t width;
    aggregate *aggregates;
    size_t slots;
    size_t room;
    accumulator *values; /* those of a slot side by side */
    uint8_t *flags;      /* of each slot */
    uint32_t *stamps;    /* of each slot: the last run that kept it for undo */
    uint32_t stamp;
    uint32_t *dirty; /* slots with IS_DIRTY */
    size_t n_dirty;
    uint8_t *texts;
    size_t texts_used, texts_room, texts_live;
    int busy; /* the GIL is released meanwhile */
} accumulators;

/* A column of what is aggregated. */
typedef struct {
    const uint8_t *validity; /* NULL when nothing is null */
    int all_null;
    int64_t offset;
    const void *values;
    const uint8_t *bytes;
} input_column;

static inline int has_value(const input_column *column, int64_t row) {
    if (column->validity == NULL) return !column->all_null;
    return bit_is_set(column->validity, column->offset + row);
}

static inline wide wide_of(const accumulator *one) {
    return (wide)((unsigned __int128)one->value.wide.high << 64 | one->value.wide.low);
}

static inline void set_wide(accumulator *one, wide value) {
    one->value.wide.low = (uint64_t)value;
    one->value.wide.high = (uint64_t)((unsigned __int128)value >> 64);
}

/* Keep a text; 0, or -1 without memory. */
int keep_text(accumulators *self, const uint8_t *bytes, size_t size, accumulator *one);

/* Make `input` of a column that an aggregate takes, or that its state is in; 0, or -1 with a TypeError. */
int open_input(const struct ArrowSchema *schema, const struct ArrowArray *array, int64_t first, aggregate_kind kind,
               input_column *out);

/* accumulate.c: the method `add`. */
PyObject *accumulators_add(accumulators *self, PyObject *args);

#endif
