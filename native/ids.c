/* Derivation of record ids. The Python side (ftlayer/records/ids.py) documents what is derived from what. */
#include "native.h"

/* Keep the ids of children, of joins and of replays apart when all their inputs are equal. */
#define DOMAIN_CHILD UINT64_C(0x6368696C64)
#define DOMAIN_JOIN UINT64_C(0x6A6F696E)

/* For a fixed `state` a bijection of `value`, and the other way round. */
static inline uint64_t absorb(uint64_t state, uint64_t value) { return mix64(state + value * GOLDEN); }

/* One input in 2**64 lands on 0, which is never an id. */
static inline uint64_t never_zero(uint64_t id) { return id != 0 ? id : GOLDEN; }

/* A channel for each row, or one for all of them. */
typedef struct {
    array_view array;
    uint64_t constant;
} channels_arg;

static int read_channels(PyObject *object, Py_ssize_t length, channels_arg *channels) {
    channels->array.buffer.obj = NULL;
    channels->array.data = NULL;
    if (PyIndex_Check(object) && !PyObject_CheckBuffer(object)) {
        return read_u64(object, "channel", &channels->constant);
    }
    if (view_array(object, "channel", ITEM_U64, 0, &channels->array) != 0) return -1;
    return check_length(&channels->array, "channel", length);
}

PyObject *native_mix64(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *values_object, *out_object;
    if (!PyArg_ParseTuple(args, "OO:mix64", &values_object, &out_object)) return NULL;
    array_view values, out;
    if (view_array(values_object, "values", ITEM_U64, 0, &values) != 0) return NULL;
    if (view_array(out_object, "out", ITEM_U64, 1, &out) != 0) {
        release_array(&values);
        return NULL;
    }
    PyObject *result = NULL;
    if (check_length(&out, "out", values.length) == 0) {
        const uint64_t *value = values.data;
        uint64_t *mixed = out.data;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < values.length; i++) mixed[i] = mix64(value[i]);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release_array(&values);
    release_array(&out);
    return result;
}

static void derive_children(const uint64_t *parents, const uint64_t *ordinals, const channels_arg *channels,
                            uint64_t site, uint64_t *out, Py_ssize_t n) {
    if (channels->array.data == NULL) {
        uint64_t place = absorb(site, channels->constant);
        for (Py_ssize_t i = 0; i < n; i++) out[i] = never_zero(mix64(parents[i] ^ absorb(place, ordinals[i])));
        return;
    }
    const uint64_t *channel = channels->array.data;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t place = absorb(site, channel[i]);
        out[i] = never_zero(mix64(parents[i] ^ absorb(place, ordinals[i])));
    }
}

PyObject *native_child_ids(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *parents_object, *operator_object, *edge_object, *ordinals_object, *channel_object, *out_object;
    if (!PyArg_ParseTuple(args, "OOOOOO:child_ids", &parents_object, &operator_object, &edge_object, &ordinals_object,
                          &channel_object, &out_object)) {
        return NULL;
    }
    uint64_t operator_key, edge;
    if (read_u64(operator_object, "operator", &operator_key) != 0 || read_u64(edge_object, "edge", &edge) != 0) {
        return NULL;
    }
    array_view parents = {0}, ordinals = {0}, out = {0};
    channels_arg channels = {0};
    PyObject *result = NULL;
    if (view_array(parents_object, "parent_ids", ITEM_U64, 0, &parents) == 0 &&
        view_array(ordinals_object, "ordinals", ITEM_U64, 0, &ordinals) == 0 &&
        view_array(out_object, "out", ITEM_U64, 1, &out) == 0 &&
        check_length(&ordinals, "ordinals", parents.length) == 0 && check_length(&out, "out", parents.length) == 0 &&
        read_channels(channel_object, parents.length, &channels) == 0) {
        Py_BEGIN_ALLOW_THREADS
        uint64_t site = absorb(absorb(DOMAIN_CHILD, operator_key), edge);
        derive_children(parents.data, ordinals.data, &channels, site, out.data, parents.length);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release_array(&parents);
    release_array(&ordinals);
    release_array(&out);
    release_array(&channels.array);
    return result;
}

static void derive_joined(const uint64_t *left, const uint64_t *right, const uint64_t *ordinals,
                          const channels_arg *channels, uint64_t site, uint64_t *out, Py_ssize_t n) {
    const uint64_t *channel = channels->array.data;
    uint64_t place = absorb(site, channels->constant);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (channel != NULL) place = absorb(site, channel[i]);
        uint64_t first = mix64(left[i] ^ absorb(place, ordinals[i]));
        out[i] = never_zero(absorb(first, right[i]));
    }
}

