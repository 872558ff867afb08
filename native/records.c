/* Records of plain Python values from Arrow columns, and to the buffers of such columns.
 *
 * What is not plain is left to Arrow's own conversion: both functions then return None and have done nothing. */
#include "arrow_c.h"
#include "native.h"

#include <string.h>

static int bit_is_set(const uint8_t *bits, int64_t i) { return (bits[i >> 3] >> (i & 7)) & 1; }

/* ---------------------------------------------------------------- Arrow to Python */

typedef struct {
    char type;               /* Arrow's format: b, c, s, i, l, f, g, u, z, U, Z; all of one character */
    int64_t offset;          /* of the first row */
    const uint8_t *validity; /* NULL when nothing is null */
    const void *values;      /* offsets of texts */
    const char *bytes;       /* of texts */
} column_view;

static PyObject *text_at(const column_view *column, int64_t start, int64_t end) {
    const char *bytes = column->bytes + start;
    if (column->type == 'z' || column->type == 'Z') return PyBytes_FromStringAndSize(bytes, end - start);
    return PyUnicode_DecodeUTF8(bytes, end - start, NULL);
}

static PyObject *value_at(const column_view *column, int64_t row) {
    int64_t i = column->offset + row;
    if (column->validity != NULL && !bit_is_set(column->validity, i)) return Py_NewRef(Py_None);
    switch (column->type) {
    case 'b':
        return PyBool_FromLong(bit_is_set(column->values, i));
    case 'c':
        return PyLong_FromLong(((const int8_t *)column->values)[i]);
    case 's':
        return PyLong_FromLong(((const int16_t *)column->values)[i]);
    case 'i':
        return PyLong_FromLong(((const int32_t *)column->values)[i]);
    case 'l':
        return PyLong_FromLongLong(((const int64_t *)column->values)[i]);
    case 'f':
        return PyFloat_FromDouble(((const float *)column->values)[i]);
    case 'g':
        return PyFloat_FromDouble(((const double *)column->values)[i]);
    case 'u':
    case 'z': {
        const int32_t *ends = column->values;
        return text_at(column, ends[i], ends[i + 1]);
    }
    default: {
        const int64_t *ends = column->values;
        return text_at(column, ends[i], ends[i + 1]);
    }
    }
}

/* 1 when the column is of a type that is read here, 0 when not. */
static int open_view(const struct ArrowSchema *schema, const struct ArrowArray *array, int64_t first, column_view *out) {
    const char *format = schema->format;
    if (schema->dictionary != NULL || format[0] == '\0' || format[1] != '\0') return 0;
    if (strchr("bcsilfguzUZ", format[0]) == NULL) return 0;
    out->type = format[0];
    out->offset = array->offset + first;
    out->validity = array->null_count == 0 ? NULL : array->buffers[0];
    out->values = array->buffers[1];
    out->bytes = array->n_buffers > 2 ? array->buffers[2] : NULL;
    return 1;
}

static PyObject *read_single(const column_view *column, int64_t rows) {
    PyObject *records = PyList_New(rows);
    if (records == NULL) return NULL;
    for (int64_t row = 0; row < rows; row++) {
        PyObject *value = value_at(column, row);
        if (value == NULL) {
            Py_DECREF(records);
            return NULL;
        }
        PyList_SET_ITEM(records, row, value);
    }
    return records;
}

static PyObject *read_tuples(const column_view *columns, int64_t width, int64_t rows) {
    PyObject *records = PyList_New(rows);
    if (records == NULL) return NULL;
    for (int64_t row = 0; row < rows; row++) {
        PyObject *record = PyTuple_New(width);
        if (record == NULL) goto failed;
        PyList_SET_ITEM(records, row, record);
        for (int64_t column = 0; column < width; column++) {
            PyObject *value = value_at(&columns[column], row);
            if (value == NULL) goto failed;
            PyTuple_SET_ITEM(record, column, value);
        }
    }
    return records;
failed:
    Py_DECREF(records);
    return NULL;
}

/* read_records(schema, array, start, rows): capsules of a record batch's Arrow C data. */
PyObject *native_read_records(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *schema_capsule, *array_capsule;
    long long start, rows;
    if (!PyArg_ParseTuple(args, "OOLL:read_records", &schema_capsule, &array_capsule, &start, &rows)) return NULL;
    const struct ArrowSchema *schema = PyCapsule_GetPointer(schema_capsule, "arrow_schema");
    if (schema == NULL) return NULL;
    const struct ArrowArray *array = PyCapsule_GetPointer(array_capsule, "arrow_array");
    if (array == NULL) return NULL;
    if (strcmp(schema->format, "+s") != 0 || array->n_children != schema->n_children) {
        PyErr_SetString(PyExc_TypeError, "read_records reads record batches");
        return NULL;
    }
    if (start < 0 || rows < 0 || start > array->length - rows) {
        PyErr_Format(PyExc_IndexError, "there are %lld rows, not %lld behind %lld", (long long)array->length, rows, start);
        return NULL;
    }
    int64_t width = schema->n_children;
    if (width == 0) Py_RETURN_NONE;
    column_view few[16];
    column_view *columns = few;
    if (width > (int64_t)(sizeof few / sizeof *few)) {
        columns = PyMem_Calloc((size_t)width, sizeof *columns);
        if (columns == NULL) return PyErr_NoMemory();
    }
    PyObject *records = NULL;
    int readable = 1;
    for (int64_t i = 0; i < width && readable; i++) {
        readable = open_view(schema->children[i], array->children[i], array->offset + start, &columns[i]);
    }
    if (!readable) {
        records = Py_NewRef(Py_None);
    } else {
        records = width == 1 ? read_single(columns, rows) : read_tuples(columns, width, rows);
    }
    if (columns != few) PyMem_Free(columns);
    return records;
}

