"""What the tests without a Spark session share: rows as a source gives them, pages read back, frames."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from ftlayer.common.clock import Now
from ftlayer.functions.data_sources import from_arrow_schema
from ftlayer.records.ids import tries_or_first
from ftlayer.spark.stages.pages import PageHead, ipc_to_rows, make_marks, roots_of
from ftlayer.spark.stages.task import FT, RootGiver
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Envelope
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore

FT_TYPE = pa.struct([("root", pa.int64())])
GIVER = RootGiver("q", "run", "files", 0, 0, 1)


def source_rows(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a source in the shape the first stage gets them: no root yet."""
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    return batch.append_column(FT, pa.nulls(len(rows), pa.binary()))


def delivered_rows(
    rows: list[dict[str, Any]],
    schema: pa.Schema,
    roots: list[int],
    start: int,
    end: int,
    origins: Any = None,
    tries: Any = None,
) -> pa.RecordBatch:
    """Rows as the vertex delivers them."""
    ids = np.array(roots, np.uint64)
    marks = make_marks(ids, start, end, ids if origins is None else origins, tries_or_first(tries, len(ids)))
    return pa.RecordBatch.from_pylist(rows, schema=schema).append_column(FT, marks)


def rooted_rows(rows: list[dict[str, Any]], schema: pa.Schema, roots: list[int]) -> pa.RecordBatch:
    """Rows behind the first stage."""
    ft = [{"root": root} for root in np.array(roots, np.uint64).view(np.int64).tolist()]
    return pa.RecordBatch.from_pylist(rows, schema=schema).append_column(FT, pa.array(ft, FT_TYPE))


class ReadPage:
    """A page read back."""

    def __init__(self, page: pa.RecordBatch) -> None:
        assert page.num_rows == 1
        head, data, source = (page.column(name)[0].as_py() for name in ("head", "data", "source"))
        self.head = PageHead.from_bytes(head)
        self.data = list(ipc_to_rows(data))
        self.source = list(ipc_to_rows(source))
        self.failed = [row for part in ipc_to_rows(self.head.failed_rows) for row in part.to_pylist()]

    @property
    def roots(self) -> list[int]:
        return [root for part in self.data for root in roots_of(part).tolist()]

    def column(self, name: str) -> list[Any]:
        return [value for part in self.data for value in part.column(name).to_pylist()]


class FakeFrame:
    """The little of a DataFrame that the running of a batch asks for, in this process."""

    def __init__(self, partitions: list[list[pa.RecordBatch]]) -> None:
        self.partitions = partitions

    def mapInArrow(self, function: Any, schema: Any) -> FakeFrame:
        done = []
        for number, part in enumerate(self.partitions):
            context = SimpleNamespace(
                partitionId=lambda number=number: number, stageId=lambda: 7, attemptNumber=lambda: 0
            )
            with patch("pyspark.TaskContext.get", return_value=context):
                done.append(list(function(iter(part))))
        return FakeFrame(done)

    @property
    def schema(self) -> Any:
        """Spark's schema of the rows."""
        batches = [batch for part in self.partitions for batch in part]
        return from_arrow_schema(batches[0].schema) if batches else StructType()

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def localCheckpoint(self, eager: bool) -> FakeFrame:
        return self

    def select(self, *columns: str) -> FakeFrame:
        return FakeFrame([[batch.select(columns) for batch in part] for part in self.partitions])

    def where(self, condition: str) -> FakeFrame:
        column, rest = condition.split(" ", 1)
        assert rest == "is not null"
        return FakeFrame(
            [[batch.filter(batch.column(column).is_valid()) for batch in part] for part in self.partitions]
        )

    def repartition(self, partitions: int) -> FakeFrame:
        rows = [
            batch.slice(row, 1) for part in self.partitions for batch in part for row in range(batch.num_rows)
        ]
        return FakeFrame([rows[start::partitions] for start in range(partitions)])

    def collect(self) -> list[tuple[Any, ...]]:
        return list(self.toLocalIterator())

    def toLocalIterator(self) -> Iterator[tuple[Any, ...]]:
        for part in self.partitions:
            for batch in part:
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    @property
    def _jdf(self) -> Any:
        rdd = SimpleNamespace(unpersist=lambda blocking: None)
        plan = SimpleNamespace(rdd=lambda: rdd)
        return SimpleNamespace(queryExecution=lambda: SimpleNamespace(logical=lambda: plan))


class Vertex:
    """A shard with its store, which outlives it; replies can get lost on the way."""

    def __init__(self, max_attempts: int = 3) -> None:
        """Dead letters are checked to have had ``max_attempts``."""
        self.max_attempts = max_attempts
        self.inner = MemoryStore()
        self.incarnation = 0
        self.mono, self.wall = 1_000_000, 1_700_000_000_000
        self.sequences: Counter[str] = Counter()
        self.lose: type[Any] | None = None
        self.restart_on_loss = False
        self.restart()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def now(self) -> Now:
        return Now(self.mono, self.wall)

    def restart(self) -> None:
        self.incarnation += 1
        self.layer = FTLayerCore(self, LayerOptions(), self.now)  # type: ignore[arg-type]

    def advance(self, ms: int) -> None:
        self.mono += ms
        self.wall += ms
        with self.inner.write(intake=False) as txn:
            self.layer.tick(txn, self.now)

    def call(self, call: Any, client: str) -> Any:
        """What a client and the service do: a reply that got lost is asked for again."""
        if isinstance(call, calls.ReadDeliveries | calls.QueryStatusCall | calls.ListRecords):
            with self.inner.read() as read:
                return self.layer.read(read, call, self.now)
        self.sequences[client] += 1
        envelope = Envelope(client, self.sequences[client])
        reply = self.apply(call, envelope)
        if self.lose is type(call):
            self.lose = None
            if self.restart_on_loss:
                self.restart()
            again = self.apply(call, envelope)
            if isinstance(reply, calls.QueryOpened):  # whose incarnation is that of who answers
                assert again == replace(reply, incarnation=self.incarnation)
            elif not isinstance(call, calls.BeginBatch | calls.Deliverable):
                assert again == reply
            return again
        return reply

    def apply(self, call: Any, envelope: Envelope) -> Any:
        with self.inner.write(intake=False) as txn:
            outcome = self.layer.apply(txn, call, envelope, self.now)
        outcome.after()
        return outcome.reply

    def values(self, state: str) -> Counter[int]:
        """The payloads of all records in a state; those of the dead tell that they used their attempts."""
        found: Counter[int] = Counter()
        after = b""
        while True:
            page = self.call(calls.ListRecords(state, "", 100, after), "")
            for record in page.records:
                found[record.payload.column("v")[0].as_py()] += 1
                assert len(record.history) == (record.attempt if state == "dead" else record.attempt - 1)
                assert state != "dead" or record.attempt == self.max_attempts
            after = page.more
            if not after:
                return found


def read_pages(pages: Iterable[pa.RecordBatch]) -> list[ReadPage]:
    return [ReadPage(page) for page in pages]


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    return SimpleNamespace(
        source_rows=source_rows,
        delivered_rows=delivered_rows,
        rooted_rows=rooted_rows,
        read_pages=read_pages,
        FakeFrame=FakeFrame,
        GIVER=GIVER,
        Vertex=Vertex,
        u64=lambda values: np.array(list(values), np.uint64),
    )


def _load(name: str) -> None:
    """Load a module of this directory, which is no package, under its own name."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_load("simulated_query")
