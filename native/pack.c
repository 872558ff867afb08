/* Plain Python values as msgpack, byte for byte what ftlayer.state.snapshots.serializer makes of them.
 *
 * Plain are None, bool, int of 64 bits, float, str, bytes, and tuples, lists and dicts of plain values, of exactly
 * these types, nested no deeper than MAX_DEPTH. A tuple is an extension of type 1 with an array in it. A value is
 * measured first, so that it is found out before a byte of it is written, and the head of an extension can tell its
 * length. Nothing here runs code of a user's, and the GIL is held: no value changes between the two. */
#include "native.h"

#include <string.h>

#define MAX_DEPTH 8
#define TUPLE_CODE 1
#define MISFIT (-1)

/* ---------------------------------------------------------------- sizes */

static Py_ssize_t int_size(int64_t value) {
    if (value >= 0) return value < 0x80 ? 1 : value <= UINT8_MAX ? 2 : value <= UINT16_MAX ? 3 : value <= UINT32_MAX ? 5 : 9;
    return value >= -32 ? 1 : value >= INT8_MIN ? 2 : value >= INT16_MIN ? 3 : value >= INT32_MIN ? 5 : 9;
}

static Py_ssize_t text_head(Py_ssize_t length) {
    return length < 32 ? 1 : length <= UINT8_MAX ? 2 : length <= UINT16_MAX ? 3 : 5;
}

static Py_ssize_t bytes_head(Py_ssize_t length) { return length <= UINT8_MAX ? 2 : length <= UINT16_MAX ? 3 : 5; }

static Py_ssize_t items_head(Py_ssize_t items) { return items < 16 ? 1 : items <= UINT16_MAX ? 3 : 5; }

static Py_ssize_t extension_head(Py_ssize_t length) {
    if (length == 1 || length == 2 || length == 4 || length == 8 || length == 16) return 2;
    return length <= UINT8_MAX ? 3 : length <= UINT16_MAX ? 4 : 6;
}

/* Bytes of a text in UTF-8; of surrogates too, as "surrogatepass" has it. */
static Py_ssize_t utf8_size(PyObject *text) {
    Py_ssize_t length = PyUnicode_GET_LENGTH(text), size = length;
    if (PyUnicode_IS_COMPACT_ASCII(text)) return size;
    int kind = PyUnicode_KIND(text);
    const void *data = PyUnicode_DATA(text);
    for (Py_ssize_t i = 0; i < length; i++) {
        Py_UCS4 point = PyUnicode_READ(kind, data, i);
        size += (point >= 0x80) + (point >= 0x800) + (point >= 0x10000);
    }
    return size;
}

static Py_ssize_t size_of(PyObject *value, int depth);

static Py_ssize_t size_of_array(PyObject *array, int depth) {
    Py_ssize_t items = PySequence_Fast_GET_SIZE(array), size = items_head(items);
    PyObject **each = PySequence_Fast_ITEMS(array);
    for (Py_ssize_t i = 0; i < items; i++) {
        Py_ssize_t more = size_of(each[i], depth);
        if (more == MISFIT || (size += more) > UINT32_MAX) return MISFIT;
    }
    return size;
}

static Py_ssize_t size_of_map(PyObject *map, int depth) {
    Py_ssize_t size = items_head(PyDict_GET_SIZE(map)), at = 0;
    PyObject *key, *value;
    while (PyDict_Next(map, &at, &key, &value)) {
        Py_ssize_t of_key = size_of(key, depth), of_value = size_of(value, depth);
        if (of_key == MISFIT || of_value == MISFIT || (size += of_key + of_value) > UINT32_MAX) return MISFIT;
    }
    return size;
}

/* Bytes of a value, or MISFIT: it is not plain. */
static Py_ssize_t size_of(PyObject *value, int depth) {
    if (PyLong_CheckExact(value)) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow == 0) return int_size(number);
        if (overflow > 0) {
            PyLong_AsUnsignedLongLong(value);
            if (!PyErr_Occurred()) return 9;
            PyErr_Clear();
        }
        return MISFIT;
    }
    if (PyUnicode_CheckExact(value)) {
        if (!PyUnicode_IS_COMPACT(value)) return MISFIT;
        Py_ssize_t length = utf8_size(value);
        return length > UINT32_MAX ? MISFIT : text_head(length) + length;
    }
    if (PyBytes_CheckExact(value)) {
        Py_ssize_t length = PyBytes_GET_SIZE(value);
        return length > UINT32_MAX ? MISFIT : bytes_head(length) + length;
    }
    if (PyFloat_CheckExact(value)) return 9;
    if (value == Py_None || PyBool_Check(value)) return 1;
    if (depth == 0) return MISFIT;
    if (PyTuple_CheckExact(value)) {
        Py_ssize_t length = size_of_array(value, depth - 1);
        return length == MISFIT ? MISFIT : extension_head(length) + length;
    }
    if (PyList_CheckExact(value)) return size_of_array(value, depth - 1);
    return PyDict_CheckExact(value) ? size_of_map(value, depth - 1) : MISFIT;
}

