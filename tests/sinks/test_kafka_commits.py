"""The rules by which messages for Kafka are committed, against a broker that is made up: whatever fails, each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.connectors.kafka import sink as marks_module
from ftlayer.connectors.kafka.client import KafkaMessage
from ftlayer.connectors.kafka.sink import CommitMarks, Fate, KafkaCommits, Mark
from ftlayer.errors import SinkError, UncommittableError

HOUR_MS = 3_600_000


class MadeUpBroker:
    """What a broker keeps: what was produced, marks, and who may produce."""

    def __init__(self) -> None:
        self.produced: list[KafkaMessage] = []
        self.marks: dict[str, Mark] = {}
        self.producers = 0


class MadeUpTransactions:
    """A process' connection. ``fails``: what the next transaction comes to, and whether that is known."""

    def __init__(self, broker: MadeUpBroker) -> None:
        self._broker = broker
        self._number = 0
        self.fails = ""

    def fence(self) -> None:
        if not self._number:
            self._broker.producers += 1
            self._number = self._broker.producers

    def read(self, group: str) -> Mark | None:
        return self._broker.marks.get(group)

    def run(self, written: Sequence[KafkaMessage], marks: Mapping[str, Mark]) -> None:
        assert written
        fails, self.fails = self.fails, ""
        happens = fails != "before" and fails != "lost" and self._number == self._broker.producers
        if happens:
            self._broker.produced += written
            self._broker.marks |= marks
        if fails in ("before", "after") or (not happens and fails != "lost"):
            self._number = 0
            raise SinkError("no answer")


def message(number: int, *, writer: str = "w", execution: str = "e", **more: Any) -> KafkaMessage:
    common = {"sink": "s", "rows": 1, "query": "", "written_ms": 0, **more}
    return KafkaMessage(execution=execution, writer=writer, number=number, **common)


def commits_of(broker: MadeUpBroker) -> tuple[KafkaCommits, MadeUpTransactions]:
    transactions = MadeUpTransactions(broker)
    return KafkaCommits("s", transactions, 24 * HOUR_MS), transactions


MESSAGES = [
    message(number, writer=writer, execution=execution)
    for number in range(1, 6)
    for writer in ("a", "b")
    for execution in ("e", "f")
]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=6),
        st.sampled_from(["", "", "before", "after", "lost"]),
    ),
    max_size=25,
)


@given(STEPS)
def test_each_message_is_produced_once_by_whichever_process(
    steps: list[tuple[int, list[KafkaMessage], str]],
) -> None:
    """Three drivers that think they are the one, commits that come again, in part, and fail before or behind."""
    broker = MadeUpBroker()
    drivers = [commits_of(broker) for _ in range(3)]
    done: set[KafkaMessage] = set()
    asked: set[KafkaMessage] = set()
    for driver, messages, fails in steps:
        commits, transactions = drivers[driver]
        transactions.fails = fails
        asked |= set(messages)
        try:
            commits.commit_messages(messages, now_ms=1)
        except SinkError:
            pass
        else:
            done |= set(messages)
        transactions.fails = ""
        assert len(broker.produced) == len(set(broker.produced)), "something is there twice"
        assert done <= set(broker.produced) <= asked
    commits, _ = commits_of(broker)
    if asked:
        commits.commit_messages(sorted(asked, key=repr), now_ms=1)
    assert sorted(broker.produced, key=repr) == sorted(asked, key=repr)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "before", "after", "lost"])), max_size=20))
def test_each_batch_of_a_query_is_produced_once(steps: list[tuple[int, str]]) -> None:
    """A batch is run until its commit is answered; then comes the next one."""
    broker = MadeUpBroker()
    drivers = [commits_of(broker) for _ in range(3)]
    batch = 0
    for run, (driver, fails) in enumerate(steps):
        commits, transactions = drivers[driver]
        transactions.fails = fails
        try:
            commits.commit_batch("q", batch, [message(run, query="q", rows=batch + 1)])
        except SinkError:
            continue
        finally:
            transactions.fails = ""
        batch += 1
    found = [each.rows - 1 for each in broker.produced]
    assert found in (list(range(batch)), list(range(batch + 1)))


def test_a_commit_that_is_fenced_off_changes_nothing() -> None:
    broker = MadeUpBroker()
    old, _ = commits_of(broker)
    old.commit_messages([message(1)], 0)
    new, _ = commits_of(broker)
    new.commit_messages([message(2)], 0)
    with pytest.raises(SinkError):
        old.commit_messages([message(3)], 0)
    assert [each.number for each in broker.produced] == [1, 2]
    assert broker.marks == {"ftlayer-s-e": Mark(2, "w:1-2")}


def test_what_may_have_been_committed_long_ago_is_not_produced() -> None:
    broker = MadeUpBroker()
    commits, _ = commits_of(broker)
    commits.commit_messages([message(1)], 23 * HOUR_MS)
    commits.commit_messages([message(1)], 90 * HOUR_MS)
    with pytest.raises(UncommittableError, match=r"written 25 hours ago, and it is not known"):
        commits.commit_messages([message(1), message(2)], 25 * HOUR_MS)
    assert [each.number for each in broker.produced] == [1]


def test_another_name_is_said() -> None:
    commits, _ = commits_of(MadeUpBroker())
    with pytest.raises(UncommittableError, match="with the name 'other', and this one has 's'"):
        commits.commit_messages([message(1, sink="other")], 0)


def test_a_mark_of_somebody_else_is_said() -> None:
    broker = MadeUpBroker()
    broker.marks["ftlayer-s-e"] = Mark(7, "theirs")
    commits, _ = commits_of(broker)
    with pytest.raises(UncommittableError, match="has a mark that no KafkaSink has written"):
        commits.commit_messages([message(1)], 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=60))
def test_marks_know_what_was_added(added: list[tuple[str, int]]) -> None:
    """What was not added is never said to be there, and what was is not open."""
    marks = CommitMarks()
    for writer, number in added:
        marks.add(writer, number)
        marks = CommitMarks(marks.texts())
    for writer in "abcd":
        for number in range(1, 42):
            fate = marks.fate(writer, number)
            if (writer, number) in added:
                assert fate is not Fate.OPEN
            else:
                assert fate is not Fate.COMMITTED


def test_marks_stay_short() -> None:
    """Brokers take 4,096 bytes. Writers of two hundred starts, each with as many gaps as are kept."""
    marks = CommitMarks()
    numbers = range(1_000_000, 1_000_020, 2)
    for number in numbers:
        for writer in range(200):
            marks.add(f"{writer:012x}", number)
    texts = marks.texts()
    assert len(texts) > 5
    assert max(map(len, texts)) <= marks_module.MOST_BYTES
    again = CommitMarks(texts)
    assert all(again.fate(f"{writer:012x}", numbers[-1]) is Fate.COMMITTED for writer in range(200))


def test_numbers_of_a_writer_with_many_gaps_are_forgotten() -> None:
    marks = CommitMarks()
    for number in range(1, 2 * marks_module.MOST_RANGES + 3, 2):
        marks.add("w", number)
    assert marks.texts() == ["w:~1,3-3,5-5,7-7,9-9,11-11,13-13,15-15,17-17"]
    assert marks.fate("w", 1) is Fate.FORGOTTEN
    assert marks.fate("w", 4) is Fate.OPEN
    for number in range(4, 17, 2):
        marks.add("w", number)
    assert marks.texts() == ["w:~1,3-17"]
    assert marks.fate("w", 1) is Fate.FORGOTTEN
