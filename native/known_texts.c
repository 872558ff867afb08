#include "known_texts.h"

#include <string.h>

/* Places that a text may lie in, one behind the other: a cache line. */
#define WAYS 4
#define FIRST_SETS 256
#define MOST_SETS 16384

/* Longer texts are copied faster than they are compared with others, as far as it matters. */
#define LONGEST 64

/* The column is looked at after so many questions, and left alone for so many times as many texts. */
#define LOOK 8192
#define REST 64

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

/* 32 bits, not 0. Whoever makes texts with one tag on purpose makes them unknown to each other, and no more. */
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

static PyObject *made(const known_texts *known, const char *bytes, Py_ssize_t length) {
    return known->are_texts ? PyUnicode_DecodeUTF8(bytes, length, NULL) : PyBytes_FromStringAndSize(bytes, length);
}

static int is_same(const known_text *place, const char *bytes) {
    PyObject *text = place->text;
    const char *known;
    if (PyBytes_CheckExact(text)) {
        known = PyBytes_AS_STRING(text);
    } else if (PyUnicode_IS_COMPACT_ASCII(text)) {
        known = (const char *)PyUnicode_DATA(text);
    } else {
        known = PyUnicode_AsUTF8(text); /* it was asked for when the text was kept, and lies there */
    }
    return memcmp(known, bytes, place->length) == 0;
}

void forget_texts(known_texts *known) {
    for (size_t i = 0; known->places != NULL && i < known->sets * WAYS; i++) Py_XDECREF(known->places[i].text);
    PyMem_Free(known->places);
    known->places = NULL;
    known->sets = 0;
}

/* Make room for more; without memory for that it stays as it is. */
static void widen(known_texts *known) {
    size_t sets = known->places == NULL ? FIRST_SETS : 4 * known->sets;
    known_text *places = PyMem_Calloc(sets * WAYS, sizeof *places);
    if (places == NULL) return;
    for (size_t i = 0; known->places != NULL && i < known->sets * WAYS; i++) {
        known_text *old = &known->places[i];
        if (old->tag == 0) continue;
        known_text *set = &places[(old->tag & (sets - 1)) * WAYS];
        while (set->tag != 0) set++; /* four sets have come of one, so there is a free place in each */
        *set = *old;
    }
    PyMem_Free(known->places);
    known->places = places;
    known->sets = sets;
}

static void look(known_texts *known) {
    if (known->replaced > known->asked / 16 && known->sets < MOST_SETS) {
        widen(known);
    } else if (known->missed > known->asked / 2 && (known->sets == MOST_SETS || known->missed == known->asked)) {
        forget_texts(known);
        known->rest = REST * LOOK;
    }
    known->asked = known->missed = known->replaced = 0;
}

static PyObject *keep(known_texts *known, known_text *set, uint32_t tag, PyObject *text, Py_ssize_t length) {
    known->missed++;
    if (PyUnicode_Check(text) && !PyUnicode_IS_COMPACT_ASCII(text) && PyUnicode_AsUTF8(text) == NULL) {
        Py_DECREF(text);
        return NULL;
    }
    if (set[WAYS - 1].tag != 0) {
        known->replaced++;
        Py_DECREF(set[WAYS - 1].text);
    }
    memmove(set + 1, set, (WAYS - 1) * sizeof *set);
    *set = (known_text){.tag = tag, .length = (uint32_t)length, .text = Py_NewRef(text)};
    return text;
}

uint32_t announced_text(known_texts *known, const char *bytes, Py_ssize_t length) {
    if (length > LONGEST || known->places == NULL) return 0;
    uint32_t tag = tag_of(bytes, length);
    __builtin_prefetch(&known->places[(tag & (known->sets - 1)) * WAYS]);
    return tag;
}

void announced_texts(known_texts *known, const uint32_t *tags, int count) {
    for (int i = 0; i < count; i++) {
        if (tags[i] == 0) continue;
        const known_text *set = &known->places[(tags[i] & (known->sets - 1)) * WAYS];
        for (int way = 0; way < WAYS; way++) {
            if (set[way].tag != tags[i]) continue;
            __builtin_prefetch(set[way].text);
            __builtin_prefetch((const char *)set[way].text + 64);
            break;
        }
    }
}

PyObject *known_text_of(known_texts *known, uint32_t tag, const char *bytes, Py_ssize_t length) {
    if (length > LONGEST) return made(known, bytes, length);
    if (known->rest > 0) {
        known->rest--;
        return made(known, bytes, length);
    }
    if (known->asked++ == LOOK) look(known);
    if (known->places == NULL) widen(known);
    if (known->places == NULL) return made(known, bytes, length);
    if (tag == 0) tag = tag_of(bytes, length);
    known_text *set = &known->places[(tag & (known->sets - 1)) * WAYS];
    for (int way = 0; way < WAYS && set[way].tag != 0; way++) {
        if (set[way].tag == tag && set[way].length == (uint32_t)length && is_same(&set[way], bytes)) {
            return Py_NewRef(set[way].text);
        }
    }
    PyObject *text = made(known, bytes, length);
    return text == NULL ? NULL : keep(known, set, tag, text, length);
}