/* ---------------------------------------------------------------- bytes */

static char *put_big(char *out, uint64_t number, int bytes) {
    for (int i = bytes - 1; i >= 0; i--) *out++ = (char)(number >> (8 * i));
    return out;
}

/* A mark, and a number of so many bytes behind it. */
static char *put_marked(char *out, int mark, uint64_t number, int bytes) {
    *out++ = (char)mark;
    return put_big(out, number, bytes);
}

/* The marks for lengths of 1, 2 and 4 bytes are neighbours. */
static char *put_length(char *out, int mark, Py_ssize_t length) {
    if (length <= UINT8_MAX) return put_marked(out, mark, (uint64_t)length, 1);
    if (length <= UINT16_MAX) return put_marked(out, mark + 1, (uint64_t)length, 2);
    return put_marked(out, mark + 2, (uint64_t)length, 4);
}

static char *put_int(char *out, PyObject *value) {
    int overflow;
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow > 0) return put_marked(out, 0xcf, PyLong_AsUnsignedLongLong(value), 8);
    Py_ssize_t size = int_size(number);
    if (size == 1) {
        *out = (char)number;
        return out + 1;
    }
    int step = size == 2 ? 0 : size == 3 ? 1 : size == 5 ? 2 : 3;
    return put_marked(out, (number >= 0 ? 0xcc : 0xd0) + step, (uint64_t)number, (int)size - 1);
}

static char *put_text(char *out, PyObject *text) {
    Py_ssize_t size = utf8_size(text), length = PyUnicode_GET_LENGTH(text);
    if (size < 32) {
        *out++ = (char)(0xa0 | size);
    } else {
        out = put_length(out, 0xd9, size);
    }
    const void *data = PyUnicode_DATA(text);
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        memcpy(out, data, (size_t)size);
        return out + size;
    }
    int kind = PyUnicode_KIND(text);
    for (Py_ssize_t i = 0; i < length; i++) {
        Py_UCS4 point = PyUnicode_READ(kind, data, i);
        if (point < 0x80) {
            *out++ = (char)point;
            continue;
        }
        int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
        *out++ = (char)((more == 1 ? 0xc0 : more == 2 ? 0xe0 : 0xf0) | point >> (6 * more));
        while (more-- > 0) *out++ = (char)(0x80 | ((point >> (6 * more)) & 0x3f));
    }
    return out;
}

static char *put_items(char *out, Py_ssize_t items, int few, int mark) {
    if (items < 16) {
        *out = (char)(few | items);
        return out + 1;
    }
    if (items <= UINT16_MAX) return put_marked(out, mark, (uint64_t)items, 2);
    return put_marked(out, mark + 1, (uint64_t)items, 4);
}

static char *put_value(char *out, PyObject *value);

static char *put_array(char *out, PyObject *array) {
    Py_ssize_t items = PySequence_Fast_GET_SIZE(array);
    PyObject **each = PySequence_Fast_ITEMS(array);
    out = put_items(out, items, 0x90, 0xdc);
    for (Py_ssize_t i = 0; i < items; i++) out = put_value(out, each[i]);
    return out;
}

static char *put_tuple(char *out, PyObject *tuple) {
    Py_ssize_t length = size_of_array(tuple, MAX_DEPTH);
    if (extension_head(length) == 2) {
        *out++ = (char)(length == 1 ? 0xd4 : length == 2 ? 0xd5 : length == 4 ? 0xd6 : length == 8 ? 0xd7 : 0xd8);
    } else {
        out = put_length(out, 0xc7, length);
    }
    *out++ = TUPLE_CODE;
    return put_array(out, tuple);
}

/* Write a value that `size_of` has measured; returns where it ends. */
static char *put_value(char *out, PyObject *value) {
    if (PyLong_CheckExact(value)) return put_int(out, value);
    if (PyUnicode_CheckExact(value)) return put_text(out, value);
    if (PyBytes_CheckExact(value)) {
        Py_ssize_t length = PyBytes_GET_SIZE(value);
        out = put_length(out, 0xc4, length);
        memcpy(out, PyBytes_AS_STRING(value), (size_t)length);
        return out + length;
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return put_marked(out, 0xcb, bits, 8);
    }
    if (PyTuple_CheckExact(value)) return put_tuple(out, value);
    if (PyList_CheckExact(value)) return put_array(out, value);
    if (PyDict_CheckExact(value)) {
        PyObject *key, *item;
        Py_ssize_t at = 0;
        out = put_items(out, PyDict_GET_SIZE(value), 0x80, 0xde);
        while (PyDict_Next(value, &at, &key, &item)) out = put_value(put_value(out, key), item);
        return out;
    }
    *out = (char)(value == Py_None ? 0xc0 : value == Py_False ? 0xc2 : 0xc3);
    return out + 1;
}

