"""Writers of graphs with checkpoints: what is written when, what belongs to which checkpoint, what is aborted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage

from ftlayer.checkpoint.snapshots import SinkPart
from ftlayer.errors import ConfigError, JobError, UnauthorizedError
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter
from ftlayer.runtime.connectors import sinks
from ftlayer.runtime.connectors.sinks import CommittingWriterBody, FunctionSinkBody, open_sink
from ftlayer.runtime.protocol.messages import unseal
from ftlayer.runtime.task.contract import Settled
from ftlayer.topology.operators import FunctionSink, Sink, WriterSink

ID = pa.schema([("id", pa.int64())])
KEY = b"k" * 32
WAIT_S = 600.0


def ids(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"id": list(numbers)}, schema=ID)


class Message(WriterCommitMessage):
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


class Recorder:
    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.aborted: list[tuple[int, list[list[int]]]] = []
        self.errors: list[Exception] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.at_work = threading.Event()
        self.users = 0

    def note(self, rows: list[int]) -> Any:
        self.users += 1
        assert self.users == 1, "two threads use the writer"
        self.at_work.set()
        assert self.may_go.wait(WAIT_S)
        self.users -= 1
        if self.errors:
            raise self.errors.pop()
        self.written.append(rows)
        return Message(rows)

    def commit(self, messages: list[Any], batch: int) -> None:
        raise AssertionError("the driver commits")

    def abort(self, messages: list[Any], batch: int) -> None:
        assert not self.users, "two threads use the writer"
        self.aborted.append((batch, [message.rows for message in messages]))


class Plain(Recorder, DataSourceStreamWriter):
    def write(self, iterator: Iterator[Row]) -> Any:
        return self.note([row["id"] for row in iterator])


class Arrow(Recorder, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        return self.note([row for batch in iterator for row in batch.column(0).to_pylist()])


def sink(writer: Any) -> CommittingWriterBody:
    body = open_sink(Sink("out", WriterSink(writer, 1, 1), ID), 0, 1, run="run", checkpoint_key=KEY)
    assert isinstance(body, CommittingWriterBody)
    return body


def said(part: SinkPart) -> list[tuple[int, list[int]]]:
    assert all(each.sink == "out" for each in part.committables)
    return [(each.checkpoint, unseal(each.message, KEY).rows) for each in part.committables]


@pytest.mark.parametrize("kind", [Plain, Arrow])
def test_an_interval_is_one_write_and_its_rows_are_its_own(kind: Any) -> None:
    writer = kind()
    body = sink(writer)
    assert body.write(ids(1, 2), 0) == body.write(ids(3), 9_999) == Settled(0)
    assert body.flush(0, force=True) == Settled(0)
    assert body.due_ms is None
    write = body.precommit(1)
    body.write(ids(4), 0)
    assert writer.written == []
    assert said(write()) == [(1, [1, 2, 3])]
    assert writer.written == [[1, 2, 3]]
    body.completed(1)
    assert said(body.precommit(2)()) == [(2, [4])]


def test_an_empty_interval_has_no_message() -> None:
    writer = Plain()
    body = sink(writer)
    body.write(ids(), 0)
    assert body.precommit(1)() == SinkPart()
    assert writer.written == []


def test_a_checkpoint_has_all_that_is_not_known_to_be_committed() -> None:
    body = sink(Plain())
    for checkpoint in (1, 2, 3):
        body.write(ids(checkpoint), 0)
        body.precommit(checkpoint)()
    body.completed(1)
    assert said(body.precommit(4)()) == [(2, [2]), (3, [3])]
    body.completed(3)
    assert body.precommit(5)() == SinkPart()


def test_checkpoints_may_be_written_in_any_order() -> None:
    body = sink(Plain())
    body.write(ids(1), 0)
    first = body.precommit(1)
    body.write(ids(2), 0)
    second = body.precommit(2)
    assert said(second()) == [(1, [1]), (2, [2])]
    assert said(first()) == [(1, [1])]


def test_one_that_was_not_written_is_written_with_the_next() -> None:
    body = sink(Plain())
    body.write(ids(1), 0)
    body.precommit(1)
    body.write(ids(2), 0)
    assert said(body.precommit(2)()) == [(1, [1]), (2, [2])]


def test_rows_stay_if_the_writer_raises() -> None:
    writer = Plain()
    writer.errors = [OSError("down")]
    body = sink(writer)
    body.write(ids(1, 2), 0)
    with pytest.raises(JobError, match=r"sink 'out': write failed: OSError: down"):
        body.precommit(1)()
    assert writer.aborted == []
    body.write(ids(3), 0)
    assert said(body.precommit(2)()) == [(1, [1, 2]), (2, [3])]


def test_no_message_is_an_error_too() -> None:
    class Silent(Plain):
        def note(self, rows: list[int]) -> Any:
            return None

    body = sink(Silent())
    body.write(ids(1), 0)
    with pytest.raises(JobError, match="not a WriterCommitMessage"):
        body.precommit(1)()


def test_a_message_that_cannot_travel_is_aborted() -> None:
    class Local(Plain):
        def note(self, rows: list[int]) -> Any:
            message = Message(rows)
            message.lock = threading.Lock()  # type: ignore[attr-defined]
            return message

    writer = Local()
    body = sink(writer)
    body.write(ids(1), 0)
    with pytest.raises(JobError, match="cannot be sent to the driver"):
        body.precommit(3)()
    assert writer.aborted == [(3, [[1]])]


def test_memory_errors_go_up() -> None:
    writer = Plain()
    writer.errors = [MemoryError()]  # type: ignore[list-item]
    body = sink(writer)
    body.write(ids(1), 0)
    with pytest.raises(MemoryError):
        body.precommit(1)()


# ---------------------------------------------------------------- bounds


def test_many_bytes_are_written_at_once_and_belong_to_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinks, "MAX_BYTES", 32)
    writer = Plain()
    body = sink(writer)
    body.write(ids(1, 2), 0)
    assert writer.written == []
    body.write(ids(3, 4), 0)
    assert writer.written == [[1, 2, 3, 4]]
    body.write(ids(5), 0)
    assert said(body.precommit(7)()) == [(7, [1, 2, 3, 4]), (7, [5])]
    body.completed(7)
    assert body.precommit(8)() == SinkPart()


def test_rows_of_checkpoints_that_failed_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_BYTES", 32)
    writer = Plain()
    body = sink(writer)
    for checkpoint in (1, 2, 3):
        body.write(ids(checkpoint), 0)
        body.precommit(checkpoint)
    body.write(ids(4), 0)
    assert writer.written == [[1], [2], [3], [4]]
    assert said(body.precommit(4)()) == [(1, [1]), (2, [2]), (3, [3]), (4, [4])]


def test_a_writer_that_raises_then_fails_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_BYTES", 8)
    writer = Plain()
    writer.errors = [OSError("down")]
    with pytest.raises(JobError, match="sink 'out': write failed"):
        sink(writer).write(ids(1), 0)


def test_the_loop_waits_for_the_thread_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_BYTES", 32)
    writer = Plain()
    writer.may_go.clear()
    body = sink(writer)
    body.write(ids(1), 0)
    write = body.precommit(1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(said(write())))
    thread.start()
    assert writer.at_work.wait(WAIT_S)
    threading.Timer(0.05, writer.may_go.set).start()
    body.write(ids(2, 3, 4), 0)
    thread.join(WAIT_S)
    assert found == [(1, [1])]
    assert writer.written == [[1], [2, 3, 4]]


# ---------------------------------------------------------------- the end


def test_what_is_behind_the_restored_checkpoint_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_BYTES", 32)
    writer = Plain()
    body = sink(writer)
    for checkpoint in (1, 2, 3):
        body.write(ids(checkpoint), 0)
        body.precommit(checkpoint)()
    body.write(ids(4, 5, 6, 7), 0)
    body.write(ids(8), 0)
    body.discard(1)
    assert writer.aborted == [(2, [[2]]), (3, [[3]]), (0, [[4, 5, 6, 7]])]


def test_what_is_being_written_is_aborted_by_who_writes_it() -> None:
    writer = Plain()
    body = sink(writer)
    body.write(ids(1), 0)
    body.precommit(1)()
    body.write(ids(2), 0)
    write = body.precommit(2)
    body.write(ids(3), 0)
    body.precommit(3)
    writer.at_work.clear()
    writer.may_go.clear()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(write()))
    thread.start()
    assert writer.at_work.wait(WAIT_S)
    body.discard(0)
    assert writer.aborted == []
    writer.may_go.set()
    thread.join(WAIT_S)
    assert sorted(writer.aborted) == [(1, [[1]]), (2, [[2]])]
    assert writer.written == [[1], [2]]
    assert found == [SinkPart()]


def test_an_abort_that_fails_does_not_hinder_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Plain):
        def abort(self, messages: list[Any], batch: int) -> None:
            super().abort(messages, batch)
            raise OSError("stuck")

    writer = Stuck()
    body = sink(writer)
    for checkpoint in (1, 2):
        body.write(ids(checkpoint), 0)
        body.precommit(checkpoint)()
    with caplog.at_level(logging.WARNING):
        body.discard(0)
    assert [batch for batch, _ in writer.aborted] == [1, 2]
    assert "abort of what was written for checkpoint 1 failed" in caplog.text


def test_rows_behind_the_last_checkpoint_are_not_lost_in_silence() -> None:
    body = sink(Plain())
    body.write(ids(1), 0)
    body.precommit(1)()
    body.close()
    body.write(ids(2), 0)
    with pytest.raises(JobError, match="sink 'out': rows came behind the last checkpoint"):
        body.close()


# ---------------------------------------------------------------- which sink


def test_messages_are_sealed_by_the_checkpoints_key() -> None:
    body = sink(Plain())
    body.write(ids(1), 0)
    (committable,) = body.precommit(1)().committables
    with pytest.raises(UnauthorizedError):
        unseal(committable.message, b"x" * 32)


def test_functions_are_as_ever() -> None:
    body = open_sink(Sink("out", FunctionSink(print), ID), 0, 1, run="run", checkpoint_key=KEY)
    assert isinstance(body, FunctionSinkBody)


def test_what_is_no_writer() -> None:
    with pytest.raises(ConfigError, match="sink 'out'"):
        sink(object())
