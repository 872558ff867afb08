"""Rows that a writer refuses in barrier mode: dead letters of the checkpoint that has the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage

from ftlayer import RowsRejected
from ftlayer.checkpoint.letters import LETTER_BYTES, ChainLetter, LetterKind
from ftlayer.checkpoint.snapshots import SinkPart, SubtaskSnapshot
from ftlayer.common.rules.restart import lasting
from ftlayer.errors import ConfigError, JobError, SinkRowError
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter
from ftlayer.records.ipc import read_one_batch
from ftlayer.runtime.barrier_mode.task.mode import ChainSnapshot
from ftlayer.runtime.connectors import sinks
from ftlayer.runtime.connectors.sinks import CommittingWriterBody, open_sink
from ftlayer.runtime.protocol.messages import unseal
from ftlayer.topology.operators import Sink, WriterSink

ID = pa.schema([("id", pa.int64())])
KEY = b"k" * 32


def ids(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"id": list(numbers)}, schema=ID)


class Message(WriterCommitMessage):
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


class Picky:
    """Refuses ``bad`` numbers, up to ``at_a_time`` of them a call, and is away where ``down`` says so."""

    def __init__(self, bad: set[int], at_a_time: int = 1_000) -> None:
        self.bad = bad
        self.at_a_time = at_a_time
        self.calls: list[list[int]] = []
        self.down = False

    def take(self, rows: list[int]) -> Any:
        self.calls.append(rows)
        refused = {place: ValueError(f"no {row}") for place, row in enumerate(rows) if row in self.bad}
        if refused:
            raise RowsRejected(dict(list(refused.items())[: self.at_a_time]))
        if self.down:
            raise OSError("away")
        return Message(rows)

    def commit(self, messages: list[Any], batch: int) -> None:
        raise AssertionError("the driver commits")

    def abort(self, messages: list[Any], batch: int) -> None:
        raise AssertionError("nothing is aborted here")


class Plain(Picky, DataSourceStreamWriter):
    def write(self, iterator: Iterator[Any]) -> Any:
        return self.take([row["id"] for row in iterator])


class Arrow(Picky, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        return self.take([row for batch in iterator for row in batch.column(0).to_pylist()])


def sink(writer: Any, *, may_refuse: bool = True) -> CommittingWriterBody:
    body = open_sink(
        Sink("out", WriterSink(writer, 1, 1), ID), 3, 4, may_refuse, run="r", checkpoint_key=KEY, place="here"
    )
    assert isinstance(body, CommittingWriterBody)
    return body


def rows_in(part: SinkPart) -> list[int]:
    return [row for one in part.committables for row in unseal(one.message, KEY).rows]


def row_of(letter: ChainLetter) -> int:
    (row,) = read_one_batch(letter.payload).column("id").to_pylist()
    return int(row)


@pytest.mark.parametrize("kind", [Plain, Arrow])
def test_the_others_are_written_again_and_the_refused_are_letters_of_the_same_checkpoint(kind: Any) -> None:
    writer = kind({2, 5})
    body = sink(writer)
    body.write(ids(1, 2, 3), 0)
    body.write(ids(4, 5), 0)
    part = body.precommit(7)()
    assert writer.calls == [[1, 2, 3, 4, 5], [1, 3, 4]]
    assert rows_in(part) == [1, 3, 4]
    first, second = part.letters
    assert [row_of(first), row_of(second)] == [2, 5]
    assert (first.checkpoint, first.chain, first.operator, first.subtask) == (7, "out", "out", 3)
    assert first.kind is LetterKind.ROW
    assert len(first.letter) == LETTER_BYTES
    assert first.letter != second.letter
    (attempt,) = first.attempts
    assert (attempt.number, attempt.reason, attempt.place) == (1, "ValueError: no 2", "here")
    assert attempt.at_ms == first.died_ms == first.first_failed_ms > 0
    assert body.refused == 2


def test_a_text_is_a_reason_too() -> None:
    class Texts(Plain):
        def take(self, rows: list[int]) -> Any:
            if 2 in rows:
                raise RowsRejected({rows.index(2): "too even" * 1_000})
            return Message(rows)

    body = sink(Texts(set()))
    body.write(ids(1, 2), 0)
    (letter,) = body.precommit(1)().letters
    assert letter.attempts[0].reason.startswith("too even")
    assert len(letter.attempts[0].reason) <= 1_024


def test_if_all_are_refused_there_is_no_message() -> None:
    body = sink(Plain({1, 2}))
    body.write(ids(1, 2), 0)
    part = body.precommit(1)()
    assert part.committables == ()
    assert [row_of(letter) for letter in part.letters] == [1, 2]


def test_letters_are_in_each_snapshot_until_one_with_them_is_complete() -> None:
    body = sink(Plain({1, 3}))
    body.write(ids(1, 2), 0)
    first = body.precommit(1)().letters
    body.write(ids(3, 4), 0)
    second = body.precommit(2)().letters
    assert second[: len(first)] == first
    assert [(row_of(one), one.checkpoint) for one in second] == [(1, 1), (3, 2)]
    body.completed(1)
    assert body.precommit(3)().letters == second[1:]
    body.completed(3)
    assert body.precommit(4)() == SinkPart()


def test_a_writer_that_is_away_behind_its_refusal_makes_no_letter_yet() -> None:
    writer = Plain({2})
    body = sink(writer)
    body.write(ids(1, 2), 0)
    writer.down = True
    with pytest.raises(JobError, match="OSError: away"):
        body.precommit(1)()
    writer.down = False
    part = body.precommit(2)()
    assert rows_in(part) == [1]
    assert [row_of(letter) for letter in part.letters] == [2]


def test_rows_that_were_written_before_their_barrier_have_its_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinks, "MAX_BYTES", 1)
    body = sink(Plain({2}))
    body.write(ids(1, 2), 0)
    (letter,) = body.precommit(9)().letters
    assert letter.checkpoint == 9


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({}, "RowsRejected without a row"),
        ({2: "x"}, "RowsRejected for row 2, of 2"),
        ({-1: "x"}, "RowsRejected for row -1"),
        ({"a": "x"}, "RowsRejected for row 'a'"),
        ({True: "x"}, "RowsRejected for row True: expected its number"),
        ({1.0: "x"}, "RowsRejected for row 1.0: expected its number"),
    ],
)
def test_rows_that_are_none_decline_the_checkpoint_for_good(named: dict[Any, Any], said: str) -> None:
    class Wrong(Plain):
        def take(self, rows: list[int]) -> Any:
            raise RowsRejected(named)

    body = sink(Wrong(set()))
    body.write(ids(1, 2), 0)
    with pytest.raises(JobError, match=f"sink 'out': write failed: ConfigError: {said}") as failed:
        body.precommit(1)()
    # No restart mends it.
    assert isinstance(lasting(failed.value), ConfigError)


def test_without_a_policy_the_option_is_named() -> None:
    body = sink(Plain({1}), may_refuse=False)
    body.write(ids(1), 0)
    with pytest.raises(
        JobError, match=r"sink 'out': .*write refused 1 rows.*no 1.*failures=FailurePolicy"
    ) as failed:
        body.precommit(1)()
    # They would be refused again.
    assert isinstance(lasting(failed.value), SinkRowError)


def test_a_snapshot_has_them_beside_the_committables_and_behind_the_chains_own() -> None:
    body = sink(Plain({2}))
    body.write(ids(1, 2), 0)
    own = ChainLetter(b"o" * LETTER_BYTES, 5, "out", 3, 0, LetterKind.RECORD, "out", b"", b"", None, (), 0, 0)
    part = SubtaskSnapshot("out", 3, letters=(own,))
    written = ChainSnapshot(part, 5, None, body.precommit(5)).write(None, lambda: False)  # type: ignore[arg-type]
    first, refused = written.letters
    assert first == own
    assert row_of(refused) == 2
    assert len(written.committables) == 1


@given(
    intervals=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3), min_size=1, max_size=5),
    bad=st.sets(st.integers(0, 9)),
    at_a_time=st.integers(1, 3),
    down=st.sets(st.integers(1, 5)),
    data=st.data(),
)
def test_each_row_is_in_one_completed_checkpoint_once_as_a_row_or_as_a_letter(
    intervals: list[list[list[int]]], bad: set[int], at_a_time: int, down: set[int], data: st.DataObject
) -> None:
    writer = Plain(bad, at_a_time)
    body = sink(writer)
    given_rows: list[int] = []
    taken: list[int] = []
    letters: dict[bytes, int] = {}
    for checkpoint, batches in enumerate([*intervals, []], 1):
        for rows in batches:
            body.write(ids(*rows), 0)
            given_rows += rows
        last = checkpoint == len(intervals) + 1
        writer.down = checkpoint in down and not last
        try:
            part = body.precommit(checkpoint)()
        except JobError:
            continue
        if last or data.draw(st.booleans()):
            taken += rows_in(part)
            letters |= {letter.letter: row_of(letter) for letter in part.letters}
            body.completed(checkpoint)
    assert sorted(taken) == sorted(row for row in given_rows if row not in bad)
    assert sorted(letters.values()) == sorted(row for row in given_rows if row in bad)
