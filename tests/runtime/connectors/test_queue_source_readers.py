"""A queue as a source of a slot: what its thread fetches, holds back and acknowledges. The queue is a list."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import SourceError, SourceRowError
from ftlayer.runtime.connectors import readers as queue_reader
from ftlayer.runtime.connectors.lane import READY_BATCHES, BatchLimits
from ftlayer.runtime.connectors.offset_reader import partition_key
from ftlayer.runtime.connectors.readers import open_reader
from ftlayer.topology.operators import Fetched, Member, Queue, QueueSource, Source

ID = pa.schema([("id", pa.int64())])


class Broker(Queue):
    """Numbers, and what was done with them."""

    schema = ID
    ids: pa.Array | None = None

    def __init__(self, count: int = 0, of: int | None = None) -> None:
        self.count = count
        self.of = of
        self.fetches = 0
        self.wake_ups = 0
        self.asked: list[int] = []
        self.acknowledged: list[int] = []
        self.opened: list[tuple[Member, Mapping[int, bytes], bool]] = []
        self.closed = threading.Event()
        self.fail: BaseException | None = None
        self.at = 0
        self.is_away = False

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> Broker:
        self.opened.append((member, positions, stored))
        self.at = int(positions.get(member.subtask, b"0"))
        return self

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        self.fetches += 1
        if self.fail is not None:
            raise self.fail
        if self.at == self.count:
            threading.Event().wait(0.001)
            return None
        self.asked.append(max_rows)
        end = min(self.at + max_rows, self.count)
        rows = pa.RecordBatch.from_pydict({"id": range(self.at, end)}, schema=ID)
        if self.ids is not None:
            rows = pa.record_batch({"id": self.ids[self.at : end]})
        self.at = end
        of = self.opened[-1][0].subtask if self.of is None else self.of
        return Fetched(rows, of, b"%d" % end, end)

    def acknowledge(self, receipts: Sequence[int]) -> None:
        self.acknowledged += receipts

    def waiting(self) -> int | None:
        return self.count - self.at

    def wake_up(self) -> None:
        self.wake_ups += 1

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def opened(driver: Any) -> Any:
    def make(broker: Broker, subtask: int = 0, parallelism: int = 1, rows: int = 100, **kept: Any) -> Any:
        reader = open_reader(
            Source("clicks", QueueSource(broker), ID),
            subtask,
            parallelism,
            positions=kept.get("positions", {}),
            limits=BatchLimits(rows, 1, keeps_misfits=kept.get("keeps", False)),
            key=b"",
            wake=driver._wake,
            job="job",
            again=kept.get("again", False),
        )
        driver.readers.append(reader)
        reader.start()
        return reader

    return make


def test_rows_come_with_positions_that_are_a_chain(driver: Any, vertex: Any, opened: Any) -> None:
    reader = opened(Broker(500))
    while len(vertex.rows) < 500:
        vertex.persist(driver.next(reader))
    assert vertex.rows == list(range(500))
    assert vertex.positions == {partition_key(0): b"500"}
    assert len(set(vertex.names)) == 500


def test_rows_that_do_not_fit_are_beside_those_of_their_fetch(
    driver: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no position of their own: all of a fetch is taken, or comes again."""
    monkeypatch.setattr(Broker, "ids", pa.array([0, 2**63, 2, None, 4], pa.uint64()))
    reader = opened(Broker(5), keeps=True)
    rows = driver.next(reader)
    assert rows.payload.schema == ID
    assert rows.payload["id"].to_pylist() == [0, 2, None, 4]
    (odd,) = rows.aside
    assert odd.payload.to_pylist() == [{"row": "{'id': 9223372036854775808}"}]
    assert (odd.position, odd.first_ordinal, rows.position.end) == (None, 4, b"5")
    assert odd.misfit.startswith(
        "a row of split 'p0': source 'clicks' gave {'id': 9223372036854775808}, which does not fit"
    )
    with pytest.raises(
        SourceRowError, match=r"a row of split 'p0': source 'clicks' gave \{'id': 9223372036854775808\}"
    ):
        driver.next(opened(Broker(5)))


def test_batches_grow_up_to_the_limit(driver: Any, opened: Any) -> None:
    broker = Broker(1_000)
    reader = opened(broker)
    while broker.at < 1_000:
        driver.next(reader)
    assert broker.asked[:3] == [16, 64, 100]
    assert max(broker.asked) == 100


