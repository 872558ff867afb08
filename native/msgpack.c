/* What a msgpack value costs once it is objects, told before any is made: one byte may be a map, or the head of an
 * array of empty ones. */
#include "native.h"

/* An array or a map is a Python object with a table of its own. */
#define CONTAINER_COST 8
#define MAX_DEPTH 64

/* The bytes of a value's head and body behind its first byte, and how many values follow in it. */
typedef struct {
    uint64_t skip, children;
    int container;
} shape;

static uint64_t big_endian(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | at[i];
    return value;
}

/* 1, or 0 when the bytes end within the head. */
static int shape_of(const uint8_t *at, size_t left, shape *out) {
    uint8_t first = at[0];
    int width = 0;
    *out = (shape){0, 0, 0};
    if (first <= 0x7f || first >= 0xe0) return 1;
    if (first <= 0x9f) {
        out->container = 1;
        out->children = (uint64_t)(first & 0x0f) << (first <= 0x8f);
        return 1;
    }
    if (first <= 0xbf) {
        out->skip = first & 0x1f;
        return 1;
    }
    switch (first) {
        case 0xc4: case 0xc7: case 0xd9: width = 1; break;
        case 0xc5: case 0xc8: case 0xda: case 0xdc: case 0xde: width = 2; break;
        case 0xc6: case 0xc9: case 0xdb: case 0xdd: case 0xdf: width = 4; break;
        case 0xcc: case 0xd0: out->skip = 1; return 1;
        case 0xcd: case 0xd1: out->skip = 2; return 1;
        case 0xca: case 0xce: case 0xd2: out->skip = 4; return 1;
        case 0xcb: case 0xcf: case 0xd3: out->skip = 8; return 1;
        case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8:
            out->skip = 1 + ((uint64_t)1 << (first - 0xd4));
            return 1;
        default: return 1; /* nil, false, true, and the one byte that is nothing */
    }
    if (left < (size_t)width + 1) return 0;
    uint64_t length = big_endian(at + 1, width);
    out->skip = (uint64_t)width;
    if (first >= 0xdc) {
        out->container = 1;
        out->children = length << (first >= 0xde);
    } else {
        /* An extension has a byte for its type. */
        out->skip += length + (first >= 0xc7 && first <= 0xc9);
    }
    return 1;
}

/* The cost of the value at the beginning, `most` + 1 for more than that, -1 for too many levels. Bytes that end too
 * early end the count: reading them will fail. */
static int64_t cost_of(const uint8_t *data, size_t size, int64_t most) {
    uint64_t open[MAX_DEPTH];
    int depth = 0;
    int64_t cost = 0;
    size_t at = 0;
    uint64_t wanted = 1;
    while (1) {
        while (wanted == 0) {
            if (depth == 0) return cost;
            wanted = open[--depth];
        }
        if (at >= size) return cost;
        shape value;
        if (!shape_of(data + at, size - at, &value)) return cost;
        wanted--;
        cost += value.container ? CONTAINER_COST : 1;
        if (cost > most) return most + 1;
        if (value.skip > size - at - 1) return cost;
        at += 1 + (size_t)value.skip;
        if (value.container) {
            if (depth == MAX_DEPTH) return -1;
            open[depth++] = wanted;
            wanted = value.children;
        }
    }
}

PyObject *native_msgpack_cost(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer data;
    long long most;
    if (!PyArg_ParseTuple(args, "y*L", &data, &most)) return NULL;
    int64_t cost;
    Py_BEGIN_ALLOW_THREADS
    cost = cost_of(data.buf, (size_t)data.len, most);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromLongLong(cost);
}
