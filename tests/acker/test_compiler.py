"""Kernels compile where nothing can be cached, and say so once."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.vertex.acker import compiler


def test_without_a_place_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_place(_function: Any) -> Any:
        # Each reason is told once in a process.
        raise RuntimeError("cannot cache function 'f': no locator available for file 'the_test_of_this.py'")

    monkeypatch.setattr(compiler, "_KernelCache", without_place)
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        doubled = compiler.kernel(lambda number: number * 2)
    assert doubled(21) == 42
