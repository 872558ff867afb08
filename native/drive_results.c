/* The results of a chain's functions, as the buffers of Arrow's columns; as a list once one of them is not plain. */
#include "drive.h"

static int grow(driver *self) {
    Py_ssize_t wanted = 2 * self->capacity;
    for (Py_ssize_t i = 0; i < self->width; i++) {
        if (grow_maker(&self->makers[i], self->capacity, wanted) != 0) return -1;
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

static int try_to_put(driver *self, PyObject *result) {
    if (self->list == NULL) {
        if (self->rows == self->capacity && grow(self) != 0) return -1;
        fit found = self->names != NULL ? put_dict(self->makers, self->names, result, self->rows, self->capacity, self->lax)
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

int put_result(driver *self, PyObject *result) {
    int found = try_to_put(self, result);
    /* Columns are of different lengths now, or gone. */
    if (found != 0 && PyErr_ExceptionMatches(PyExc_MemoryError)) self->is_broken = 1;
    return found;
}

int take_back(driver *self, Py_ssize_t rows) {
    Py_ssize_t behind = self->rows;
    self->rows = rows;
    if (self->list != NULL) return PyList_SetSlice(self->list, rows, behind, NULL);
    for (Py_ssize_t i = 0; i < self->width; i++) shorten_maker(&self->makers[i], rows, behind);
    return 0;
}

PyObject *finished_results(driver *self) {
    if (self->list != NULL) return Py_NewRef(self->list);
    PyObject *columns = PyList_New(self->width);
    for (Py_ssize_t i = 0; columns != NULL && i < self->width; i++) {
        PyObject *column = column_of(&self->makers[i], self->rows);
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
    self->is_broken = 0;
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
