"""The C extension; everything else is in setup.cfg."""

import os
import subprocess
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

INSTALL = """\
(Debian, Ubuntu: apt install gcc libc6-dev python3-dev; Fedora: dnf install gcc python3-devel; macOS: xcode-select \
--install), or install a wheel of ftlayer, which needs no compiler"""

PROBE = """\
#ifndef __has_include
#define __has_include(header) 1
#endif
#if __has_include(<stdlib.h>)
stdlib_is_there
#endif
#if __has_include(<Python.h>)
python_is_there
#endif
"""
"""The preprocessor says which headers there are, and has nothing to complain of. An old one may not know how to ask."""


class BuildExtensionFirst(build):
    """Builds the extension before all else: what it lacks is said before hundreds of files are copied."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


class BuildWithCompiler(build_ext):
    """Says in one sentence what a machine lacks; what a compiler says of the sources themselves is left as it is."""

    def build_extensions(self) -> None:
        """Build them, if there is what it takes."""
        lack = self.what_is_missing()
        if lack:
            raise PlatformError(f"ftlayer has a C extension, and {lack}: install what builds it {INSTALL}.")
        super().build_extensions()

    def what_is_missing(self) -> str:
        """Return what there is not, as half a sentence; "" if all is there."""
        compiler = self.compiler.compiler_so
        includes = [f"-I{directory}" for directory in self.compiler.include_dirs]
        with tempfile.TemporaryDirectory() as directory:
            probe = Path(directory, "probe.c")
            probe.write_text(PROBE)
            try:
                done = subprocess.run(
                    [*compiler, *includes, "-E", str(probe)],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    env={**os.environ, "LC_ALL": "C"},
                )
            except OSError as error:
                return f"there is no C compiler here ({compiler[0]}: {error.strerror})"
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return f"the C compiler {compiler[0]} does not work ({said[0].strip()})"
        if "stdlib_is_there" not in done.stdout:
            return f"the C compiler {compiler[0]} finds no headers of the C library"
        if "python_is_there" not in done.stdout:
            return f"the C compiler {compiler[0]} finds no Python.h, the headers of this Python"
        return ""


setup(
    cmdclass={"build": BuildExtensionFirst, "build_ext": BuildWithCompiler},
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
    ],
)
