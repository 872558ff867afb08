/* What the kernels share: typed views on Python buffers, the 64-bit mix, and the list of entry points.
 *
 * Every kernel takes contiguous one-dimensional buffers (NumPy arrays, say), checks their item type and
 * length, releases the GIL while it loops, and writes into a buffer that the caller allocated. */
#ifndef FTLAYER_NATIVE_H
#define FTLAYER_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ftlayer's kernels read Arrow's little-endian buffers in place"
#endif

typedef enum { ITEM_U64, ITEM_I64, ITEM_I32 } item_type;

typedef struct {
    Py_buffer buffer; /* buffer.obj is NULL when there is none */
    void *data;
    Py_ssize_t length;
} array_view;

/* Take a view of `object`; 0, or -1 with a TypeError that names the argument. */
int view_array(PyObject *object, const char *name, item_type type, int writable, array_view *view);
void release_array(array_view *view);

/* 0 when the view has `length` items, or -1 with a ValueError that names the argument. */
int check_length(const array_view *view, const char *name, Py_ssize_t length);

/* A Python int in 0..2**64-1; 0, or -1 with an error that names the argument. */
int read_u64(PyObject *object, const char *name, uint64_t *value);

/* Odd, 2**64 divided by the golden ratio: the increment of SplitMix64. */
#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)

/* The finalizer of SplitMix64 (Steele, Lea, Flood, 2014; constants: Stafford's "Mix13"). A bijection. */
static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

/* ids.c */
PyObject *native_mix64(PyObject *self, PyObject *args);
PyObject *native_child_ids(PyObject *self, PyObject *args);
PyObject *native_join_ids(PyObject *self, PyObject *args);
PyObject *native_root_ids(PyObject *self, PyObject *args);

/* fold.c */
PyObject *native_xor_fold(PyObject *self, PyObject *args);
PyObject *native_xor_runs(PyObject *self, PyObject *args);

/* emit.c */
PyObject *native_child_ordinals(PyObject *self, PyObject *args);
PyObject *native_xor_at(PyObject *self, PyObject *args);
PyObject *native_split_rows(PyObject *self, PyObject *args);

/* records.c; they hold the GIL, since they make and look at Python objects */
PyObject *native_read_records(PyObject *self, PyObject *args);
PyObject *native_write_records(PyObject *self, PyObject *args);

/* msgpack.c */
PyObject *native_msgpack_cost(PyObject *self, PyObject *args);

/* pack.c; they hold the GIL, since they look at Python objects */
PyObject *native_pack_plain(PyObject *self, PyObject *value);
PyObject *native_pack_values(PyObject *self, PyObject *args);

/* dict_part.c; it holds the GIL */
PyObject *native_dict_part(PyObject *self, PyObject *args);

/* footprint.c; it holds the GIL, since it looks at Python objects */
PyObject *native_plain_footprint(PyObject *self, PyObject *values);

/* keyhash.c */
PyObject *native_hash_column(PyObject *self, PyObject *args);

/* exits.c; it holds on to a buffer, and sets a byte of it when the process ends by exit() */
PyObject *native_mark_exit(PyObject *self, PyObject *args);

/* value_handle.c; adds the class DictValueHandle. 0, or -1 with an error */
int add_value_handle(PyObject *module);

/* logged_lookup.c; adds the class LoggedLookup. 0, or -1 with an error */
int add_logged_lookup(PyObject *module);

/* drive.c; adds the class ChainDriver. 0, or -1 with an error */
int add_chain_driver(PyObject *module);

/* collect.c; adds the class RecordCollector. 0, or -1 with an error */
int add_record_collector(PyObject *module);

/* key_index.c, accumulators.c; they add the classes KeyIndex and Accumulators. 0, or -1 with an error */
int add_key_index(PyObject *module);
int add_accumulators(PyObject *module);

#endif
