/* Spark's hash() of Arrow columns, folded into one running hash a row. */
#include "column.h"
#include "murmur3.h"
#include "native.h"

/* -0.0 and 0.0 are one key, and so are all NaNs. */
static inline int32_t float_bits(float value) {
    if (value == 0.0f) return 0;
    if (value != value) return INT32_C(0x7FC00000);
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline int64_t double_bits(double value) {
    if (value == 0.0) return 0;
    if (value != value) return INT64_C(0x7FF8000000000000);
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The unscaled value as the shortest big-endian two's complement, as Java's BigInteger gives it. */
static uint32_t hash_wide_decimal(uint32_t seed, const uint8_t *little_endian) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = little_endian[15 - i];
    int skip = 0;
    while (skip < 15 && bytes[skip] == (uint8_t)(bytes[skip + 1] & 0x80 ? 0xFF : 0x00)) skip++;
    return murmur_bytes(seed, bytes + skip, 16 - skip);
}

/* A view holds up to 12 bytes itself; of a longer one it names the buffer and the place in it. */
static uint32_t hash_view(uint32_t seed, const key_column *column, int64_t i) {
    const uint8_t *view = (const uint8_t *)column->buffers[1] + 16 * i;
    int32_t length, buffer, start;
    memcpy(&length, view, 4);
    if (length <= 12) return murmur_bytes(seed, view + 4, length);
    memcpy(&buffer, view + 8, 4);
    memcpy(&start, view + 12, 4);
    return murmur_bytes(seed, (const uint8_t *)column->buffers[2 + buffer] + start, length);
}

static int64_t dictionary_index(const key_column *column, int64_t i) {
    switch (column->index_kind) {
    case KIND_INT8:
        return ((const uint8_t *)column->buffers[1])[i];
    case KIND_INT16:
        return (uint16_t)int16_at(column->buffers[1], i);
    case KIND_INT32:
        return (uint32_t)int32_at(column->buffers[1], i);
    default:
        return int64_at(column->buffers[1], i);
    }
}

static uint32_t hash_row(uint32_t seed, const key_column *column, int64_t row);

static uint32_t hash_items(uint32_t seed, const key_column *list, int64_t begin, int64_t count) {
    for (int64_t i = begin; i < begin + count; i++) seed = hash_row(seed, &list->children[0], i);
    return seed;
}

static uint32_t hash_fields(uint32_t seed, const key_column *column, int64_t i) {
    for (int64_t field = 0; field < column->n_children; field++) seed = hash_row(seed, &column->children[field], i);
    return seed;
}

/* Value `i` of the buffers, known not to be null. Inlined with a constant `kind` into the loops below. */
static inline __attribute__((always_inline)) uint32_t hash_value(uint32_t seed, const key_column *column,
                                                                 column_kind kind, int64_t i) {
    if (kind == KIND_NULL) return seed;
    if (kind == KIND_STRUCT) return hash_fields(seed, column, i);
    if (kind == KIND_LIST_FIXED) return hash_items(seed, column, column->width * i, column->width);
    const void *values = column->buffers[1]; /* the three above have no such buffer */
    switch (kind) {
    case KIND_BOOL:
        return murmur_int(seed, bit_is_set(values, i));
    case KIND_INT8:
        return murmur_int(seed, ((const int8_t *)values)[i]);
    case KIND_INT16:
        return murmur_int(seed, int16_at(values, i));
    case KIND_INT32:
        return murmur_int(seed, int32_at(values, i));
    case KIND_INT64:
        return murmur_long(seed, int64_at(values, i));
    case KIND_FLOAT:
        return murmur_int(seed, float_bits(float_at(values, i)));
    case KIND_DOUBLE:
        return murmur_long(seed, double_bits(double_at(values, i)));
    case KIND_DECIMAL_LONG:
        return murmur_long(seed, int64_at(values, 2 * i));
    case KIND_DECIMAL_BYTES:
        return hash_wide_decimal(seed, (const uint8_t *)values + 16 * i);
    case KIND_BYTES_32: {
        int32_t start = int32_at(values, i);
        return murmur_bytes(seed, (const uint8_t *)column->buffers[2] + start, int32_at(values, i + 1) - start);
    }
    case KIND_BYTES_64: {
        int64_t start = int64_at(values, i);
        return murmur_bytes(seed, (const uint8_t *)column->buffers[2] + start, int64_at(values, i + 1) - start);
    }
    case KIND_BYTES_VIEW:
        return hash_view(seed, column, i);
    case KIND_BYTES_FIXED:
        return murmur_bytes(seed, (const uint8_t *)values + column->width * i, column->width);
    case KIND_LIST_32: {
        int32_t start = int32_at(values, i);
        return hash_items(seed, column, start, int32_at(values, i + 1) - start);
    }
    case KIND_LIST_64: {
        int64_t start = int64_at(values, i);
        return hash_items(seed, column, start, int64_at(values, i + 1) - start);
    }
    case KIND_LIST_VIEW_32:
        return hash_items(seed, column, int32_at(values, i), int32_at(column->buffers[2], i));
    case KIND_LIST_VIEW_64:
        return hash_items(seed, column, int64_at(values, i), int64_at(column->buffers[2], i));
    case KIND_DICTIONARY:
        return hash_row(seed, &column->children[0], dictionary_index(column, i));
    default:
        return seed;
    }
}

/* One row of a column, null or not. A null leaves the running hash as it is. */
static uint32_t hash_row(uint32_t seed, const key_column *column, int64_t row) {
    int64_t i = row + column->offset;
    if (column->validity != NULL && !bit_is_set(column->validity, i)) return seed;
    return hash_value(seed, column, column->kind, i);
}

static inline __attribute__((always_inline)) void hash_rows(uint32_t *hashes, const key_column *column,
                                                            column_kind kind, int64_t n) {
    int64_t offset = column->offset;
    const uint8_t *validity = column->validity;
    if (validity == NULL) {
        for (int64_t i = 0; i < n; i++) hashes[i] = hash_value(hashes[i], column, kind, i + offset);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        if (bit_is_set(validity, i + offset)) hashes[i] = hash_value(hashes[i], column, kind, i + offset);
    }
}

/* A loop for each of the common types, so that the compiler can unroll or vectorize it; the others share one. */
static void hash_column(uint32_t *hashes, const key_column *column, int64_t n) {
    switch (column->kind) {
    case KIND_NULL:
        return;
    case KIND_INT32:
        hash_rows(hashes, column, KIND_INT32, n);
        return;
    case KIND_INT64:
        hash_rows(hashes, column, KIND_INT64, n);
        return;
    case KIND_DOUBLE:
        hash_rows(hashes, column, KIND_DOUBLE, n);
        return;
    case KIND_DECIMAL_LONG:
        hash_rows(hashes, column, KIND_DECIMAL_LONG, n);
        return;
    case KIND_BYTES_32:
        hash_rows(hashes, column, KIND_BYTES_32, n);
        return;
    case KIND_BYTES_64:
        hash_rows(hashes, column, KIND_BYTES_64, n);
        return;
    default:
        for (int64_t i = 0; i < n; i++) hashes[i] = hash_row(hashes[i], column, i);
    }
}

PyObject *native_hash_column(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *schema_capsule, *array_capsule, *hashes_object;
    if (!PyArg_ParseTuple(args, "OOO:hash_column", &schema_capsule, &array_capsule, &hashes_object)) return NULL;
    const struct ArrowSchema *schema = PyCapsule_GetPointer(schema_capsule, "arrow_schema");
    if (schema == NULL) return NULL;
    const struct ArrowArray *array = PyCapsule_GetPointer(array_capsule, "arrow_array");
    if (array == NULL) return NULL;
    array_view hashes;
    if (view_array(hashes_object, "hashes", ITEM_I32, 1, &hashes) != 0) return NULL;
    key_column column;
    PyObject *result = NULL;
    if (check_length(&hashes, "hashes", (Py_ssize_t)array->length) == 0 && open_column(schema, array, &column) == 0) {
        Py_BEGIN_ALLOW_THREADS
        hash_column(hashes.data, &column, hashes.length);
        Py_END_ALLOW_THREADS
        release_column(&column);
        result = Py_NewRef(Py_None);
    }
    release_array(&hashes);
    return result;
}
