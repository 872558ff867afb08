"""What the tests of topologies on Spark share: a vertex, the topology over growing logs, environments."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark import cloudpickle

from ftlayer import FTLayer, StreamEnvironment


def _load(name: str) -> ModuleType:
    """Load a script of this directory, which is no package; what slots run of it travels whole."""
    spec = importlib.util.spec_from_file_location(
        f"topologies_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Load a script of this directory by its name."""
    return _load


@pytest.fixture(scope="session")
def logs_kit() -> ModuleType:
    """The module `log_job`."""
    return _load("log_job")


@pytest.fixture(scope="session")
def vertex(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FTLayer]:
    """One embedded vertex for all topologies that do not harm it."""
    with FTLayer.embedded(tmp_path_factory.mktemp("vertex") / "ft") as layer:
        yield layer


@pytest.fixture
def connect(vertex: FTLayer) -> Iterator[Callable[..., FTLayer]]:
    """Return the shared vertex with other options."""
    opened = []

    def make(**options: Any) -> FTLayer:
        options = {"backoff": "20ms", "jitter": 0, "max_attempts": 3, **options}
        opened.append(FTLayer.connect(vertex.address, token=vertex.token, **options))
        return opened[-1]

    yield make
    for layer in opened:
        layer.close()


@pytest.fixture
def environment(spark: Any, connect: Callable[..., FTLayer], request: pytest.FixtureRequest) -> Any:
    """Make an environment on the shared session; what still runs at the end of a test is cancelled."""
    jobs = []

    class Environment(StreamEnvironment):
        def execute_async(self, **options: Any) -> Any:
            jobs.append(super().execute_async(**options))
            return jobs[-1]

    def make(layer: FTLayer | None = None, name: str = "", **options: Any) -> StreamEnvironment:
        name = name or request.node.name.replace("[", "-").replace("]", "")
        options = {"parallelism": 2, **options}
        return Environment(spark, connect() if layer is None else layer, name=name, **options)

    yield make
    for job in jobs:
        assert job.cancel(), job.status()
