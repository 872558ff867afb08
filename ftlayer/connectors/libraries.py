from __future__ import annotations

from importlib import import_module
from typing import Any

from ftlayer.errors import ConfigError, install


def client_library(system: str, library: str, extra: str, *modules: str) -> Any:
    """Return the first of these modules; the others are imported too. Raises `ConfigError`, which names the extra.

    ``system`` is what needs them, ``library`` their name for people: ``"Redis"``, ``"redis-py"``.
    """
    try:
        first, *_ = map(import_module, modules)
    except ImportError as error:
        raise ConfigError(
            f"{system} needs {library} where driver and slots run: {install(extra)} ({error})"
        ) from error
    return first
