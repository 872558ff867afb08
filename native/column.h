/* An Arrow array prepared for hashing: its type parsed once, its buffers at hand. */
#ifndef FTLAYER_COLUMN_H
#define FTLAYER_COLUMN_H

#include <stdint.h>

#include "arrow_c.h"

typedef enum {
    KIND_NULL,
    KIND_BOOL,
    KIND_INT8,
    KIND_INT16,
    KIND_INT32,
    KIND_INT64,
    KIND_FLOAT,
    KIND_DOUBLE,
    KIND_DECIMAL_LONG,  /* precision up to 18: fits a long */
    KIND_DECIMAL_BYTES, /* any larger one */
    KIND_BYTES_32,      /* strings and binary, by the width of their offsets */
    KIND_BYTES_64,
    KIND_BYTES_VIEW,
    KIND_BYTES_FIXED,
    KIND_STRUCT,
    KIND_LIST_32,
    KIND_LIST_64,
    KIND_LIST_VIEW_32,
    KIND_LIST_VIEW_64,
    KIND_LIST_FIXED,
    KIND_DICTIONARY,
} column_kind;

typedef struct key_column {
    column_kind kind;
    column_kind index_kind; /* of a dictionary-encoded column */
    int64_t width;          /* bytes of a fixed-size binary, items of a fixed-size list */
    int64_t offset;
    const uint8_t *validity; /* NULL when nothing is null */
    const void **buffers;
    int64_t n_children;
    struct key_column *children; /* fields of a struct; the items of a list; the values of a dictionary */
} key_column;

/* Prepare `array`; 0, or -1 with a Python error. Release with `release_column` in the first case only. */
int open_column(const struct ArrowSchema *schema, const struct ArrowArray *array, key_column *out);
void release_column(key_column *column);

#endif
