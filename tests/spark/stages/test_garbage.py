"""A Python worker's imports are left out of garbage collections, once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from ftlayer.spark.stages.task import leave_out_imports


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    gc.unfreeze()
    leave_out_imports.cache_clear()
    yield
    gc.unfreeze()
    leave_out_imports.cache_clear()


def collected() -> set[int]:
    return {id(each) for each in gc.get_objects()}


def test_what_is_there_is_left_out_and_what_comes_later_is_not() -> None:
    kept: list[Any] = [[]]
    leave_out_imports()
    later: list[Any] = [[]]
    seen = collected()
    assert id(kept) not in seen
    assert id(later) in seen
    leave_out_imports()
    assert id(later) in collected()
