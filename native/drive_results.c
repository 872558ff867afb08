/* The results of a chain's functions, as the buffers of Arrow's columns; as a list once one of them is not plain. */
#include "drive.h"

/* Move objects into a longer list. */
static int lengthen(column_maker *maker, Py_ssize_t rows, Py_ssize_t wanted) {
    PyObject *longer = PyList_New(wanted);
    if (longer == NULL) return -1;
    for (Py_ssize_t row = 0; row < rows; row++) {
        PyList_SET_ITEM(longer, row, PyList_GET_ITEM(maker->values, row));
        PyList_SET_ITEM(maker->values, row, NULL);
    }
    Py_SETREF(maker->values, longer);
    return 0;
}

static int grow(driver *self) {
    Py_ssize_t wanted = 2 * self->capacity;
    for (Py_ssize_t i = 0; i < self->width; i++) {
        column_maker *maker = &self->makers[i];
        if (maker->type == 'O') {
            if (lengthen(maker, self->capacity, wanted) != 0) return -1;
            continue;
        }
        Py_ssize_t size = maker->type == 'b' ? (wanted + 7) / 8
                                             : (wanted + (maker->bytes != NULL)) * value_size(maker->type);
        Py_ssize_t before = PyBytes_GET_SIZE(maker->values);
        if (_PyBytes_Resize(&maker->values, size) != 0) return -1;
        if (maker->type == 'b') memset(PyBytes_AS_STRING(maker->values) + before, 0, (size_t)(size - before));
        if (maker->validity != NULL) {
            before = PyBytes_GET_SIZE(maker->validity);
            if (_PyBytes_Resize(&maker->validity, (wanted + 7) / 8) != 0) return -1;
            memset(PyBytes_AS_STRING(maker->validity) + before, 0xFF, (size_t)((wanted + 7) / 8 - before));
        }
    }
    self->capacity = wanted;
    return 0;
}

/* Make a list of the rows so far: what is plain comes out as it went in. */
static int turn_to_list(driver *self) {
    column_view few[16];
    column_view *columns = few;
    if (self->width > (Py_ssize_t)(sizeof few / sizeof *few)) {
        columns = PyMem_Calloc((size_t)self->width, sizeof *columns);
        if (columns == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < self->width; i++) {
        const column_maker *maker = &self->makers[i];
        if (maker->type == 'O') {
            open_objects(maker->values, &columns[i]);
            continue;
        }
        columns[i] = (column_view){
            .type = maker->type,
            .validity = maker->validity == NULL ? NULL : (const uint8_t *)PyBytes_AS_STRING(maker->validity),
            .values = PyBytes_AS_STRING(maker->values),
            .bytes = maker->bytes == NULL ? NULL : PyBytes_AS_STRING(maker->bytes),
        };
    }
    self->list = self->names != NULL ? read_dicts(self->names, columns, self->rows)
                 : self->width == 1  ? read_single(columns, self->rows)
                                     : read_tuples(columns, self->width, self->rows);
    if (columns != few) PyMem_Free(columns);
    return self->list == NULL ? -1 : 0;
}

int put_result(driver *self, PyObject *result) {
    if (self->list == NULL) {
        if (self->rows == self->capacity && grow(self) != 0) return -1;
        fit found = self->names != NULL ? put_dict(self->makers, self->names, result, self->rows, self->capacity)
                                        : put_record(self->makers, self->width, result, self->rows, self->capacity);
        switch (found) {
        case FITS:
            self->rows++;
            return 0;
        case FAILED:
            return -1;
        case MISFIT:
            if (turn_to_list(self) != 0) return -1;
        }
    }
    if (PyList_Append(self->list, result) != 0) return -1;
    self->rows++;
    return 0;
}

int take_back(driver *self, Py_ssize_t rows) {
    Py_ssize_t behind = self->rows;
    self->rows = rows;
    if (self->list != NULL) return PyList_SetSlice(self->list, rows, behind, NULL);
    for (Py_ssize_t i = 0; i < self->width; i++) {
        column_maker *maker = &self->makers[i];
        if (maker->type == 'O') {
            for (Py_ssize_t row = rows; row < behind; row++) {
                PyObject *object = PyList_GET_ITEM(maker->values, row);
                PyList_SET_ITEM(maker->values, row, NULL);
                Py_XDECREF(object);
            }
            continue;
        }
        uint8_t *values = (uint8_t *)PyBytes_AS_STRING(maker->values);
        uint8_t *validity = maker->validity == NULL ? NULL : (uint8_t *)PyBytes_AS_STRING(maker->validity);
        if (maker->bytes != NULL) maker->used = ((int32_t *)values)[rows];
        for (Py_ssize_t row = rows; row < behind; row++) {
            if (maker->type == 'b') values[row >> 3] &= (uint8_t)~(1 << (row & 7));
            if (validity != NULL && !bit_is_set(validity, row)) {
                validity[row >> 3] |= (uint8_t)(1 << (row & 7));
                maker->nulls--;
            }
        }
    }
    return 0;
}

PyObject *finished_results(driver *self) {
    if (self->list != NULL) return Py_NewRef(self->list);
    PyObject *columns = PyList_New(self->width);
    for (Py_ssize_t i = 0; columns != NULL && i < self->width; i++) {
        column_maker *maker = &self->makers[i];
        int is_cut = maker->type == 'O' && PyList_SetSlice(maker->values, self->rows, self->capacity, NULL) != 0;
        PyObject *column = is_cut ? NULL : column_of(maker);
        if (column == NULL) {
            Py_CLEAR(columns);
        } else {
            PyList_SET_ITEM(columns, i, column);
        }
    }
    return columns;
}

int open_results(driver *self, Py_ssize_t rows) {
    self->rows = 0;
    self->capacity = rows > 0 ? rows : 1;
    self->list = NULL;
    self->makers = PyMem_Calloc((size_t)self->width, sizeof *self->makers);
    if (self->makers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const char *types = PyBytes_AS_STRING(self->types), *nullable = PyBytes_AS_STRING(self->nullable);
    for (Py_ssize_t i = 0; i < self->width; i++) {
        if (open_maker(types[i], nullable[i], self->capacity, &self->makers[i]) != 0) return -1;
    }
    return 0;
}

void close_results(driver *self) {
    for (Py_ssize_t i = 0; self->makers != NULL && i < self->width; i++) release_maker(&self->makers[i]);
    PyMem_Free(self->makers);
    self->makers = NULL;
    Py_CLEAR(self->list);
}
