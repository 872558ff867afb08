/* Keys of Arrow's columns to small numbers, a batch at a time: equal keys have one number (their slot), and a new key
 * gets the next one. A null equals a null, all not-a-numbers are one key, and -0.0 is 0.0.
 *
 * Open addressing with linear probing; an entry holds half of the hash, so that most other keys are told apart without
 * a look at their bytes. The hashes of a block of rows are made before any of them is looked up: by then what the first
 * look-ups touch is in the processor's cache. They begin with a seed, so that keys cannot be made up to collide. */
#include "column.h"
#include "native.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK 128
#define FIRST_ENTRIES 1024
#define MAX_KEYS (UINT32_C(1) << 30)

typedef struct {
    uint32_t hash;
    uint32_t slot; /* 1 + the slot; 0 when free */
} index_entry;

typedef struct {
    PyObject_HEAD
    uint64_t seed;
    index_entry *entries;
    size_t mask;
    uint32_t count;
    uint32_t null_slot; /* as in an entry; of a single column's null */
    size_t *ends;       /* of the keys' bytes, by slot */
    size_t ends_room;
    uint8_t *bytes;
    size_t bytes_room;
    int busy; /* the GIL is released meanwhile */
} key_index;

/* The keys of a block of rows, as bytes. */
typedef struct {
    const uint8_t *keys[BLOCK]; /* NULL for the null of a single column */
    size_t sizes[BLOCK];
    uint32_t hashes[BLOCK];
    uint8_t own[BLOCK][8]; /* of keys that lie nowhere as they are */
    uint8_t *joined;       /* of keys of several columns */
    size_t joined_room;
} key_block;

typedef enum { DONE, NO_MEMORY, TOO_MANY } outcome;

/* ---------------------------------------------------------------- hashes */

/* The two halves of the product, folded: the mixing step of wyhash (Wang Yi, 2019). */
static inline uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t word_at(const uint8_t *bytes, size_t size) {
    uint64_t word = 0;
    memcpy(&word, bytes, size);
    return word;
}

static inline uint32_t hash_key(const uint8_t *bytes, size_t size, uint64_t seed) {
    uint64_t hash = seed ^ (size * GOLDEN);
    for (; size > 8; bytes += 8, size -= 8) hash = folded(hash ^ word_at(bytes, 8), GOLDEN);
    uint64_t last;
    if (size == 8) {
        last = word_at(bytes, 8);
    } else if (size >= 4) {
        last = word_at(bytes, 4) | word_at(bytes + size - 4, 4) << 32;
    } else {
        last = size == 0 ? 0 : (uint64_t)bytes[0] | (uint64_t)bytes[size / 2] << 8 | (uint64_t)bytes[size - 1] << 16;
    }
    return (uint32_t)mix64(hash ^ last);
}

/* ---------------------------------------------------------------- keys as bytes */

/* The bytes of a value that is not null; of some kinds they are made in `own`. */
static inline __attribute__((always_inline)) const uint8_t *bytes_of(const key_column *column, column_kind kind,
                                                                     int64_t i, uint8_t own[8], size_t *size) {
    const uint8_t *values = column->buffers[1];
    switch (kind) {
    case KIND_BOOL:
        own[0] = (uint8_t)bit_is_set(values, i);
        *size = 1;
        return own;
    case KIND_INT8:
        *size = 1;
        return values + i;
    case KIND_INT16:
        *size = 2;
        return values + 2 * i;
    case KIND_INT32:
        *size = 4;
        return values + 4 * i;
    case KIND_INT64:
        *size = 8;
        return values + 8 * i;
    case KIND_FLOAT: {
        float value;
        memcpy(&value, values + 4 * i, 4);
        uint32_t bits = UINT32_C(0x7FC00000);
        if (value == value) memcpy(&bits, &value, 4);
        if (value == 0.0f) bits = 0;
        memcpy(own, &bits, 4);
        *size = 4;
        return own;
    }
    case KIND_DOUBLE: {
        double value;
        memcpy(&value, values + 8 * i, 8);
        uint64_t bits = UINT64_C(0x7FF8000000000000);
        if (value == value) memcpy(&bits, &value, 8);
        if (value == 0.0) bits = 0;
        memcpy(own, &bits, 8);
        *size = 8;
        return own;
    }
    case KIND_BYTES_32: {
        int32_t start = int32_at(values, i);
        *size = (size_t)(int32_at(values, i + 1) - start);
        /* Where all texts are empty there may be no bytes at all. */
        return *size == 0 ? own : (const uint8_t *)column->buffers[2] + start;
    }
    default: /* decimals */
        *size = 16;
        return values + 16 * i;
    }
}