def test_it_acknowledges_what_was_accepted_and_nothing_else(driver: Any, opened: Any) -> None:
    broker = Broker(48)
    reader = opened(broker, rows=16)
    batches = [driver.next(reader) for _ in range(3)]
    reader.accepted(batches[0].taken)
    driver.until(lambda: broker.acknowledged)
    assert broker.acknowledged == [16]
    reader.accepted(batches[1].taken)
    reader.accepted(batches[2].taken)
    driver.until(lambda: len(broker.acknowledged) == 3)
    assert broker.acknowledged == [16, 32, 48]


def test_it_fetches_no_more_than_is_taken(driver: Any, opened: Any) -> None:
    broker = Broker(10_000)
    reader = opened(broker, rows=16)
    driver.until(lambda: broker.fetches >= READY_BATCHES)
    first = driver.next(reader)
    driver.until(lambda: broker.fetches >= READY_BATCHES + 1)
    reader.accepted(first.taken)
    driver.until(lambda: broker.acknowledged)
    assert broker.fetches == READY_BATCHES + 1, "acknowledging is no reason to fetch"


def test_it_tells_how_many_messages_wait_while_its_rows_are_not_taken(
    driver: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_reader, "LAG_EVERY_S", 0.0)
    broker = Broker(10_000)
    reader = opened(broker, rows=16)
    driver.until(lambda: broker.fetches == READY_BATCHES)
    driver.until(lambda: reader.lag == 10_000 - broker.at)
    broker.count += 500
    driver.until(lambda: reader.lag == 10_500 - broker.at)
    assert broker.fetches == READY_BATCHES
    assert not reader.is_away
    broker.is_away = True
    driver.until(lambda: reader.is_away and reader.lag is None)


def test_a_queue_that_cannot_be_opened_yet_is_away(driver: Any, opened: Any) -> None:
    class Shut(Broker):
        shut = threading.Event()

        def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> Broker:
            self.shut.wait(600)
            return super().open(member, positions, stored=stored)

    broker = Shut(1)
    reader = opened(broker)
    assert reader.is_away
    broker.shut.set()
    driver.next(reader)
    assert not reader.is_away


def test_it_is_opened_with_the_positions_of_those_that_it_reads_for(opened: Any, driver: Any) -> None:
    broker = Broker(40)
    positions = {partition_key(subtask): b"%d" % (10 * subtask) for subtask in range(5)}
    reader = opened(broker, 1, 2, positions=positions)
    assert driver.next(reader).payload.to_pydict() == {"id": list(range(10, 26))}
    assert broker.opened == [(Member("job/clicks", 1, 2), {1: b"10", 3: b"30"}, True)]


def test_messages_of_one_that_is_gone_have_its_position(opened: Any, driver: Any) -> None:
    reader = opened(Broker(5, of=2), positions={partition_key(2): b"before"})
    position = driver.next(reader).position
    assert (position.partition, position.start, position.end) == (partition_key(2), b"before", b"5")


def test_a_reader_that_fails_is_opened_again_behind_what_was_taken(opened: Any, driver: Any) -> None:
    broker = Broker(5)
    reader = opened(broker)
    taken = driver.next(reader)
    broker.fail = RuntimeError("WRONGTYPE")
    with pytest.raises(SourceError, match="'clicks' cannot be read on: RuntimeError: WRONGTYPE"):
        driver.next(reader)
    assert broker.closed.wait(600)
    reader.abandon()
    assert reader.ended
    reader.accepted(taken.taken)  # Its successor acknowledges it.
    broker.fail = None
    opened(broker, positions={partition_key(0): taken.position.end}, again=True)
    driver.until(lambda: len(broker.opened) == 2)
    assert broker.opened[1] == (Member("job/clicks", 0, 1), {0: b"5"}, False)


def test_it_ends_when_it_is_told_to_and_acknowledges_still(opened: Any, driver: Any) -> None:
    broker = Broker(16)
    reader = opened(broker)
    rows = driver.next(reader)
    reader.finish()
    assert reader.ended
    reader.accepted(rows.taken)
    driver.until(lambda: broker.acknowledged)
    reader.stop()
    assert broker.closed.wait(600)


def test_what_was_accepted_before_it_is_stopped_is_acknowledged(opened: Any, driver: Any) -> None:
    broker = Broker(16)
    reader = opened(broker)
    reader.accepted(driver.next(reader).taken)
    reader.stop()
    assert broker.closed.wait(600)
    assert broker.acknowledged == [16]
