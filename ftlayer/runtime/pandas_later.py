"""Keeps pyarrow from importing pandas for arrays that have nothing to do with it.

pyarrow imports pandas, if it is installed, when it makes or reads its first array, to know a Series when it is given
one. That is a quarter of a second in which a slot that was lost is not back yet. Here pyarrow is told that there is
none, and that there is as soon as anybody imports it: without pandas there is no Series.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa

_NAME = "pandas"


def leave_pandas_to_others() -> None:
    """Begin; does nothing if pandas has been imported, or this was called before."""
    if _NAME in sys.modules or any(isinstance(finder, _Watch) for finder in sys.meta_path):
        return
    watch = _Watch()
    sys.meta_path.insert(0, watch)
    pa.array([0])
    watch.refuses = False


class _Watch(importlib.abc.MetaPathFinder):
    """Sees pandas being imported; while it ``refuses``, there is none."""

    def __init__(self) -> None:
        self.refuses = True

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        if self.refuses:
            raise ModuleNotFoundError(f"{name} is not looked for yet", name=name)
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        return spec


class _Telling(importlib.abc.Loader):
    """Loads pandas, and has pyarrow look for it again."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Asked for the module itself, pyarrow tries again.
        pa.lib._pandas_api.pd  # noqa: B018