/* ---------------------------------------------------------------- Python to Arrow */

typedef struct {
    char type; /* as above; 'O': anything, kept as a list */
    int nullable;
    Py_ssize_t nulls;
    PyObject *validity; /* bytes, NULL while nothing is null */
    PyObject *values;   /* bytes: the values, or the offsets of texts; a list for 'O' */
    PyObject *bytes;    /* bytes of texts; NULL for other types */
    Py_ssize_t used;    /* of `bytes` */
} column_maker;

/* What a value comes to: it is in, it needs another conversion than these, or there is a Python error. */
typedef enum { FITS, MISFIT, FAILED } fit;

static Py_ssize_t value_size(char type) {
    switch (type) {
    case 'c':
        return 1;
    case 's':
        return 2;
    case 'i':
    case 'u':
    case 'z':
        return 4;
    default:
        return 8;
    }
}

static PyObject *zeros(Py_ssize_t size) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (bytes != NULL) memset(PyBytes_AS_STRING(bytes), 0, (size_t)size);
    return bytes;
}

static int open_maker(char type, int nullable, Py_ssize_t rows, column_maker *out) {
    memset(out, 0, sizeof *out);
    out->type = type;
    out->nullable = nullable;
    if (type == 'O') {
        out->values = PyList_New(rows);
        return out->values == NULL ? -1 : 0;
    }
    int text = type == 'u' || type == 'z';
    if (type == 'b') {
        out->values = zeros((rows + 7) / 8);
    } else {
        out->values = PyBytes_FromStringAndSize(NULL, (rows + text) * value_size(type));
    }
    if (text) out->bytes = PyBytes_FromStringAndSize(NULL, 16 * rows + 64);
    if (out->values == NULL || (text && out->bytes == NULL)) return -1;
    if (text) *(int32_t *)PyBytes_AS_STRING(out->values) = 0;
    return 0;
}

static void release_maker(column_maker *maker) {
    Py_CLEAR(maker->validity);
    Py_CLEAR(maker->values);
    Py_CLEAR(maker->bytes);
}

static fit put_null(column_maker *maker, Py_ssize_t row, Py_ssize_t rows) {
    if (!maker->nullable) return MISFIT;
    if (maker->validity == NULL) {
        maker->validity = PyBytes_FromStringAndSize(NULL, (rows + 7) / 8);
        if (maker->validity == NULL) return FAILED;
        memset(PyBytes_AS_STRING(maker->validity), 0xFF, (size_t)((rows + 7) / 8));
    }
    PyBytes_AS_STRING(maker->validity)[row >> 3] &= (char)~(1 << (row & 7));
    maker->nulls++;
    char *values = PyBytes_AS_STRING(maker->values);
    if (maker->bytes != NULL) {
        ((int32_t *)values)[row + 1] = (int32_t)maker->used;
    } else if (maker->type != 'b') {
        Py_ssize_t size = value_size(maker->type);
        memset(values + row * size, 0, (size_t)size);
    }
    return FITS;
}

static fit put_text(column_maker *maker, PyObject *value, Py_ssize_t row) {
    const char *text;
    Py_ssize_t size;
    if (maker->type == 'z') {
        if (!PyBytes_CheckExact(value)) return MISFIT;
        text = PyBytes_AS_STRING(value);
        size = PyBytes_GET_SIZE(value);
    } else {
        if (!PyUnicode_CheckExact(value)) return MISFIT;
        text = PyUnicode_AsUTF8AndSize(value, &size);
        if (text == NULL) { /* half a surrogate pair: the next conversion says so */
            if (!PyErr_ExceptionMatches(PyExc_UnicodeError)) return FAILED;
            PyErr_Clear();
            return MISFIT;
        }
    }
    if (size > INT32_MAX - maker->used) return MISFIT;
    Py_ssize_t room = PyBytes_GET_SIZE(maker->bytes);
    if (size > room - maker->used) {
        room = 2 * (maker->used + size);
        if (_PyBytes_Resize(&maker->bytes, room) != 0) return FAILED;
    }
    memcpy(PyBytes_AS_STRING(maker->bytes) + maker->used, text, (size_t)size);
    maker->used += size;
    ((int32_t *)PyBytes_AS_STRING(maker->values))[row + 1] = (int32_t)maker->used;
    return FITS;
}

