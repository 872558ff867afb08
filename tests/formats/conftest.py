"""What the tests of fixtures share: the programs that have written them, and what there is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pyspark import cloudpickle

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def programs(load_module: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    """The programs; what workers run of them travels whole."""
    module = load_module(HERE / "programs.py")
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
