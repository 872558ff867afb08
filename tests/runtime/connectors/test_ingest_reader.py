"""Records that cannot be had again, kept by a vertex until a completed checkpoint has read them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.config import VertexOptions
from ftlayer.errors import SourceError, StaleOwnerError, VertexUnavailableError
from ftlayer.functions.data_sources import ReadAllAvailable, ReadMaxRows
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import SourceCheckpoints
from ftlayer.runtime.driver.planners import ReaderPlanner
from ftlayer.runtime.driver.rules.planner_rules import KeptRanges, SubtaskDown, SubtaskUp
from ftlayer.spark.deliveries import ingest_reader
from ftlayer.spark.deliveries.ingest_reader import IngestReader
from ftlayer.topology.operators import ReaderSource, Source
from ftlayer.vertex.calls import BeginBatch, Commit, Ingest, OpenQuery, OpenStream, Seal
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.embedded import EmbeddedVertex

ID = pa.schema([("id", pa.int64())])
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def vertex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedVertex]:
    with EmbeddedVertex(VertexOptions(tmp_path_factory.mktemp("vertex"))) as vertex:
        yield vertex


class Maker:
    """Makes clients and readers of a stream of this test's own."""

    def __init__(self, vertex: EmbeddedVertex) -> None:
        self.vertex = vertex
        self.stream = f"ingest/orders{next(NUMBERS)}"
        self.clients: list[VertexClient] = []

    def client(self) -> VertexClient:
        client = VertexClient(self.vertex.address, self.vertex.token, deadline_ms=20_000)
        self.clients.append(client)
        return client

    def reader(self, owner: str = "job", client: VertexClient | None = None) -> IngestReader:
        return IngestReader(client or self.client(), self.stream, f"topology/{owner}/{self.stream}")


@pytest.fixture
def make(vertex: EmbeddedVertex) -> Iterator[Maker]:
    maker = Maker(vertex)
    maker.client().call(OpenStream(maker.stream))
    yield maker
    for client in maker.clients:
        client.close()


class Orders:
    def __init__(self, maker: Maker) -> None:
        self.client, self.stream, self.count = maker.client(), maker.stream, 0

    def put(self, rows: int) -> None:
        numbers = list(range(self.count, self.count + rows))
        self.client.call(Ingest(self.stream, pa.record_batch({"id": numbers}, schema=ID)))
        self.count += rows


@pytest.fixture
def orders(make: Maker) -> Orders:
    return Orders(make)


def rows(reader: IngestReader, start: Any, end: Any) -> list[int]:
    copy = pickle.loads(pickle.dumps(reader))
    return [
        row
        for split in reader.partitions(start, end)
        for batch in copy.read(split)
        for row in batch.column(0).to_pylist()
    ]


def test_it_is_read_by_offsets_and_removed_on_commit(make: Maker, orders: Orders) -> None:
    source = make.reader()
    start = source.initialOffset()
    assert source.latestOffset(start, ReadAllAvailable()) == start == {"next": 0}
    orders.put(10)
    orders.put(5)
    assert source.latestOffset(start, ReadMaxRows(7)) == {"next": 7}
    end = source.latestOffset(start, ReadAllAvailable())
    assert rows(source, start, end) == rows(source, start, end) == list(range(15))
    source.commit({"next": 12})
    source.commit({"next": 12})
    source.commit({"next": 3})
    assert source.latestOffset({"next": 12}, ReadMaxRows(100)) == {"next": 15}
    assert rows(source, {"next": 12}, end) == [12, 13, 14]
    with pytest.raises(SourceError, match=r"records 3 to 15 of it are not all there any more"):
        rows(source, {"next": 3}, end)
    source.commit(end)
    orders.put(2)
    assert rows(source, end, source.latestOffset(end, ReadMaxRows(9))) == [15, 16]


@pytest.mark.parametrize("removed", [0, 4, 9, 10])
def test_a_fresh_start_begins_with_what_is_there(make: Maker, orders: Orders, removed: int) -> None:
    orders.put(10)
    make.reader().commit({"next": removed})
    source = make.reader()
    start = source.initialOffset()
    assert rows(source, start, source.latestOffset(start, ReadAllAvailable())) == list(range(removed, 10))


