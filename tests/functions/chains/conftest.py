"""Loads what tests of chains share: modules of this directory, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _load(name: str) -> None:
    """Load it under its own name, by which the tests import it."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_load("chain_runs")
_load("stage_chains")
