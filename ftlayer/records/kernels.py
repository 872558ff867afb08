"""The C extension, or one sentence about how to get it."""

from __future__ import annotations

from pathlib import Path

from ftlayer.errors import MachineError

_SOURCE = Path(__file__).resolve().parents[2]


def _how_to_get_it() -> str:
    if (_SOURCE / "setup.py").exists():
        return (
            f"Python took ftlayer from its source directory {_SOURCE}, where the extension was not built: run "
            "`pip install -e .` there (it needs a C compiler and Python's headers), or start Python from another "
            "directory, with the ftlayer that pip has installed"
        )
    return "install ftlayer again: from a wheel, or with a C compiler and Python's headers"


try:
    from ftlayer import _native as native
except ImportError as error:
    raise MachineError(
        f"ftlayer's C extension is missing or cannot be loaded ({error}); {_how_to_get_it()}"
    ) from error

__all__ = ["native"]
