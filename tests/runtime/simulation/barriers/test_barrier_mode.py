"""Whole jobs in barrier mode, whatever happens in whatever order: exactly once, and no end that never comes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("seed", range(3))
def test_nothing_fails(runs: Any, seed: int) -> None:
    runs.simple("counting", seed)
