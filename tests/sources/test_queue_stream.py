"""A queue behind a spool, read as Spark reads it: batches, crashes at any moment, batches that are run again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle

from ftlayer.connectors import queue_stream
from ftlayer.connectors.queue_stream import QueueStreamReader, Spool
from ftlayer.errors import SourceChangedError, SourceError
from ftlayer.functions.data_sources import ReadAllAvailable
from ftlayer.topology.operators import Fetched, Member, Queue

ID = pa.schema([("id", pa.int64())])


class Crash(BaseException):
    """The driver is killed."""


class Broker(Queue):
    """Numbers from 0; gives those again that were not acknowledged, save up to the position. Dies at a call."""

    schema = ID

    def __init__(self) -> None:
        self.count = 0
        self.acknowledged: set[int] = set()
        self.at = 0
        self.opened: list[tuple[Member, Mapping[int, bytes], bool]] = []
        self.crash = ""
        self.tells = True
        self.is_away = False

    def __deepcopy__(self, memo: Any) -> Broker:
        return self

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> Broker:
        self.opened.append((member, dict(positions), stored))
        self.at = int(positions.get(0, b"0"))
        if stored:
            self.acknowledged |= set(range(self.at))
        return self

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        self.dies("fetch")
        if self.at == self.count:
            return None
        first, self.at = self.at, min(self.at + max_rows, self.count)
        rows = pa.RecordBatch.from_pydict({"id": range(first, self.at)}, schema=ID)
        return Fetched(rows, 0, b"%d" % self.at, range(first, self.at))

    def acknowledge(self, receipts: Sequence[range]) -> None:
        self.dies("acknowledge")
        for numbers in receipts:
            self.acknowledged |= set(numbers)

    def waiting(self) -> int | None:
        return self.count - self.at if self.tells else None

    def close(self) -> None:
        pass

    def dies(self, where: str) -> None:
        if self.crash == where:
            self.crash = ""
            raise Crash(where)


class Query:
    """Does with a reader what Spark does with it: offsets are noted first, then the batch is read and committed."""

    def __init__(self, broker: Broker, spool: Path, max_rows: int = 10) -> None:
        self.broker, self.spool, self.max_rows = broker, spool, max_rows
        self.noted: list[tuple[Any, Any]] = []
        self.batches: dict[int, list[int]] = {}
        self.start()

    def start(self) -> None:
        self.reader = QueueStreamReader(self.broker, str(self.spool), self.max_rows)

    def trigger(self, limit: Any = None) -> None:
        """Run what was noted and is not committed, else a new batch, if there are rows for one."""
        if len(self.noted) == len(self.batches):
            if self.noted:
                self.reader.commit(self.noted[-1][1])
            begin = self.noted[-1][1] if self.noted else self.reader.initialOffset()
            end = self.reader.latestOffset(begin, limit or self.reader.getDefaultReadLimit())
            if end == begin:
                return
            self.noted.append((begin, end))
        self.broker.dies("batch")
        task = cloudpickle.loads(cloudpickle.dumps(self.reader))  # type: ignore[no-untyped-call]
        found = [
            number
            for part in self.reader.partitions(*self.noted[-1])
            for batch in task.read(part)
            for number in batch.column(0).to_pylist()
        ]
        self.batches[len(self.noted) - 1] = found

    @property
    def found(self) -> list[int]:
        return [number for batch in self.batches.values() for number in batch]


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(Broker(), tmp_path / "spool")


def test_batches_have_as_many_rows_as_they_may(query: Query) -> None:
    query.broker.count = 25
    for _ in range(4):
        query.trigger()
    assert [len(batch) for batch in query.batches.values()] == [10, 10, 5]
    assert query.found == list(range(25))
    assert query.broker.acknowledged == set(range(25))


@pytest.mark.parametrize("tells", [True, False])
def test_a_run_of_what_is_available_now_ends(query: Query, tells: bool) -> None:
    query.broker.count, query.broker.tells = 25, tells
    query.reader.prepareForTriggerAvailableNow()
    query.broker.count = 40
    for _ in range(6):
        query.trigger()
    assert [len(batch) for batch in query.batches.values()] == [10, 10, 5]
    query.start()
    for _ in range(3):
        query.trigger()
    assert query.found == list(range(40))


class Away(Broker):
    """It cannot be reached at first."""

    def __init__(self, fetches: int, patience: int) -> None:
        super().__init__()
        self.left, self.patience = fetches, patience
        self.tells = False

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        self.left -= 1
        self.is_away = self.left > 0
        if not self.is_away:
            return super().fetch(max_rows, wait_s)
        self.patience -= 1
        if not self.patience:
            raise SourceError("it was away for reconnect_timeout")
        return None


def test_a_run_of_what_is_available_now_waits_for_a_server_that_is_away(tmp_path: Path) -> None:
    query = Query(Away(5, patience=9), tmp_path / "spool")
    query.broker.count = 25
    query.reader.prepareForTriggerAvailableNow()
    for _ in range(4):
        query.trigger()
    assert query.found == list(range(25))
    with pytest.raises(SourceError, match="reconnect_timeout"):
        Query(Away(9, patience=5), tmp_path / "other").reader.prepareForTriggerAvailableNow()


class Trickle(Broker):
    """Another message is there at each fetch."""

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        self.count += 1
        return super().fetch(max_rows, wait_s)


def test_a_batch_begins_though_messages_come_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_stream, "FETCH_S", 0.01)
    query = Query(Trickle(), tmp_path / "spool", max_rows=10**9)
    query.trigger()
    assert query.found == list(range(query.broker.at))
    assert query.reader.partitions(*query.noted[0]) == [queue_stream.SpooledFile(0)]


def test_files_that_were_left_are_no_larger_batch(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver died behind its fetches, before Spark had noted how far they go."""
    monkeypatch.setattr(queue_stream, "FILE_ROWS", 4)
    query.broker.count = 30
    query.reader.latestOffset({"next": 0}, ReadAllAvailable())
    query.start()
    for _ in range(6):
        query.trigger()
    assert [len(batch) for batch in query.batches.values()] == [8, 8, 8, 6]