PyObject *native_join_ids(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *left_object, *right_object, *side_object, *operator_object, *edge_object, *ordinals_object;
    PyObject *channel_object, *out_object;
    if (!PyArg_ParseTuple(args, "OOOOOOOO:join_ids", &left_object, &right_object, &side_object, &operator_object,
                          &edge_object, &ordinals_object, &channel_object, &out_object)) {
        return NULL;
    }
    uint64_t side, operator_key, edge;
    if (read_u64(side_object, "side", &side) != 0 || read_u64(operator_object, "operator", &operator_key) != 0 ||
        read_u64(edge_object, "edge", &edge) != 0) {
        return NULL;
    }
    array_view left = {0}, right = {0}, ordinals = {0}, out = {0};
    channels_arg channels = {0};
    PyObject *result = NULL;
    if (view_array(left_object, "left", ITEM_U64, 0, &left) == 0 &&
        view_array(right_object, "right", ITEM_U64, 0, &right) == 0 &&
        view_array(ordinals_object, "ordinals", ITEM_U64, 0, &ordinals) == 0 &&
        view_array(out_object, "out", ITEM_U64, 1, &out) == 0 && check_length(&right, "right", left.length) == 0 &&
        check_length(&ordinals, "ordinals", left.length) == 0 && check_length(&out, "out", left.length) == 0 &&
        read_channels(channel_object, left.length, &channels) == 0) {
        Py_BEGIN_ALLOW_THREADS
        uint64_t site = absorb(absorb(absorb(DOMAIN_JOIN, operator_key), edge), side);
        derive_joined(left.data, right.data, ordinals.data, &channels, site, out.data, left.length);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release_array(&left);
    release_array(&right);
    release_array(&ordinals);
    release_array(&out);
    release_array(&channels.array);
    return result;
}

/* One round of mix64's shape on the low `width` bits alone: odd multiplications and right shifts are
 * bijections of any width. */
static inline uint64_t mix_width(uint64_t x, unsigned width, uint64_t mask) {
    x = ((x ^ (x >> (width / 2 - 2))) * UINT64_C(0xBF58476D1CE4E5B9)) & mask;
    x = ((x ^ (x >> (width / 2 - 5))) * UINT64_C(0x94D049BB133111EB)) & mask;
    return x ^ (x >> (width / 2 - 1));
}

/* A keyed bijection of 0..2**width-1. Two keys, so that two seeds cannot produce shifted copies of one sequence. */
static inline uint64_t permute(uint64_t x, uint64_t key0, uint64_t key1, unsigned width, uint64_t mask) {
    return mix_width(mix_width((x + key0) & mask, width, mask) ^ (key1 & mask), width, mask);
}

/* A keyed bijection of 1..2**width-1: where the permutation hits 0, its next step is taken (cycle walking). */
static inline uint64_t permute_nonzero(uint64_t x, uint64_t key0, uint64_t key1, unsigned width, uint64_t mask) {
    uint64_t y = permute(x, key0, key1, width, mask);
    return y != 0 ? y : permute(0, key0, key1, width, mask);
}

#define MAX_SHARD_BITS 16

static int check_shard_bits(int shard_bits) {
    if (shard_bits >= 0 && shard_bits <= MAX_SHARD_BITS) return 0;
    PyErr_Format(PyExc_ValueError, "shard_bits must lie in 0..%d, not %d", MAX_SHARD_BITS, shard_bits);
    return -1;
}

PyObject *native_root_ids(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *key0_object, *key1_object, *first_object, *out_object;
    unsigned long long shard;
    int shard_bits;
    if (!PyArg_ParseTuple(args, "OOOKiO:root_ids", &key0_object, &key1_object, &first_object, &shard, &shard_bits,
                          &out_object)) {
        return NULL;
    }
    uint64_t key0, key1, first;
    if (read_u64(key0_object, "key0", &key0) != 0 || read_u64(key1_object, "key1", &key1) != 0 ||
        read_u64(first_object, "first_ordinal", &first) != 0 || check_shard_bits(shard_bits) != 0) {
        return NULL;
    }
    if (shard >> shard_bits != 0) {
        PyErr_Format(PyExc_ValueError, "shard %llu does not fit %d bits", shard, shard_bits);
        return NULL;
    }
    array_view out;
    if (view_array(out_object, "out", ITEM_U64, 1, &out) != 0) return NULL;
    unsigned width = 64 - (unsigned)shard_bits;
    uint64_t mask = UINT64_MAX >> shard_bits;
    if (first >= mask || (uint64_t)out.length > mask - 1 - first) {
        release_array(&out);
        PyErr_SetString(PyExc_OverflowError, "first_ordinal is too large for the width of a root id");
        return NULL;
    }
    uint64_t *ids = out.data;
    Py_BEGIN_ALLOW_THREADS
    uint64_t top = shard_bits == 0 ? 0 : (uint64_t)shard << width;
    for (Py_ssize_t i = 0; i < out.length; i++) {
        ids[i] = top | permute_nonzero(first + (uint64_t)i + 1, key0, key1, width, mask);
    }
    Py_END_ALLOW_THREADS
    release_array(&out);
    Py_RETURN_NONE;
}