static fit put_integer(column_maker *maker, PyObject *value, Py_ssize_t row) {
    if (!PyLong_CheckExact(value)) return MISFIT;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return MISFIT;
    char *values = PyBytes_AS_STRING(maker->values);
    switch (maker->type) {
    case 'c':
        if (number != (int8_t)number) return MISFIT;
        ((int8_t *)values)[row] = (int8_t)number;
        break;
    case 's':
        if (number != (int16_t)number) return MISFIT;
        ((int16_t *)values)[row] = (int16_t)number;
        break;
    case 'i':
        if (number != (int32_t)number) return MISFIT;
        ((int32_t *)values)[row] = (int32_t)number;
        break;
    default:
        ((int64_t *)values)[row] = number;
    }
    return FITS;
}

static fit put_value(column_maker *maker, PyObject *value, Py_ssize_t row, Py_ssize_t rows) {
    if (maker->type == 'O') {
        PyList_SET_ITEM(maker->values, row, Py_NewRef(value));
        return FITS;
    }
    if (value == Py_None) return put_null(maker, row, rows);
    switch (maker->type) {
    case 'u':
    case 'z':
        return put_text(maker, value, row);
    case 'b':
        if (!PyBool_Check(value)) return MISFIT;
        if (value == Py_True) PyBytes_AS_STRING(maker->values)[row >> 3] |= (char)(1 << (row & 7));
        return FITS;
    case 'g':
        if (!PyFloat_CheckExact(value)) return MISFIT;
        ((double *)PyBytes_AS_STRING(maker->values))[row] = PyFloat_AS_DOUBLE(value);
        return FITS;
    default:
        return put_integer(maker, value, row);
    }
}

static fit put_record(column_maker *makers, Py_ssize_t width, PyObject *record, Py_ssize_t row, Py_ssize_t rows) {
    if (width == 1) return put_value(makers, record, row, rows);
    if (!PyTuple_CheckExact(record) || PyTuple_GET_SIZE(record) != width) return MISFIT;
    for (Py_ssize_t column = 0; column < width; column++) {
        fit found = put_value(&makers[column], PyTuple_GET_ITEM(record, column), row, rows);
        if (found != FITS) return found;
    }
    return FITS;
}

/* The finished column: (validity or None, values, bytes or None, nulls). Takes what it returns from the maker. */
static PyObject *column_of(column_maker *maker) {
    if (maker->bytes != NULL && _PyBytes_Resize(&maker->bytes, maker->used) != 0) return NULL;
    return Py_BuildValue("(OOOn)", maker->validity ? maker->validity : Py_None, maker->values,
                         maker->bytes ? maker->bytes : Py_None, maker->nulls);
}

static PyObject *make_columns(PyObject *records, column_maker *makers, Py_ssize_t width) {
    Py_ssize_t rows = PySequence_Fast_GET_SIZE(records);
    PyObject **items = PySequence_Fast_ITEMS(records);
    for (Py_ssize_t row = 0; row < rows; row++) {
        fit found = put_record(makers, width, items[row], row, rows);
        if (found == FAILED) return NULL;
        if (found == MISFIT) Py_RETURN_NONE;
    }
    PyObject *columns = PyList_New(width);
    for (Py_ssize_t i = 0; columns != NULL && i < width; i++) {
        PyObject *column = column_of(&makers[i]);
        if (column == NULL) {
            Py_CLEAR(columns);
        } else {
            PyList_SET_ITEM(columns, i, column);
        }
    }
    return columns;
}

/* write_records(records, types, nullable): `types` has a character a column, `nullable` a 0 or 1. */
PyObject *native_write_records(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *records;
    const char *types, *nullable;
    Py_ssize_t width, width_again;
    if (!PyArg_ParseTuple(args, "Oy#y#:write_records", &records, &types, &width, &nullable, &width_again)) return NULL;
    if (!PyList_CheckExact(records) && !PyTuple_CheckExact(records)) {
        PyErr_Format(PyExc_TypeError, "records must be a list or a tuple, not %s", Py_TYPE(records)->tp_name);
        return NULL;
    }
    if (width < 1 || width != width_again) {
        PyErr_SetString(PyExc_ValueError, "types and nullable say something of each column, and there is at least one");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < width; i++) {
        if (types[i] == '\0' || strchr("bcsilguzO", types[i]) == NULL) {
            PyErr_Format(PyExc_ValueError, "columns of type '%c' are not written here", types[i]);
            return NULL;
        }
    }
    column_maker *makers = PyMem_Calloc((size_t)width, sizeof *makers);
    if (makers == NULL) return PyErr_NoMemory();
    PyObject *columns = NULL;
    Py_ssize_t opened = 0;
    Py_ssize_t rows = PySequence_Fast_GET_SIZE(records);
    while (opened < width && open_maker(types[opened], nullable[opened], rows, &makers[opened]) == 0) opened++;
    if (opened == width) columns = make_columns(records, makers, width);
    for (Py_ssize_t i = 0; i < width; i++) release_maker(&makers[i]);
    PyMem_Free(makers);
    return columns;
}
