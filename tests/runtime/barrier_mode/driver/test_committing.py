"""The driver's side of sinks."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage

from ftlayer.checkpoint.snapshots import Checkpoint, Committable, SubtaskSnapshot
from ftlayer.errors import (
    CommitFailedError,
    IncompatibleCheckpointError,
    UnauthorizedError,
    UncommittableError,
)
from ftlayer.runtime.barrier_mode.driver.committing import Committer, at_home, resealed
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import Captured, unpack_captured
from ftlayer.runtime.driver.rules.planner_rules import PlannedRange
from ftlayer.runtime.protocol.messages import seal, unseal
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, Sink, WriterSink

ID = pa.schema([("id", pa.int64())])
KEY, OTHER = b"k" * 32, b"o" * 32
CALLS: list[Any] = []
ERRORS: dict[str, BaseException] = {}


class Message(WriterCommitMessage):
    def __init__(self, text: str) -> None:
        self.text = text


class Writer(DataSourceStreamWriter):
    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, iterator: Any) -> Any:
        raise AssertionError("the slots write")

    def commit(self, messages: list[Any], batch: int) -> None:
        CALLS.append((self.name, batch, [message.text for message in messages]))
        if self.name in ERRORS:
            raise ERRORS[self.name]

    def abort(self, messages: list[Any], batch: int) -> None:
        CALLS.append((self.name, -batch, [message.text for message in messages]))
        if self.name in ERRORS:
            raise ERRORS[self.name]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    CALLS.clear()
    ERRORS.clear()


def committer(**more: Any) -> Committer:
    sinks = [Sink(name, WriterSink(Writer(name), 1, 1), ID) for name in ("a", "b")]
    sinks.append(Sink("f", FunctionSink(print), ID))
    vertices = tuple(JobVertex(sink.uid, (sink,), 12) for sink in sinks)
    return Committer(JobGraph("job", vertices, (), tracked=False, max_parallelism=12), KEY, **more)


def part(sink: str, subtask: int, *messages: tuple[int, str], key: bytes = KEY) -> SubtaskSnapshot:
    committables = tuple(Committable(sink, seal(Message(text), key), number) for number, text in messages)
    return SubtaskSnapshot(sink, subtask, committables=committables)


def test_messages_of_all_subtasks_are_committed_in_their_order() -> None:
    committer().commit(
        3, [part("b", 10, (3, "b10")), part("b", 2, (2, "old"), (3, "b2")), part("a", 0), part("f", 0)]
    )
    assert CALLS == [("b", 3, ["old", "b2", "b10"])]


def test_what_was_committed_is_left_out() -> None:
    driver = committer()
    first, second = part("a", 0, (1, "x")), part("a", 0, (1, "x"), (2, "y"))
    driver.commit(1, [first])
    (open_part,) = driver.uncommitted(2, [second])
    assert [each.checkpoint for each in open_part.committables] == [2]
    driver.commit(2, [second])
    driver.commit(2, [second])
    assert CALLS == [("a", 1, ["x"]), ("a", 2, ["y"])]


def test_another_driver_commits_again() -> None:
    for _ in range(2):
        committer().commit(4, [part("a", 0, (4, "x"))])
    assert CALLS == [("a", 4, ["x"])] * 2


def test_a_commit_that_failed_is_tried_again() -> None:
    driver = committer()
    ERRORS["b"] = OSError("no route")
    parts = [part("a", 0, (1, "x")), part("b", 0, (1, "y"))]
    with pytest.raises(CommitFailedError, match=r"sink 'b': checkpoint 1 is complete.*OSError: no route"):
        driver.commit(1, parts)
    ERRORS.clear()
    driver.commit(1, parts)
    assert CALLS == [("a", 1, ["x"]), ("b", 1, ["y"])] * 2


def test_a_sink_that_cannot_commit_keeps_no_other_from_it() -> None:
    ERRORS.update(a=SystemExit("no route"), b=UncommittableError("x.part is gone"))
    driver = committer()
    parts = [part("a", 0, (1, "x")), part("b", 0, (1, "y"))]
    both = r"sink 'b': checkpoint 1 .*x\.part is gone; sink 'a': checkpoint 1 .*SystemExit: no route.*restore_from"
    with pytest.raises(UncommittableError, match=both):
        driver.commit(1, parts)
    assert CALLS == [("a", 1, ["x"]), ("b", 1, ["y"])]
    del ERRORS["a"]
    with pytest.raises(UncommittableError, match="sink 'b'"):
        driver.commit(1, parts)
    # What another sink lacks is known before anything is committed.
    CALLS.clear()
    with pytest.raises(IncompatibleCheckpointError, match="sink 'gone'"):
        driver.commit(1, [*parts, part("gone", 0, (1, "z"))])
    assert CALLS == []


def test_what_no_checkpoint_holds_is_aborted_once() -> None:
    driver = committer()
    driver.commit(1, [part("a", 0, (1, "x"))])
    lost = part("a", 0, (1, "x"), (2, "y"), (3, "z"))
    driver.abort([lost, part("a", 0, *[(1, "x")]), part("b", 1, (3, "w"))])
    assert CALLS[1:] == [("a", -2, ["y"]), ("a", -3, ["z"]), ("b", -3, ["w"])]


def test_what_a_savepoint_holds_is_not_aborted() -> None:
    driver = committer()
    lost = part("a", 0, (2, "saved"))
    driver.uncommitted(2, [lost])
    driver.abort([lost])
    assert CALLS == []
    driver.commit(3, [lost])
    assert CALLS == [("a", 3, ["saved"])]


def test_what_was_never_published_is_aborted_unless_something_else_holds_it() -> None:
    driver = committer()
    first, second = part("a", 0, (1, "x")), part("a", 0, (1, "x"), (2, "y"))
    driver.uncommitted(1, [first])
    driver.uncommitted(2, [second])
    driver.never_published(2)
    driver.abort([second])
    assert CALLS == [("a", -2, ["y"])]


def test_an_abort_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ERRORS["a"] = OSError("no route")
    with caplog.at_level(logging.WARNING):
        committer().abort([part("a", 0, (1, "x")), part("b", 0, (1, "y")), part("gone", 0, (1, "z"))])
    assert "sink 'a': abort of what it wrote for checkpoint 1 failed" in caplog.text
    assert CALLS == [("a", -1, ["x"]), ("b", -1, ["y"])]


class Evil:
    def __reduce__(self) -> Any:
        return CALLS.append, ("unpickled",)


def test_nothing_is_unpickled_that_somebody_else_has_sealed() -> None:
    evil = SubtaskSnapshot("a", 0, committables=(Committable("a", seal(Evil(), OTHER), 1),))
    with pytest.raises(CommitFailedError, match=r"sink 'a'.*not signed with the key"):
        committer().commit(1, [evil])
    assert CALLS == []


def test_a_sink_that_is_there_no_more(caplog: pytest.LogCaptureFixture) -> None:
    parts = [part("gone", 0, (1, "x")), part("a", 0, (1, "y"))]
    with pytest.raises(IncompatibleCheckpointError, match=r"sink 'gone'"):
        committer().commit(1, parts)
    with caplog.at_level(logging.WARNING):
        committer(allow_unknown=True).commit(1, parts)
    assert "1 messages of sink 'gone' are dropped" in caplog.text
    assert CALLS[-1] == ("a", 1, ["y"])
    # One that writes rows is not what a function is.
    with pytest.raises(IncompatibleCheckpointError, match=r"sink 'f'"):
        committer().commit(1, [part("f", 0, (1, "x"))])


def test_another_key() -> None:
    ranges = (PlannedRange(1, "0", "1", b"d", (seal("split", OTHER),)),)
    sources = {"src": Captured("1", 1, ranges).pack(), "unread": b""}
    old = Checkpoint(1, "job", "run", "", 0, 0, 8, (), (part("a", 0, (1, "x"), key=OTHER),), sources)
    new = resealed(old, OTHER, KEY)
    (committable,) = new.subtasks[0].committables
    assert unseal(committable.message, KEY).text == "x"
    assert unseal(unpack_captured(new.sources["src"]).ranges[0].payloads[0], KEY) == "split"
    assert new.sources["unread"] == b""
    with pytest.raises(UnauthorizedError):
        resealed(new, OTHER, KEY)


def test_a_message_whose_class_travelled_by_value_is_one_of_the_drivers_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = ModuleType("a_program")
    monkeypatch.setitem(sys.modules, "a_program", program)
    source = "class Staged:\n    def __init__(self, name):\n        self.name = name\n"
    exec(source, program.__dict__)
    sent = program.Staged("a")
    exec(source, program.__dict__)  # the next life of the driver has made it anew
    got = at_home(sent)
    assert isinstance(got, program.Staged)
    assert got.name == "a"
    assert at_home(7) == 7
