"""What the feature tests share: one vertex, streams of small files, a sink that keeps rows, calls that fail once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle

from ftlayer.spark.facade import FTLayer, list_records
from ftlayer.vertex.calls import RecordInfo

# Spark's workers cannot import the tests: their functions travel whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT_S = 600


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def vertex(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FTLayer]:
    """One embedded vertex for all feature tests that do not harm it."""
    directory = tmp_path_factory.mktemp("vertex") / "ft"
    layer = FTLayer.embedded(
        directory, durability="none", persist_timeout_ms=1_500, backoff="20ms", jitter=0, max_attempts=3
    )
    with layer:
        yield layer


@pytest.fixture
def layer(vertex: FTLayer) -> FTLayer:
    return vertex


@pytest.fixture
def connect(vertex: FTLayer) -> Iterator[Callable[..., FTLayer]]:
    """Return the same vertex with other options."""
    opened = []

    def make(**options: Any) -> FTLayer:
        options = {"backoff": "20ms", "jitter": 0, "max_attempts": 3, **options}
        opened.append(FTLayer.connect(vertex.address, token=vertex.token, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


class Kept:
    """A sink that keeps each batch's rows in the driver, as one that overwrites by batch id does."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Any]] = {}
        self.calls = 0

    def __call__(self, rows: Any, batch: int) -> None:
        self.calls += 1
        self.batches[batch] = rows.collect()

    @property
    def rows(self) -> list[Any]:
        return [row for batch in self.batches.values() for row in batch]

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


@pytest.fixture
def kept() -> Kept:
    return Kept()


class Once:
    """``first(key)`` is true the first time any process asks for ``key``."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)

    def first(self, key: Any) -> bool:
        return self.times(key, 1)

    def times(self, key: Any, times: int) -> bool:
        """Whether this is one of the first ``times`` questions for ``key``."""
        for number in range(times):
            try:
                os.close(os.open(f"{self.directory}/{key}-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False


@pytest.fixture
def once(tmp_path: Path) -> Once:
    directory = tmp_path / "once"
    directory.mkdir()
    return Once(directory)


class Rows:
    """Streams over parquet files in ``directory``; `add` brings rows in, a file a call."""

    def __init__(self, spark: Any, directory: Path) -> None:
        self.spark = spark
        self.directory = directory
        self._files = 0
        directory.mkdir()

    def add(self, rows: list[dict[str, Any]] | pa.Table, schema: pa.Schema | None = None) -> Rows:
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=schema)
        hidden = self.directory / f".{self._files}"
        pq.write_table(table, hidden)
        hidden.rename(self.directory / f"{self._files}.parquet")
        self._files += 1
        return self

    def stream(self, schema: Any, **options: Any) -> Any:
        return self.spark.readStream.schema(schema).options(**options).parquet(str(self.directory))


@pytest.fixture
def rows(spark: Any, tmp_path: Path) -> Rows:
    return Rows(spark, tmp_path / "rows")


@pytest.fixture
def numbers(rows: Rows) -> Any:
    """A stream of ``n bigint`` from 0 to 99."""
    return rows.add([{"n": n} for n in range(100)]).stream("n bigint")


@pytest.fixture
def logs(spark: Any, apache_log: Path) -> Any:
    """A stream of the lines of an Apache server's error logs."""
    return spark.readStream.format("text").load(str(apache_log))


@pytest.fixture(scope="session")
def logged(apache_log: Path) -> list[str]:
    """The lines that `logs` streams."""
    return [line for path in apache_log.iterdir() for line in path.read_text().splitlines()]


def finish(query: Any) -> Any:
    """Wait until a bounded query has ended."""
    try:
        assert query.awaitTermination(WAIT_S), f"the query has not ended: {query.ft_status()}"
    finally:
        query.stop()
    return query


def run(stream: Any, sink: Any, checkpoint: Path) -> Any:
    """Run all that a stream has, replays included; return the handle."""
    return finish(stream.sink(sink, checkpoint=str(checkpoint)).trigger(availableNow=True).start())


def until(condition: Callable[[], Any], what: str = "what the test waits for") -> Any:
    """Wait until ``condition()`` is true; return its value."""
    deadline = time.monotonic() + WAIT_S
    pause = time.sleep
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        pause(0.02)
    return value


def dead_of(layer: FTLayer, source: str) -> list[RecordInfo]:
    """List the dead letters of a source by its name."""
    return [info for info in list_records(layer.client, "dead") if info.stream.split("/")[-1] == source]


@pytest.fixture
def tools(tmp_path: Path) -> SimpleNamespace:
    """``run(stream, sink)``, ``finish(query)``, ``until(condition)``, ``dead_of(layer, source)``."""
    return SimpleNamespace(
        run=lambda stream, sink: run(stream, sink, tmp_path / "checkpoint"),
        checkpoint=str(tmp_path / "checkpoint"),
        finish=finish,
        until=until,
        dead_of=dead_of,
    )
