from __future__ import annotations

from importlib import import_module
from typing import Any

from ftlayer.errors import ConfigError, install


def client_library(module: str, system: str, library: str, extra: str) -> Any:
    """Return a module. Raises `ConfigError`, which names the extra, if it is missing.

    ``system`` is what needs it, ``library`` its name for people: ``"Redis"``, ``"redis-py"``.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{system} needs {library} where driver and slots run: {install(extra)} ({error})"
        ) from error
