/* ftlayer._native: kernels that must be fast from the first call inside a Spark Python worker.
 * Their Python signatures are in ftlayer/_native.pyi. */
#include "native.h"

#define TEXT_OF(macro) TEXT(macro)
#define TEXT(word) #word

#if defined(__clang__)
#define COMPILER __VERSION__
#elif defined(__GNUC__)
#define COMPILER "GCC " __VERSION__
#else
#define COMPILER "an unknown compiler"
#endif

#ifdef __GLIBC__
#define C_LIBRARY ", glibc " TEXT_OF(__GLIBC__) "." TEXT_OF(__GLIBC_MINOR__)
#else
#define C_LIBRARY ""
#endif

/* For reports of bugs: what this was compiled by, and against the headers of what. */
#define BUILD COMPILER C_LIBRARY ", Python " PY_VERSION

static PyMethodDef methods[] = {
    {"mix64", native_mix64, METH_VARARGS, NULL},
    {"child_ids", native_child_ids, METH_VARARGS, NULL},
    {"join_ids", native_join_ids, METH_VARARGS, NULL},
    {"root_ids", native_root_ids, METH_VARARGS, NULL},
    {"xor_fold", native_xor_fold, METH_VARARGS, NULL},
    {"xor_runs", native_xor_runs, METH_VARARGS, NULL},
    {"child_ordinals", native_child_ordinals, METH_VARARGS, NULL},
    {"xor_at", native_xor_at, METH_VARARGS, NULL},
    {"split_rows", native_split_rows, METH_VARARGS, NULL},
    {"read_records", native_read_records, METH_VARARGS, NULL},
    {"write_records", native_write_records, METH_VARARGS, NULL},
    {"msgpack_cost", native_msgpack_cost, METH_VARARGS, NULL},
    {"pack_plain", native_pack_plain, METH_O, NULL},
    {"pack_values", native_pack_values, METH_VARARGS, NULL},
    {"dict_part", native_dict_part, METH_VARARGS, NULL},
    {"plain_footprint", native_plain_footprint, METH_O, NULL},
    {"hash_column", native_hash_column, METH_VARARGS, NULL},
    {"mark_exit", native_mark_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "ftlayer._native",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (add_value_handle(made) != 0 || add_logged_lookup(made) != 0 || add_chain_driver(made) != 0 ||
                         add_key_index(made) != 0 || add_accumulators(made) != 0 || add_record_collector(made) != 0 ||
                         PyModule_AddStringConstant(made, "BUILD", BUILD) != 0)) {
        Py_CLEAR(made);
    }
    return made;
}
