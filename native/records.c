/* Records of plain Python values from Arrow columns, and to the buffers of such columns.
 *
 * What is not plain is left to Arrow's own conversion: both functions then return None and have done nothing. */
#include "arrow_c.h"
#include "native.h"
#include "plain_read.h"
#include "plain_write.h"

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
        PyObject *column = column_of(&makers[i], rows);
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
