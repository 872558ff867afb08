"""Loads what simulations of barrier mode are made of: modules of this directory, which is no package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

MODULES = (
    "barrier_outside",
    "barrier_topologies",
    "barrier_plans",
    "barrier_parts",
    "barrier_storage",
    "barrier_process",
    "barrier_boxes",
    "barrier_faults",
    "barrier_letters",
    "barrier_sources",
    "barrier_driver",
    "barrier_standins",
    "barrier_moves",
    "barrier_world",
    "barrier_failing",
    "barrier_runs",
)


@pytest.fixture(scope="session")
def runs(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Return the module `barrier_runs`."""
    return [load_module(Path(__file__).with_name(f"{name}.py")) for name in MODULES][-1]
