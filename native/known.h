/* Values of a column that were read lately, found by their bytes: one that comes again is the same Python object.
 *
 * Columns that are keyed by, and most columns of texts, say the same again and again. To find an object costs less than
 * to make one; and a text has its hash then, and is found in a dict of state without a look at its characters. What is
 * kept is bounded. A column whose values are nearly all new is found out, and left alone for a while.
 *
 * Beside a key there may lie its aggregate of a table of state, if that is small and nothing can change it in place: it
 * is found without a look into the table, and written back later. The GIL is held throughout. */
#ifndef FTLAYER_KNOWN_H
#define FTLAYER_KNOWN_H

#include "native.h"

/* Values are looked for so many at a time, so that memory is asked for all of them at once. */
#define AHEAD 16

typedef struct {
    uint32_t tag;     /* of the value's bytes; 0: the place is free */
    uint32_t length;  /* bytes */
    PyObject *object; /* str, bytes or int */
} known_place;

typedef struct {
    char type;           /* Arrow's: of texts (u, U, z, Z), or of integers (c, s, i, l) */
    known_place *places; /* NULL: none yet */
    size_t sets;         /* of places, a power of two */
    size_t at;           /* the place of the value that was read last */
    uint32_t asked, missed, replaced; /* since it was looked at last */
    uint32_t rest;                    /* values that are read without asking */
    PyObject *table;                  /* where aggregates belong, a dict; NULL: none are kept */
    PyObject **aggregates;            /* by place; NULL: none is known */
    uint8_t *changed;                 /* by place: whether the table does not have it yet */
    size_t n_changed;
} known_column;

/* Tag of these bytes, for `known_object`; what is to be read for it is fetched meanwhile. */
uint32_t announced(known_column *known, const char *bytes, Py_ssize_t length);

/* The values of these tags come next. */
void fetch_announced(known_column *known, const uint32_t *tags, int count);

/* Return the object of these bytes, those of an int64 for integers; NULL with an error: they are no UTF-8, or no memory.
 * `tag` is what was announced, or 0. */
PyObject *known_object(known_column *known, uint32_t tag, const char *bytes, Py_ssize_t length);

/* The place of `key`, if it is the value that was read last; SIZE_MAX where it has none. */
static inline size_t place_of_key(const known_column *known, PyObject *key) {
    return known->places != NULL && known->places[known->at].object == key ? known->at : SIZE_MAX;
}

/* Keep the aggregate of a place, to be written back; what may not be kept goes into the table. 0, or -1 with an error. */
int put_aggregate(known_column *known, size_t place, PyObject *value);

/* Keep what the table has. */
void found_aggregate(known_column *known, size_t place, PyObject *value);

/* Put all aggregates into the table that it does not have. 0, or -1 with an error: the rest is still to be put. */
int write_back(known_column *known);

/* Forget everything; what was to be written back is lost. */
void forget_column(known_column *known);

#endif