static int is_known_kind(column_kind kind) {
    switch (kind) {
    case KIND_BOOL:
    case KIND_INT8:
    case KIND_INT16:
    case KIND_INT32:
    case KIND_INT64:
    case KIND_FLOAT:
    case KIND_DOUBLE:
    case KIND_DECIMAL_LONG:
    case KIND_DECIMAL_BYTES:
    case KIND_BYTES_32:
        return 1;
    default:
        return 0;
    }
}

static inline __attribute__((always_inline)) void read_single(const key_column *column, column_kind kind, int64_t first,
                                                              int64_t rows, uint64_t seed, key_block *block) {
    for (int64_t row = 0; row < rows; row++) {
        int64_t i = column->offset + first + row;
        if (column->validity != NULL && !bit_is_set(column->validity, i)) {
            block->keys[row] = NULL;
            block->hashes[row] = 0;
            continue;
        }
        size_t size;
        const uint8_t *bytes = bytes_of(column, kind, i, block->own[row], &size);
        block->keys[row] = bytes;
        block->sizes[row] = size;
        block->hashes[row] = hash_key(bytes, size, seed);
    }
}

static int grow_bytes(uint8_t **bytes, size_t *room, size_t needed) {
    if (needed <= *room) return 1;
    size_t larger = *room < 4096 ? 4096 : *room;
    while (larger < needed) larger *= 2;
    uint8_t *grown = realloc(*bytes, larger);
    if (grown == NULL) return 0;
    *bytes = grown;
    *room = larger;
    return 1;
}

/* Keys of several columns: of each whether it is there, of texts their size, and its bytes. */
static int read_joined(const key_column *columns, int64_t width, int64_t first, int64_t rows, uint64_t seed,
                       key_block *block) {
    size_t used = 0;
    size_t begins[BLOCK];
    for (int64_t row = 0; row < rows; row++) {
        begins[row] = used;
        for (int64_t c = 0; c < width; c++) {
            const key_column *column = &columns[c];
            int64_t i = column->offset + first + row;
            uint8_t own[8];
            size_t size = 0;
            const uint8_t *bytes = NULL;
            if (column->validity == NULL || bit_is_set(column->validity, i)) {
                bytes = bytes_of(column, column->kind, i, own, &size);
            }
            if (!grow_bytes(&block->joined, &block->joined_room, used + 1 + sizeof size + size)) return 0;
            block->joined[used++] = bytes != NULL;
            if (bytes == NULL) continue;
            if (column->kind == KIND_BYTES_32) {
                memcpy(block->joined + used, &size, sizeof size);
                used += sizeof size;
            }
            if (size > 0) memcpy(block->joined + used, bytes, size);
            used += size;
        }
        block->sizes[row] = used - begins[row];
    }
    for (int64_t row = 0; row < rows; row++) {
        block->keys[row] = block->joined + begins[row];
        block->hashes[row] = hash_key(block->keys[row], block->sizes[row], seed);
    }
    return 1;
}

static int read_block(const key_column *columns, int64_t width, int64_t first, int64_t rows, uint64_t seed,
                      key_block *block) {
    if (width != 1) return read_joined(columns, width, first, rows, seed, block);
    switch (columns->kind) {
    case KIND_INT64:
        read_single(columns, KIND_INT64, first, rows, seed, block);
        return 1;
    case KIND_BYTES_32:
        read_single(columns, KIND_BYTES_32, first, rows, seed, block);
        return 1;
    default:
        read_single(columns, columns->kind, first, rows, seed, block);
        return 1;
    }
}

