"""Loads what the world of an exact job is made of: modules of this directory, which is no package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

MODULES = ("once_outside", "once_slots", "once_world", "once_walk")


@pytest.fixture(scope="session")
def once(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Return the module `once_walk`."""
    return [load_module(Path(__file__).with_name(f"{name}.py")) for name in MODULES][-1]


@pytest.fixture(scope="session", name="_played_job")
def played_job(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(Path(__file__).with_name("played_job.py"))


@pytest.fixture
def play(_played_job: ModuleType) -> Iterator[ModuleType]:
    """Return the module `played_job`; its jobs end with the test."""
    yield _played_job
    _played_job.end_all()
