"""Loads what simulations of barrier mode are made of: modules of this directory, which is no package."""

from __future__ import annotations

import importlib.util
import sys
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
    "barrier_faults",
    "barrier_sources",
    "barrier_driver",
    "barrier_standins",
    "barrier_moves",
    "barrier_world",
    "barrier_runs",
)


def _load(name: str) -> ModuleType:
    """Load it under its own name, by which functions and writers are pickled, and the modules find each other."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def runs() -> ModuleType:
    """Return the module `barrier_runs`."""
    return [_load(name) for name in MODULES][-1]
