#include "known.h"

#include "undo.h"

#include <string.h>

/* Places that a value may lie in, one behind the other: a cache line. */
#define WAYS 4
#define FIRST_SETS 256
#define MOST_SETS 16384

/* Longer texts are not kept, neither as values nor within aggregates, nor are tuples of more items. */
#define LONGEST 64
#define MOST_ITEMS 8

/* The column is looked at after so many questions, and left alone for so many times as many values. */
#define LOOK 8192
#define REST 64

/* ---------------------------------------------------------------- tags */

static inline uint64_t mixed(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * GOLDEN;
    return hash ^ (hash >> 32);
}

static inline uint64_t word_at(const char *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static inline uint64_t half_at(const char *bytes) {
    uint32_t half;
    memcpy(&half, bytes, sizeof half);
    return half;
}

/* 32 bits, not 0. Values made with one tag on purpose are unknown to each other, and no more. */
static inline uint32_t tag_of(const char *bytes, Py_ssize_t length) {
    uint64_t hash = (uint64_t)length * GOLDEN;
    if (length >= 8) {
        for (Py_ssize_t at = 0; at < length - 8; at += 8) hash = mixed(hash, word_at(bytes + at));
        hash = mixed(hash, word_at(bytes + length - 8));
    } else if (length >= 4) {
        hash = mixed(hash, half_at(bytes) << 32 | half_at(bytes + length - 4));
    } else if (length > 0) {
        const uint8_t *few = (const uint8_t *)bytes;
        hash = mixed(hash, (uint64_t)few[0] << 16 | (uint64_t)few[length / 2] << 8 | few[length - 1]);
    }
    uint32_t tag = (uint32_t)mix64(hash);
    return tag == 0 ? 1 : tag;
}

static inline size_t set_of(const known_column *known, uint32_t tag) { return (tag & (known->sets - 1)) * WAYS; }

uint32_t announced(known_column *known, const char *bytes, Py_ssize_t length) {
    if (length > LONGEST || known->places == NULL) return 0;
    uint32_t tag = tag_of(bytes, length);
    __builtin_prefetch(&known->places[set_of(known, tag)]);
    return tag;
}

void fetch_announced(known_column *known, const uint32_t *tags, int count) {
    size_t found[AHEAD];
    int n_found = 0;
    for (int i = 0; i < count; i++) {
        if (tags[i] == 0) continue;
        size_t place = set_of(known, tags[i]);
        for (size_t end = place + WAYS; place < end; place++) {
            if (known->places[place].tag != tags[i]) continue;
            __builtin_prefetch(known->places[place].object);
            __builtin_prefetch((const char *)known->places[place].object + 64);
            if (known->aggregates != NULL) __builtin_prefetch(&known->aggregates[place]);
            found[n_found++] = place;
            break;
        }
    }
    if (known->aggregates == NULL) return;
    for (int i = 0; i < n_found; i++) {
        const char *aggregate = (const char *)known->aggregates[found[i]];
        if (aggregate == NULL) continue;
        __builtin_prefetch(aggregate - 16); /* what the garbage collector has before it */
        __builtin_prefetch(aggregate + 40);
    }
}

/* ---------------------------------------------------------------- objects */

static int is_integer(const known_column *known) { return strchr("csil", known->type) != NULL; }

static PyObject *made(const known_column *known, const char *bytes, Py_ssize_t length) {
    if (is_integer(known)) return PyLong_FromLongLong((int64_t)word_at(bytes));
    if (known->type == 'z' || known->type == 'Z') return PyBytes_FromStringAndSize(bytes, length);
    return PyUnicode_DecodeUTF8(bytes, length, NULL);
}

static int is_same(const known_place *place, const char *bytes) {
    PyObject *object = place->object;
    const char *its;
    if (PyLong_CheckExact(object)) return PyLong_AsLongLong(object) == (int64_t)word_at(bytes);
    if (PyBytes_CheckExact(object)) {
        its = PyBytes_AS_STRING(object);
    } else if (PyUnicode_IS_COMPACT_ASCII(object)) {
        its = (const char *)PyUnicode_DATA(object);
    } else {
        its = PyUnicode_AsUTF8(object); /* it was asked for when the text was kept, and lies there */
    }
    return memcmp(its, bytes, place->length) == 0;
}

/* ---------------------------------------------------------------- aggregates */

static int is_small(PyObject *atom) {
    if (PyUnicode_CheckExact(atom)) return PyUnicode_GET_LENGTH(atom) <= LONGEST;
    if (PyBytes_CheckExact(atom)) return PyBytes_GET_SIZE(atom) <= LONGEST;
    return is_atom(atom);
}

static int may_keep(PyObject *value) {
    if (!PyTuple_CheckExact(value)) return is_small(value);
    Py_ssize_t items = PyTuple_GET_SIZE(value);
    if (items > MOST_ITEMS) return 0;
    for (Py_ssize_t i = 0; i < items; i++) {
        if (!is_small(PyTuple_GET_ITEM(value, i))) return 0;
    }
    return 1;
}

void found_aggregate(known_column *known, size_t place, PyObject *value) {
    if (may_keep(value)) Py_XSETREF(known->aggregates[place], Py_NewRef(value));
}

int put_aggregate(known_column *known, size_t place, PyObject *value) {
    if (!may_keep(value)) {
        known->n_changed -= known->changed[place];
        known->changed[place] = 0;
        Py_CLEAR(known->aggregates[place]);
        return PyDict_SetItem(known->table, known->places[place].object, value);
    }
    known->n_changed += !known->changed[place];
    known->changed[place] = 1;
    Py_XSETREF(known->aggregates[place], Py_NewRef(value));
    return 0;
}

static int write_back_place(known_column *known, size_t place) {
    if (!known->changed[place]) return 0;
    if (PyDict_SetItem(known->table, known->places[place].object, known->aggregates[place]) != 0) return -1;
    known->changed[place] = 0;
    known->n_changed--;
    return 0;
}

int write_back(known_column *known) {
    for (size_t place = 0; known->n_changed > 0 && place < known->sets * WAYS; place++) {
        if (write_back_place(known, place) != 0) return -1;
    }
    return 0;
}

/* ---------------------------------------------------------------- places */

void forget_column(known_column *known) {
    for (size_t i = 0; known->places != NULL && i < known->sets * WAYS; i++) {
        Py_XDECREF(known->places[i].object);
        if (known->aggregates != NULL) Py_XDECREF(known->aggregates[i]);
    }
    PyMem_Free(known->places);
    PyMem_Free(known->aggregates);
    PyMem_Free(known->changed);
    known->places = NULL;
    known->aggregates = NULL;
    known->changed = NULL;
    known->sets = known->at = known->n_changed = 0;
}

/* Make room for more; without memory for that it stays as it is. */
static void widen(known_column *known) {
    size_t sets = known->places == NULL ? FIRST_SETS : 4 * known->sets;
    known_place *places = PyMem_Calloc(sets * WAYS, sizeof *places);
    PyObject **aggregates = known->table == NULL ? NULL : PyMem_Calloc(sets * WAYS, sizeof *aggregates);
    uint8_t *changed = known->table == NULL ? NULL : PyMem_Calloc(sets * WAYS, sizeof *changed);
    if (places == NULL || (known->table != NULL && (aggregates == NULL || changed == NULL))) {
        PyMem_Free(places);
        PyMem_Free(aggregates);
        PyMem_Free(changed);
        return;
    }
    for (size_t i = 0; known->places != NULL && i < known->sets * WAYS; i++) {
        const known_place *old = &known->places[i];
        if (old->tag == 0) continue;
        size_t place = (old->tag & (sets - 1)) * WAYS;
        while (places[place].tag != 0) place++; /* four sets have come of one, so there is a free place in each */
        places[place] = *old;
        if (known->table == NULL) continue;
        aggregates[place] = known->aggregates[i];
        changed[place] = known->changed[i];
    }
    PyMem_Free(known->places);
    PyMem_Free(known->aggregates);
    PyMem_Free(known->changed);
    known->places = places;
    known->aggregates = aggregates;
    known->changed = changed;
    known->sets = sets;
    known->at = 0;
}

static int look(known_column *known) {
    if (known->replaced > known->asked / 16 && known->sets < MOST_SETS) {
        widen(known);
    } else if (known->missed > known->asked / 2 && (known->sets == MOST_SETS || known->missed == known->asked)) {
        if (write_back(known) != 0) return -1;
        forget_column(known);
        known->rest = REST * LOOK;
    }
    known->asked = known->missed = known->replaced = 0;
    return 0;
}

/* Put an object into the first place of its set. Steals it; 0, or -1 with an error. */
static int keep(known_column *known, size_t first, known_place new) {
    size_t last = first + WAYS - 1;
    known->missed++;
    int is_other = PyUnicode_Check(new.object) && !PyUnicode_IS_COMPACT_ASCII(new.object);
    if ((is_other && PyUnicode_AsUTF8(new.object) == NULL) ||
        (known->table != NULL && write_back_place(known, last) != 0)) {
        Py_DECREF(new.object);
        return -1;
    }
    PyObject *replaced = known->places[last].object;
    if (replaced != NULL) known->replaced++;
    memmove(&known->places[first + 1], &known->places[first], (WAYS - 1) * sizeof new);
    known->places[first] = new;
    known->at = first;
    if (known->table != NULL) {
        Py_XDECREF(known->aggregates[last]); /* plain: none of the user's code runs */
        memmove(&known->aggregates[first + 1], &known->aggregates[first], (WAYS - 1) * sizeof *known->aggregates);
        memmove(&known->changed[first + 1], &known->changed[first], WAYS - 1);
        known->aggregates[first] = NULL;
        known->changed[first] = 0;
    }
    Py_XDECREF(replaced);
    return 0;
}

PyObject *known_object(known_column *known, uint32_t tag, const char *bytes, Py_ssize_t length) {
    if (length > LONGEST) return made(known, bytes, length);
    if (known->rest == 0 && known->asked++ == LOOK && look(known) != 0) return NULL;
    if (known->rest > 0) { /* there are no places then, so that nothing is known that changes meanwhile */
        known->rest--;
        return made(known, bytes, length);
    }
    if (known->places == NULL) widen(known);
    if (known->places == NULL) return made(known, bytes, length);
    if (tag == 0) tag = tag_of(bytes, length);
    size_t first = set_of(known, tag);
    for (size_t place = first; place < first + WAYS && known->places[place].tag != 0; place++) {
        const known_place *found = &known->places[place];
        if (found->tag == tag && found->length == (uint32_t)length && is_same(found, bytes)) {
            known->at = place;
            return Py_NewRef(found->object);
        }
    }
    PyObject *object = made(known, bytes, length);
    if (object == NULL) return NULL;
    known_place new = {.tag = tag, .length = (uint32_t)length, .object = Py_NewRef(object)};
    if (keep(known, first, new) == 0) return object;
    Py_DECREF(object);
    return NULL;
}