def test_all_that_is_there_is_one_batch_of_many_files(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_stream, "FILE_ROWS", 10)
    query.broker.count = 95
    query.trigger(ReadAllAvailable())
    assert query.found == list(range(95))
    assert len(query.reader.partitions(*query.noted[0])) == 10


def test_what_is_committed_is_removed(query: Query) -> None:
    for count in range(10, 60, 10):
        query.broker.count = count
        query.trigger()
    spool = Spool(str(query.spool))
    assert list(spool.numbers()) == [3, 4]
    assert spool.read(3).num_rows == 0
    query.reader.commit(query.noted[-1][1])
    query.reader.commit(query.noted[-1][1])
    assert list(spool.numbers()) == [4]
    assert spool.read(4).num_rows == 0
    assert spool.positions(4) == {0: b"50"}


def test_a_query_with_a_new_checkpoint_takes_over_what_was_not_committed(query: Query) -> None:
    query.broker.count = 10
    query.trigger()
    query.broker.count = 20
    query.trigger()
    again = Query(query.broker, query.spool)
    again.trigger()
    assert again.found == list(range(10, 20))
    assert query.broker.opened[-1][1:] == ({0: b"20"}, True)
    assert query.broker.opened[0][0] == query.broker.opened[1][0]


def test_another_spool_is_another_member(query: Query, tmp_path: Path) -> None:
    query.broker.count = 1
    query.trigger()
    Query(query.broker, tmp_path / "other").trigger()
    owners = [member.owner for member, _, _ in query.broker.opened]
    assert len(set(owners)) == 2


def test_a_file_that_a_task_does_not_find_is_said(query: Query) -> None:
    query.broker.count = 10
    query.trigger()
    shutil.rmtree(query.spool)
    query.batches.clear()
    with pytest.raises(SourceError, match="file 0 is not there"):
        query.trigger()


def test_a_spool_that_ends_before_what_was_read_is_said(query: Query) -> None:
    for count in (10, 20):
        query.broker.count = count
        query.trigger()
    shutil.rmtree(query.spool)
    query.start()
    with pytest.raises(
        SourceChangedError, match="ends at file 0, and the query has read up to 2: files were removed"
    ):
        query.reader.latestOffset(query.noted[-1][1], ReadAllAvailable())


def test_a_gap_in_the_files_is_said(query: Query) -> None:
    query.broker.count = 30
    query.reader.latestOffset({"next": 0}, ReadAllAvailable())
    (query.spool / f"{1:020}.arrow").unlink()
    with pytest.raises(SourceError, match="files are missing between 0 and 2"):
        Spool(str(query.spool)).numbers()


STEPS = st.tuples(st.sampled_from(["", "fetch", "acknowledge", "batch"]), st.integers(0, 25))


@settings(deadline=None)
@given(st.lists(STEPS, max_size=20))
def test_each_message_is_in_one_batch_whatever_crashes(steps: list[tuple[str, int]]) -> None:
    broker = Broker()
    with tempfile.TemporaryDirectory() as directory:
        query = Query(broker, Path(directory) / "spool")
        for crash, count in steps:
            broker.crash = crash
            broker.count += count
            try:
                query.trigger()
            except Crash:
                query.start()
            assert set(query.found) <= set(range(broker.count))
        broker.crash = ""
        while len(query.found) < broker.count:
            before = len(query.found)
            query.trigger()
            assert len(query.found) > before
        assert query.found == list(range(broker.count))
        assert broker.acknowledged == set(range(broker.count))
