/* XOR of values grouped by root, for the worker's side: one delta per root leaves a task. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    array_view roots, values, unique, folded;
} fold_args;

static void release_fold_args(fold_args *fold) {
    release_array(&fold->roots);
    release_array(&fold->values);
    release_array(&fold->unique);
    release_array(&fold->folded);
}

static int read_fold_args(PyObject *args, const char *format, fold_args *fold) {
    PyObject *roots, *values, *unique, *folded;
    memset(fold, 0, sizeof *fold);
    if (!PyArg_ParseTuple(args, format, &roots, &values, &unique, &folded)) return -1;
    if (view_array(roots, "roots", ITEM_U64, 0, &fold->roots) == 0 &&
        view_array(values, "values", ITEM_U64, 0, &fold->values) == 0 &&
        view_array(unique, "unique", ITEM_U64, 1, &fold->unique) == 0 &&
        view_array(folded, "folded", ITEM_U64, 1, &fold->folded) == 0 &&
        check_length(&fold->values, "values", fold->roots.length) == 0 &&
        check_length(&fold->unique, "unique", fold->roots.length) == 0 &&
        check_length(&fold->folded, "folded", fold->roots.length) == 0) {
        return 0;
    }
    release_fold_args(fold);
    return -1;
}

static Py_ssize_t fold_runs(const uint64_t *roots, const uint64_t *values, uint64_t *unique, uint64_t *folded,
                            Py_ssize_t n) {
    Py_ssize_t groups = 0;
    for (Py_ssize_t i = 0; i < n;) {
        uint64_t root = roots[i], value = 0;
        for (; i < n && roots[i] == root; i++) value ^= values[i];
        unique[groups] = root;
        folded[groups++] = value;
    }
    return groups;
}

/* Open addressing with linear probing; a slot holds 1 + the index of its group, 0 when free. The table
 * has at least twice as many slots as rows. -1 when there is no memory for it. */
static Py_ssize_t fold_any_order(const uint64_t *roots, const uint64_t *values, uint64_t *unique, uint64_t *folded,
                                 Py_ssize_t n) {
    unsigned bits = 4;
    while (((size_t)1 << bits) < 2 * (size_t)n) bits++;
    uint32_t *slots = calloc((size_t)1 << bits, sizeof *slots);
    if (slots == NULL) return -1;
    size_t mask = ((size_t)1 << bits) - 1;
    uint32_t groups = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t root = roots[i];
        size_t slot = (root * GOLDEN) >> (64 - bits);
        while (slots[slot] != 0 && unique[slots[slot] - 1] != root) slot = (slot + 1) & mask;
        if (slots[slot] == 0) {
            unique[groups] = root;
            folded[groups] = values[i];
            slots[slot] = ++groups;
        } else {
            folded[slots[slot] - 1] ^= values[i];
        }
    }
    free(slots);
    return (Py_ssize_t)groups;
}

PyObject *native_xor_fold(PyObject *self, PyObject *args) {
    (void)self;
    fold_args fold;
    if (read_fold_args(args, "OOOO:xor_fold", &fold) != 0) return NULL;
    Py_ssize_t groups;
    if (fold.roots.length >= (Py_ssize_t)UINT32_MAX) {
        release_fold_args(&fold);
        PyErr_SetString(PyExc_ValueError, "roots must have fewer than 2**32 - 1 items");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    groups = fold_any_order(fold.roots.data, fold.values.data, fold.unique.data, fold.folded.data, fold.roots.length);
    Py_END_ALLOW_THREADS
    release_fold_args(&fold);
    return groups < 0 ? PyErr_NoMemory() : PyLong_FromSsize_t(groups);
}

PyObject *native_xor_runs(PyObject *self, PyObject *args) {
    (void)self;
    fold_args fold;
    if (read_fold_args(args, "OOOO:xor_runs", &fold) != 0) return NULL;
    Py_ssize_t groups;
    Py_BEGIN_ALLOW_THREADS
    groups = fold_runs(fold.roots.data, fold.values.data, fold.unique.data, fold.folded.data, fold.roots.length);
    Py_END_ALLOW_THREADS
    release_fold_args(&fold);
    return PyLong_FromSsize_t(groups);
}
