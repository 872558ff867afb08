"""Whether what the console needs beside ftlayer is installed."""

from __future__ import annotations

from importlib.util import find_spec

from ftlayer.errors import MachineError

PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "jinja2": "jinja2",
    "python_multipart": "python-multipart",
}


def check_extra() -> None:
    """Raise `MachineError` that says what to install, where something is missing."""
    missing = [name for module, name in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise MachineError(f"the console needs {', '.join(missing)}: pip install 'ftlayer[console]'")
