"""The C extension, or one sentence about how to get it."""

from __future__ import annotations

from ftlayer.errors import MachineError

try:
    from ftlayer import _native as native
except ImportError as error:
    raise MachineError(
        f"ftlayer's C extension is missing or cannot be loaded ({error}); "
        "run `pip install .` in ftlayer's directory (needs a C compiler and Python's headers)"
    ) from error

__all__ = ["native"]
