"""The C extension; everything else is in setup.cfg."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "ftlayer._native",
            sources=[
                "native/module.c",
                "native/buffers.c",
                "native/ids.c",
                "native/fold.c",
                "native/emit.c",
                "native/records.c",
                "native/collect.c",
                "native/column.c",
                "native/keyhash.c",
                "native/msgpack.c",
                "native/pack.c",
                "native/footprint.c",
                "native/dict_part.c",
                "native/exits.c",
                "native/value_handle.c",
                "native/logged_lookup.c",
                "native/known.c",
                "native/drive.c",
                "native/drive_record.c",
                "native/drive_results.c",
                "native/key_index.c",
                "native/accumulators.c",
                "native/accumulate.c",
            ],
            depends=[
                "native/native.h",
                "native/arrow_c.h",
                "native/column.h",
                "native/murmur3.h",
                "native/known.h",
                "native/drive.h",
                "native/undo.h",
                "native/plain_read.h",
                "native/dict_records.h",
                "native/plain_write.h",
                "native/accumulators.h",
            ],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
        )
    ]
)
