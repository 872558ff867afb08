#include "column.h"

#include "native.h"

#include <stdlib.h>
#include <string.h>

/* Spark's own limit on nesting is far below; this one only keeps a hostile schema off the C stack. */
#define MAX_DEPTH 128

typedef struct {
    const char *format;
    column_kind kind;
} format_kind;

static const format_kind EXACT_FORMATS[] = {
    {"n", KIND_NULL},        {"b", KIND_BOOL},
    {"c", KIND_INT8},        {"s", KIND_INT16},
    {"i", KIND_INT32},       {"l", KIND_INT64},
    {"f", KIND_FLOAT},       {"g", KIND_DOUBLE},
    {"u", KIND_BYTES_32},    {"z", KIND_BYTES_32},
    {"U", KIND_BYTES_64},    {"Z", KIND_BYTES_64},
    {"vu", KIND_BYTES_VIEW}, {"vz", KIND_BYTES_VIEW},
    {"tdD", KIND_INT32},     /* date, days */
    {"tDu", KIND_INT64},     /* duration, microseconds */
    {"ttn", KIND_INT64},     /* time of day, nanoseconds */
    {"+s", KIND_STRUCT},     {"+l", KIND_LIST_32},
    {"+L", KIND_LIST_64},    {"+vl", KIND_LIST_VIEW_32},
    {"+vL", KIND_LIST_VIEW_64},
};

/* Read up to `most` numbers with commas between them; return how many there are.
 *
 * Not by sscanf: built against a recent glibc, that is a symbol which older ones lack. */
static int read_numbers(const char *text, long *numbers, int most) {
    int count = 0;
    for (char *end; count < most; text = end + 1) {
        long number = PyOS_strtol(text, &end, 10);
        if (end == text) break;
        numbers[count++] = number;
        if (*end != ',') break;
    }
    return count;
}

static int parse_format(const char *format, key_column *out) {
    for (size_t i = 0; i < sizeof EXACT_FORMATS / sizeof *EXACT_FORMATS; i++) {
        if (strcmp(format, EXACT_FORMATS[i].format) == 0) {
            out->kind = EXACT_FORMATS[i].kind;
            return 0;
        }
    }
    if (strncmp(format, "tsu:", 4) == 0) { /* timestamp, microseconds, in any time zone or none */
        out->kind = KIND_INT64;
        return 0;
    }
    long numbers[3] = {0, 0, 128}; /* precision, scale, bits */
    if (strncmp(format, "d:", 2) == 0 && read_numbers(format + 2, numbers, 3) >= 2 && numbers[2] == 128) {
        out->kind = numbers[0] <= 18 ? KIND_DECIMAL_LONG : KIND_DECIMAL_BYTES;
        return 0;
    }
    int is_list = strncmp(format, "+w:", 3) == 0;
    if ((is_list || strncmp(format, "w:", 2) == 0) && read_numbers(strchr(format, ':') + 1, numbers, 1) == 1) {
        out->kind = is_list ? KIND_LIST_FIXED : KIND_BYTES_FIXED;
        out->width = numbers[0];
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "Spark cannot hash, or ftlayer cannot read, Arrow's type '%s'", format);
    return -1;
}

static int parse_index_format(const char *format, key_column *out) {
    const char *found = strlen(format) == 1 ? strchr("cCsSiIlL", *format) : NULL;
    if (found == NULL) {
        PyErr_Format(PyExc_TypeError, "dictionary indices of Arrow's type '%s' cannot be read", format);
        return -1;
    }
    switch (*found) { /* indices are never negative, so signed and unsigned read alike but for the width */
    case 'c':
    case 'C':
        out->index_kind = KIND_INT8;
        break;
    case 's':
    case 'S':
        out->index_kind = KIND_INT16;
        break;
    case 'i':
    case 'I':
        out->index_kind = KIND_INT32;
        break;
    default:
        out->index_kind = KIND_INT64;
    }
    out->kind = KIND_DICTIONARY;
    return 0;
}

static int open_nested(const struct ArrowSchema *schema, const struct ArrowArray *array, key_column *out, int depth);

static int open_children(const struct ArrowSchema *schema, const struct ArrowArray *array, key_column *out, int depth) {
    int dictionary = out->kind == KIND_DICTIONARY;
    int64_t n = dictionary ? 1 : schema->n_children;
    if (n == 0) return 0;
    if ((dictionary && array->dictionary == NULL) || (!dictionary && array->n_children != n)) {
        PyErr_SetString(PyExc_ValueError, "the Arrow array does not have the children its type names");
        return -1;
    }
    out->children = calloc((size_t)n, sizeof *out->children);
    if (out->children == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; out->n_children < n; out->n_children++) {
        const struct ArrowSchema *type = dictionary ? schema->dictionary : schema->children[out->n_children];
        const struct ArrowArray *child = dictionary ? array->dictionary : array->children[out->n_children];
        if (open_nested(type, child, &out->children[out->n_children], depth + 1) != 0) {
            release_column(out);
            return -1;
        }
    }
    return 0;
}

static int open_nested(const struct ArrowSchema *schema, const struct ArrowArray *array, key_column *out, int depth) {
    memset(out, 0, sizeof *out);
    if (depth > MAX_DEPTH) {
        PyErr_Format(PyExc_ValueError, "the key's type is nested more than %d deep", MAX_DEPTH);
        return -1;
    }
    int encoded = schema->dictionary != NULL;
    if ((encoded ? parse_index_format(schema->format, out) : parse_format(schema->format, out)) != 0) return -1;
    out->offset = array->offset;
    out->buffers = array->buffers;
    if (array->null_count != 0 && array->n_buffers > 0) out->validity = array->buffers[0];
    return open_children(schema, array, out, depth);
}

int open_column(const struct ArrowSchema *schema, const struct ArrowArray *array, key_column *out) {
    return open_nested(schema, array, out, 0);
}

void release_column(key_column *column) {
    for (int64_t i = 0; i < column->n_children; i++) release_column(&column->children[i]);
    free(column->children);
    column->children = NULL;
    column->n_children = 0;
}
