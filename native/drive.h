/* The loop of a chain's functions over a batch: records from Arrow, results to Arrow, nothing in between.
 *
 * It does what the loop does that ftlayer.functions.chains.fused writes out in Python, which is the reference, and
 * serves what this cannot do: records and results that are not plain, and functions with a context.
 *
 * All of it holds the GIL. Another thread may read `done`. */
#ifndef FTLAYER_DRIVE_H
#define FTLAYER_DRIVE_H

#include "dict_records.h"
#include "plain_read.h"
#include "plain_write.h"

typedef enum { MAP, FILTER, FLAT_MAP, REDUCE } step_kind;

/* Where a part of a key lies in a record. */
typedef struct {
    Py_ssize_t position; /* -1: it is the record */
    int is_float;
} key_place;

typedef struct {
    step_kind kind;
    PyObject *function;
    PyObject *results;    /* flat_map: makes what is no list one to iterate over; filter: looks at what is not True */
    Py_ssize_t parts;     /* reduce, here and below: of the key */
    key_place *places;    /* of these parts */
    PyObject *table;      /* a dict, or of a class that looks up and sets items as a dict */
    PyObject *lookup;     /* instead of table[key], or NULL */
    PyObject *create;     /* makes the first aggregate, or NULL: it is the record */
    int keeps;            /* whether aggregates may lie beside their keys, and be written back to the table later */
    known_column *known;  /* of the key, with aggregates; NULL: all of them lie in the table */
    PyObject *own;        /* makes what may be changed in place the table's alone; or NULL */
    PyObject *unhashable; /* called with the key that the table cannot hold; raises */
} step;

typedef struct {
    PyObject_HEAD
    Py_ssize_t n_steps;
    step *steps;
    PyObject *types, *nullable; /* bytes: of the columns of results */
    PyObject *names;            /* where records are dicts, those of the columns of results, a tuple; else NULL */
    PyObject *passes;           /* a tuple of exceptions that fail no record, and go up */
    PyObject *entries;          /* of the undo log, a list; or NULL */
    PyObject *nan;
    int lax;                    /* whether dicts may have keys beside `names` */
    Py_ssize_t done;            /* of the batch that is run; other threads look at it */
    known_column *known;        /* of the columns of batches */
    int64_t n_known;
    Py_ssize_t keeping;         /* the step whose aggregates lie beside their keys; -1: there is none */
    /* Of the batch that is run. */
    int is_running;
    Py_ssize_t at;              /* the step that works, or has raised */
    column_maker *makers;
    Py_ssize_t width, rows, capacity;
    PyObject *list;             /* results as they are, once one of them is not plain; else NULL */
    int is_broken;              /* there was no memory for a result */
} driver;

/* drive_results.c: the results of a batch. */

/* Make room for results of about so many rows; 0, or -1 with an error. `close_results` in either case. */
int open_results(driver *self, Py_ssize_t rows);
void close_results(driver *self);

/* Add a result; 0, or -1 with an error. */
int put_result(driver *self, PyObject *result);

/* Take back the results behind the first `rows`: a record has failed. 0, or -1 with an error. */
int take_back(driver *self, Py_ssize_t rows);

/* The columns, or the list where one result was not plain; NULL with an error. */
PyObject *finished_results(driver *self);

/* drive_record.c: one record on its way. */

/* Have a record go through the functions from the one at `at` on. 0, or -1 with an error; self->at says whose. */
int run_from(driver *self, Py_ssize_t at, PyObject *record);

#endif
