"""The trackers, and helpers to compare them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ftlayer.vertex.acker import AckerTable, ExactTracker, Tracker


@pytest.fixture(params=[AckerTable, ExactTracker])
def tracker(request: pytest.FixtureRequest) -> Tracker:
    make: Callable[[], Tracker] = request.param
    return make()


@pytest.fixture
def u64() -> Callable[..., np.ndarray]:
    return lambda *values: np.array(values, np.uint64)