/* ---------------------------------------------------------------- the table */

static int grow_entries(key_index *self) {
    size_t capacity = self->entries == NULL ? FIRST_ENTRIES : 2 * (self->mask + 1);
    index_entry *grown = calloc(capacity, sizeof *grown);
    if (grown == NULL) return 0;
    for (size_t old = 0; self->entries != NULL && old <= self->mask; old++) {
        if (self->entries[old].slot == 0) continue;
        size_t place = self->entries[old].hash & (capacity - 1);
        while (grown[place].slot != 0) place = (place + 1) & (capacity - 1);
        grown[place] = self->entries[old];
    }
    free(self->entries);
    self->entries = grown;
    self->mask = capacity - 1;
    return 1;
}

/* Give the next slot to a key; an entry of it is the caller's to make. */
static outcome add_key(key_index *self, const uint8_t *key, size_t size) {
    if (self->count >= MAX_KEYS) return TOO_MANY;
    if (self->count == self->ends_room) {
        size_t room = self->ends_room == 0 ? FIRST_ENTRIES : 2 * self->ends_room;
        size_t *grown = realloc(self->ends, room * sizeof *grown);
        if (grown == NULL) return NO_MEMORY;
        self->ends = grown;
        self->ends_room = room;
    }
    size_t begin = self->count == 0 ? 0 : self->ends[self->count - 1];
    if (!grow_bytes(&self->bytes, &self->bytes_room, begin + size)) return NO_MEMORY;
    if (size > 0) memcpy(self->bytes + begin, key, size);
    self->ends[self->count++] = begin + size;
    return DONE;
}

static inline int is_key(const key_index *self, uint32_t slot, const uint8_t *key, size_t size) {
    size_t begin = slot == 0 ? 0 : self->ends[slot - 1];
    return self->ends[slot] - begin == size && (size == 0 || memcmp(self->bytes + begin, key, size) == 0);
}

static outcome find_block(key_index *self, const key_block *block, int64_t rows, int32_t *slots) {
    for (int64_t row = 0; row < rows; row++) __builtin_prefetch(&self->entries[block->hashes[row] & self->mask]);
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *key = block->keys[row];
        if (key == NULL) {
            if (self->null_slot == 0) {
                outcome added = add_key(self, NULL, 0);
                if (added != DONE) return added;
                self->null_slot = self->count;
            }
            slots[row] = (int32_t)(self->null_slot - 1);
            continue;
        }
        uint32_t hash = block->hashes[row];
        size_t size = block->sizes[row], place = hash & self->mask;
        for (;; place = (place + 1) & self->mask) {
            const index_entry *entry = &self->entries[place];
            if (entry->slot == 0) break;
            if (entry->hash == hash && is_key(self, entry->slot - 1, key, size)) break;
        }
        if (self->entries[place].slot != 0) {
            slots[row] = (int32_t)(self->entries[place].slot - 1);
            continue;
        }
        outcome added = add_key(self, key, size);
        if (added != DONE) return added;
        self->entries[place] = (index_entry){hash, self->count};
        slots[row] = (int32_t)(self->count - 1);
        if (2 * (size_t)self->count > self->mask && !grow_entries(self)) return NO_MEMORY;
    }
    return DONE;
}

static outcome find_all(key_index *self, const key_column *columns, int64_t width, int64_t rows, int32_t *slots,
                        key_block *block) {
    outcome found = DONE;
    for (int64_t first = 0; first < rows && found == DONE; first += BLOCK) {
        int64_t some = rows - first < BLOCK ? rows - first : BLOCK;
        if (!read_block(columns, width, first, some, self->seed, block)) return NO_MEMORY;
        found = find_block(self, block, some, slots + first);
    }
    return found;
}

