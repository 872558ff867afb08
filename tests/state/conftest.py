"""A storage in memory, as state backends see it: a module of this directory, which is no package."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

_spec = spec_from_file_location("memory_storage", Path(__file__).with_name("memory_storage.py"))
assert _spec is not None
assert _spec.loader is not None
sys.modules["memory_storage"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["memory_storage"])

from memory_storage import MemoryStorage  # noqa: E402


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def make_storage() -> type[MemoryStorage]:
    return MemoryStorage
