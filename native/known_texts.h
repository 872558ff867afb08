/* Texts of a column that were read lately, found by their bytes: a text that comes again is the same Python object.
 *
 * Columns that are keyed by, and most others, say the same again and again. To find a text costs less than to make one;
 * and it has its hash, and is found in a dict of state without a look at its characters. What is kept is bounded. A
 * column whose texts are nearly all new is found out, and left alone for a while. The GIL is held throughout. */
#ifndef FTLAYER_KNOWN_TEXTS_H
#define FTLAYER_KNOWN_TEXTS_H

#include "native.h"

/* Texts are looked for so many at a time, so that memory is asked for all of them at once. */
#define AHEAD 16

typedef struct {
    uint32_t tag;    /* of the text's bytes; 0: the place is free */
    uint32_t length; /* bytes */
    PyObject *text;  /* str, or bytes */
} known_text;

typedef struct {
    known_text *places; /* NULL: none yet */
    size_t sets;        /* of places, a power of two */
    uint32_t asked, missed, replaced; /* since it was looked at last */
    uint32_t rest;                    /* texts that are read without asking */
    int are_texts;                    /* str; else bytes */
} known_texts;

/* Tag of these bytes, for `known_text_of`; what is to be read for it is fetched meanwhile. */
uint32_t announced_text(known_texts *known, const char *bytes, Py_ssize_t length);

/* The texts of these tags come next. */
void announced_texts(known_texts *known, const uint32_t *tags, int count);

/* Return the str or bytes object of these bytes; NULL with an error: they are no UTF-8, or no memory. */
PyObject *known_text_of(known_texts *known, uint32_t tag, const char *bytes, Py_ssize_t length);

void forget_texts(known_texts *known);

#endif
