/* What an emitter needs for whole batches: the number of each child among its parent's, XORs scattered to
 * parents, and rows put in the order of their channels. */
#include "native.h"

#include <string.h>

static int check_index(int64_t index, Py_ssize_t length) { return index >= 0 && index < (int64_t)length; }

/* child_ordinals(parents, counts, out): out[i] = counts[parents[i]]++ */
PyObject *native_child_ordinals(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *parents_object, *counts_object, *out_object;
    if (!PyArg_ParseTuple(args, "OOO:child_ordinals", &parents_object, &counts_object, &out_object)) return NULL;
    array_view parents = {0}, counts = {0}, out = {0};
    PyObject *result = NULL;
    if (view_array(parents_object, "parents", ITEM_I64, 0, &parents) == 0 &&
        view_array(counts_object, "counts", ITEM_U64, 1, &counts) == 0 &&
        view_array(out_object, "out", ITEM_U64, 1, &out) == 0 && check_length(&out, "out", parents.length) == 0) {
        const int64_t *parent = parents.data;
        uint64_t *count = counts.data, *ordinal = out.data;
        Py_ssize_t i = 0;
        Py_BEGIN_ALLOW_THREADS
        for (; i < parents.length && check_index(parent[i], counts.length); i++) ordinal[i] = count[parent[i]]++;
        Py_END_ALLOW_THREADS
        if (i < parents.length) {
            PyErr_Format(PyExc_IndexError, "parents[%zd] is %lld, and there are %zd records", i, (long long)parent[i],
                         counts.length);
        } else {
            result = Py_NewRef(Py_None);
        }
    }
    release_array(&parents);
    release_array(&counts);
    release_array(&out);
    return result;
}

/* xor_at(folded, places, values): folded[places[i]] ^= values[i] */
PyObject *native_xor_at(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *folded_object, *places_object, *values_object;
    if (!PyArg_ParseTuple(args, "OOO:xor_at", &folded_object, &places_object, &values_object)) return NULL;
    array_view folded = {0}, places = {0}, values = {0};
    PyObject *result = NULL;
    if (view_array(folded_object, "folded", ITEM_U64, 1, &folded) == 0 &&
        view_array(places_object, "places", ITEM_I64, 0, &places) == 0 &&
        view_array(values_object, "values", ITEM_U64, 0, &values) == 0 &&
        check_length(&values, "values", places.length) == 0) {
        const int64_t *place = places.data;
        const uint64_t *value = values.data;
        uint64_t *fold = folded.data;
        Py_ssize_t i = 0;
        Py_BEGIN_ALLOW_THREADS
        for (; i < places.length && check_index(place[i], folded.length); i++) fold[place[i]] ^= value[i];
        Py_END_ALLOW_THREADS
        if (i < places.length) {
            PyErr_Format(PyExc_IndexError, "places[%zd] is %lld, and folded has %zd items", i, (long long)place[i],
                         folded.length);
        } else {
            result = Py_NewRef(Py_None);
        }
    }
    release_array(&folded);
    release_array(&places);
    release_array(&values);
    return result;
}

/* Counting sort: counts go into `ends` first, then become the place of each channel's next row. */
static Py_ssize_t sort_rows(const int32_t *channel, Py_ssize_t rows, int64_t *order, int64_t *ends,
                            Py_ssize_t channels) {
    memset(ends, 0, (size_t)channels * sizeof *ends);
    for (Py_ssize_t i = 0; i < rows; i++) {
        if (!check_index(channel[i], channels)) return i;
        ends[channel[i]]++;
    }
    int64_t start = 0;
    for (Py_ssize_t c = 0; c < channels; c++) {
        int64_t count = ends[c];
        ends[c] = start;
        start += count;
    }
    for (Py_ssize_t i = 0; i < rows; i++) order[ends[channel[i]]++] = i;
    return rows;
}

/* split_rows(selection, order, ends): the rows of channel c, in their order, are order[ends[c - 1]:ends[c]]. */
PyObject *native_split_rows(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *selection_object, *order_object, *ends_object;
    if (!PyArg_ParseTuple(args, "OOO:split_rows", &selection_object, &order_object, &ends_object)) return NULL;
    array_view selection = {0}, order = {0}, ends = {0};
    PyObject *result = NULL;
    if (view_array(selection_object, "selection", ITEM_I32, 0, &selection) == 0 &&
        view_array(order_object, "order", ITEM_I64, 1, &order) == 0 &&
        view_array(ends_object, "ends", ITEM_I64, 1, &ends) == 0 &&
        check_length(&order, "order", selection.length) == 0) {
        Py_ssize_t sorted;
        Py_BEGIN_ALLOW_THREADS
        sorted = sort_rows(selection.data, selection.length, order.data, ends.data, ends.length);
        Py_END_ALLOW_THREADS
        if (sorted < selection.length) {
            PyErr_Format(PyExc_IndexError, "selection[%zd] is %d, and there are %zd channels", sorted,
                         (int)((const int32_t *)selection.data)[sorted], ends.length);
        } else {
            result = Py_NewRef(Py_None);
        }
    }
    release_array(&selection);
    release_array(&order);
    release_array(&ends);
    return result;
}