/* ---------------------------------------------------------------- methods */

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    if (options != NULL && PyDict_GET_SIZE(options) > 0) {
        PyErr_SetString(PyExc_TypeError, "KeyIndex takes no named arguments");
        return NULL;
    }
    PyObject *seed_object;
    uint64_t seed;
    if (!PyArg_ParseTuple(args, "O:KeyIndex", &seed_object) || read_u64(seed_object, "seed", &seed) != 0) return NULL;
    key_index *self = (key_index *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->seed = seed;
    if (!grow_entries(self)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

/* Whether the columns are of kinds whose values are known here; 0, or -1 with a TypeError. */
static int check_kinds(const key_column *keys) {
    if (keys->kind != KIND_STRUCT || keys->n_children == 0) {
        PyErr_SetString(PyExc_TypeError, "keys are a record batch of one column or more");
        return -1;
    }
    for (int64_t c = 0; c < keys->n_children; c++) {
        if (!is_known_kind(keys->children[c].kind)) {
            PyErr_Format(PyExc_TypeError, "key column %lld is of a type that is not known here", (long long)c);
            return -1;
        }
    }
    return 0;
}

static PyObject *find_slots(key_index *self, const key_column *keys, const array_view *slots) {
    key_block *block = calloc(1, sizeof *block);
    if (block == NULL) return PyErr_NoMemory();
    for (int64_t c = 0; c < keys->n_children; c++) keys->children[c].offset += keys->offset;
    outcome found;
    self->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    found = find_all(self, keys->children, keys->n_children, slots->length, slots->data, block);
    Py_END_ALLOW_THREADS
    self->busy = 0;
    free(block->joined);
    free(block);
    if (found == NO_MEMORY) return PyErr_NoMemory();
    if (found == TOO_MANY) {
        PyErr_SetString(PyExc_OverflowError, "an index holds at most 2**30 keys");
        return NULL;
    }
    return PyLong_FromUnsignedLong(self->count);
}

/* find(schema, array, slots): writes the slot of each row's key, and returns how many keys there are. */
static PyObject *index_find(key_index *self, PyObject *args) {
    PyObject *schema_capsule, *array_capsule, *slots_object;
    if (!PyArg_ParseTuple(args, "OOO:find", &schema_capsule, &array_capsule, &slots_object)) return NULL;
    const struct ArrowSchema *schema = PyCapsule_GetPointer(schema_capsule, "arrow_schema");
    if (schema == NULL) return NULL;
    const struct ArrowArray *array = PyCapsule_GetPointer(array_capsule, "arrow_array");
    if (array == NULL) return NULL;
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread uses the index");
        return NULL;
    }
    array_view slots;
    if (view_array(slots_object, "slots", ITEM_I32, 1, &slots) != 0) return NULL;
    key_column keys;
    PyObject *result = NULL;
    if (check_length(&slots, "slots", (Py_ssize_t)array->length) == 0 && open_column(schema, array, &keys) == 0) {
        if (check_kinds(&keys) == 0) result = find_slots(self, &keys, &slots);
        release_column(&keys);
    }
    release_array(&slots);
    return result;
}

static PyObject *index_bytes(key_index *self, void *unused) {
    (void)unused;
    size_t entries = (self->mask + 1) * sizeof *self->entries;
    return PyLong_FromSize_t(entries + self->ends_room * sizeof *self->ends + self->bytes_room);
}

static Py_ssize_t index_length(key_index *self) { return (Py_ssize_t)self->count; }

static void index_dealloc(key_index *self) {
    free(self->entries);
    free(self->ends);
    free(self->bytes);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef index_methods[] = {
    {"find", (PyCFunction)index_find, METH_VARARGS,
     "find(schema, array, slots) writes the slot of each row's key, and returns how many keys there are."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef index_attributes[] = {
    {"nbytes", (getter)index_bytes, NULL, "bytes of memory", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods index_as_sequence = {.sq_length = (lenfunc)index_length};

static PyTypeObject index_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ftlayer._native.KeyIndex",
    .tp_doc = "Numbers of keys: KeyIndex(seed).",
    .tp_basicsize = sizeof(key_index),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = index_new,
    .tp_dealloc = (destructor)index_dealloc,
    .tp_methods = index_methods,
    .tp_getset = index_attributes,
    .tp_as_sequence = &index_as_sequence,
};

int add_key_index(PyObject *module) { return PyModule_AddType(module, &index_type); }