PyObject *native_pack_plain(PyObject *self, PyObject *value) {
    (void)self;
    Py_ssize_t size = size_of(value, MAX_DEPTH);
    if (size == MISFIT) Py_RETURN_NONE;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, size);
    if (packed != NULL) put_value(PyBytes_AS_STRING(packed), value);
    return packed;
}

/* ---------------------------------------------------------------- many values */

typedef struct {
    PyObject *bytes; /* NULL behind an error */
    Py_ssize_t used;
} growing;

/* Room for so many bytes more; where they go, or NULL with an error. */
static char *room_for(growing *out, Py_ssize_t size) {
    Py_ssize_t room = PyBytes_GET_SIZE(out->bytes);
    if (size > PY_SSIZE_T_MAX / 2 - out->used) {
        PyErr_NoMemory();
        return NULL;
    }
    if (out->used + size > room && _PyBytes_Resize(&out->bytes, 2 * (out->used + size)) != 0) return NULL;
    return PyBytes_AS_STRING(out->bytes) + out->used;
}

/* Append what `pack` returns; 0, or -1 with an error. */
static int append_packed(growing *out, PyObject *pack, PyObject *value) {
    PyObject *packed = PyObject_CallOneArg(pack, value);
    if (packed == NULL) return -1;
    int done = -1;
    if (!PyBytes_CheckExact(packed)) {
        PyErr_SetString(PyExc_TypeError, "pack: expected bytes");
    } else {
        char *at = room_for(out, PyBytes_GET_SIZE(packed));
        if (at != NULL) {
            memcpy(at, PyBytes_AS_STRING(packed), (size_t)PyBytes_GET_SIZE(packed));
            out->used += PyBytes_GET_SIZE(packed);
            done = 0;
        }
    }
    Py_DECREF(packed);
    return done;
}

static int append_value(growing *out, PyObject *pack, PyObject *value) {
    Py_ssize_t size = size_of(value, MAX_DEPTH);
    if (size == MISFIT) return append_packed(out, pack, value);
    char *at = room_for(out, size);
    if (at == NULL) return -1;
    put_value(at, value);
    out->used += size;
    return 0;
}

/* Pack values at places one after the other, until they are `most` bytes; the number of values, or -1. */
static Py_ssize_t append_places(growing *out, PyObject *values, const array_view *places, Py_ssize_t most,
                                PyObject *pack) {
    const int64_t *place = places->data;
    Py_ssize_t done = 0;
    while (done < places->length && (done == 0 || out->used < most)) {
        /* `pack` is Python code, which could change the list. */
        if (place[done] < 0 || place[done] >= PyList_GET_SIZE(values)) {
            PyErr_SetString(PyExc_IndexError, "places: expected places of values");
            return -1;
        }
        PyObject *value = Py_NewRef(PyList_GET_ITEM(values, place[done]));
        int failed = append_value(out, pack, value);
        Py_DECREF(value);
        if (failed) return -1;
        done++;
    }
    return done;
}

PyObject *native_pack_values(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *values, *numbers, *pack;
    Py_ssize_t most;
    array_view places;
    if (!PyArg_ParseTuple(args, "O!OnO:pack_values", &PyList_Type, &values, &numbers, &most, &pack)) return NULL;
    if (view_array(numbers, "places", ITEM_I64, 0, &places) != 0) return NULL;
    if (places.length > UINT32_MAX) {
        release_array(&places);
        PyErr_SetString(PyExc_ValueError, "places: more than an array holds");
        return NULL;
    }
    /* The head has room for as many values as there may be: it may be longer than the shortest one. */
    Py_ssize_t head = items_head(places.length), done = -1;
    growing out = {PyBytes_FromStringAndSize(NULL, 64 + 16 * places.length), head};
    if (out.bytes != NULL) done = append_places(&out, values, &places, most, pack);
    release_array(&places);
    if (done < 0 || _PyBytes_Resize(&out.bytes, out.used) != 0) {
        Py_XDECREF(out.bytes);
        return NULL;
    }
    char *at = PyBytes_AS_STRING(out.bytes);
    if (head == 1) {
        *at = (char)(0x90 | done);
    } else {
        put_marked(at, head == 3 ? 0xdc : 0xdd, (uint64_t)done, (int)head - 1);
    }
    return Py_BuildValue("Nn", out.bytes, done);
}