def test_a_driver_that_was_taken_over_removes_nothing(make: Maker, orders: Orders) -> None:
    orders.put(10)
    old = make.reader()
    old.commit({"next": 2})
    new = make.reader()
    new.commit({"next": 4})
    with pytest.raises(StaleOwnerError):
        old.commit({"next": 8})
    assert rows(new, {"next": 4}, {"next": 10}) == list(range(4, 10))


def test_another_topology_is_refused(make: Maker, orders: Orders) -> None:
    make.reader().initialOffset()
    with pytest.raises(StaleOwnerError):
        make.reader("other").initialOffset()


@pytest.mark.parametrize("where", [Seal, Commit])
def test_a_driver_that_dies_while_it_removes(make: Maker, orders: Orders, where: type) -> None:
    orders.put(10)
    client = make.client()
    source = make.reader(client=client)
    source.initialOffset()
    call = client.call

    def dies(what: Any, **more: Any) -> Any:
        answer = call(what, **more)
        if isinstance(what, where):
            raise ConnectionError
        return answer

    client.call = dies  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        source.commit({"next": 6})
    after = make.reader()
    assert rows(after, {"next": 6}, {"next": 10}) == [6, 7, 8, 9]
    after.commit({"next": 6})
    assert after.initialOffset() == {"next": 6}


@pytest.mark.parametrize("where", [OpenQuery, BeginBatch, Seal, Commit])
@pytest.mark.parametrize("arrived", [False, True])
def test_a_vertex_that_is_away_while_records_are_removed(
    make: Maker, orders: Orders, where: type, arrived: bool
) -> None:
    """The driver lives, and goes on with a later checkpoint."""
    orders.put(10)
    client = make.client()
    source = make.reader(client=client)
    call = client.call
    broken = []

    def breaks(what: Any, **more: Any) -> Any:
        if not isinstance(what, where) or broken:
            return call(what, **more)
        broken.append(what)
        if arrived:
            call(what, **more)
        raise VertexUnavailableError("away")

    client.call = breaks  # type: ignore[method-assign]
    with pytest.raises(VertexUnavailableError):
        source.commit({"next": 6})
    source.commit({"next": 8})
    assert rows(source, {"next": 8}, {"next": 10}) == [8, 9]
    assert make.reader().initialOffset() == {"next": 8}


def test_ranges_are_cut_into_splits(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_reader, "SPLIT_ROWS", 4)
    splits: list[Any] = list(make.reader().partitions({"next": 3}, {"next": 13}))
    assert [(split.first, split.end) for split in splits] == [(3, 7), (7, 11), (11, 13)]


def test_as_a_source_of_a_topology(
    make: Maker, orders: Orders, driver: Any, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, restored, and removed: what is pushed comes once, whichever checkpoint it goes on from."""
    monkeypatch.setattr(ingest_reader, "SPLIT_ROWS", 4)
    inbox: list[Any] = []
    source = Source("orders", ReaderSource(make.reader()), ID)

    def failed(uid: str, error: Exception) -> None:
        raise error

    opened_ranges: list[SourceCheckpoints] = []

    def opened(source: Source, happened: Any) -> KeptRanges:
        opened_ranges.append(SourceCheckpoints(source.uid, happened))
        return KeptRanges(opened_ranges[-1].keeper)

    planner = ReaderPlanner(source, 1, keeper=opened, key=key, send=inbox.append, failed=failed)
    [ranges] = opened_ranges
    planner.start()
    checkpoint: tuple[dict[str, bytes], bytes | None, list[int]] = ({}, None, [])
    for _ in range(4):
        orders.put(10)
        planner.handle(SubtaskDown(0))
        ranges.restore(*checkpoint[:2])
        inbox.clear()
        slot = driver.open(source, positions=checkpoint[0], rows=3)
        slot.start()
        planner.handle(SubtaskUp(0))
        positions, seen = dict(checkpoint[0]), list(checkpoint[2])

        def all_read(slot: Any = slot, positions: Any = positions, seen: Any = seen) -> bool:
            while inbox:
                slot.assign(inbox.pop(0))
            taken = slot.take(10**15)
            if taken is not None:
                positions[taken.position.partition] = taken.position.end
                seen.extend(taken.payload.column(0).to_pylist())
                if (done := slot.accepted(taken)) is not None:
                    planner.handle(done)
            return len(seen) >= orders.count - 3

        driver.until(all_read)
        assert seen == list(range(len(seen)))
        captured = ranges.capture(positions)
        ranges.completed(captured)
        checkpoint = (positions, captured, seen)
    planner.close()
