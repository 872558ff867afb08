"""The rules of a reader source's planner one by one: what is asked of the reader, and what is assigned."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from ftlayer.common.clock import Now
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import SourceCheckpoints
from ftlayer.runtime.connectors.offset_reader import SplitPosition, partition_key, progress_of
from ftlayer.runtime.driver.rules.planner_rules import (
    LAG_MS,
    MAX_POLL_MS,
    POLL_MS,
    CallReader,
    CloseSource,
    DrainSource,
    KeeperEvent,
    PlannedRange,
    PlannerEvent,
    PlannerInstruction,
    PlannerRules,
    PollDue,
    PositionKeeper,
    RangeKeeper,
    ReaderAnswered,
    ReaderCalls,
    StopReader,
    SubtaskDown,
    SubtaskUp,
    TellBacklog,
    WarnReadAgain,
)
from ftlayer.runtime.protocol.messages import AssignSplits, ReaderRange, Split, SplitDone

Asked: TypeAlias = tuple[Any, ...]
"""A method of `ReaderCalls`, and its arguments."""

PROGRESS: Asked = (ReaderCalls.progress,)
INITIAL: Asked = (ReaderCalls.initial,)
LATEST, COMMIT = ReaderCalls.latest, ReaderCalls.commit


def ask_splits(start: str, end: str, number: int = 1) -> Asked:
    return ReaderCalls.splits, number, start, end, b""


class Rules:
    """The rules of a source at parallelism 1, and what they want."""

    def __init__(self, *, checkpoints: bool = False, **options: bool) -> None:
        self.ranges = SourceCheckpoints("src", lambda event: self.handle(KeeperEvent(event)))
        keeper: RangeKeeper[Any] = self.ranges.keeper if checkpoints else PositionKeeper()
        self.rules = PlannerRules("src", 1, keeper, **options)
        self.calls: list[CallReader] = []
        self.rest: list[PlannerInstruction] = []

    def handle(self, event: PlannerEvent, at_ms: int = 0) -> Rules:
        for instruction in self.rules.handle(event, Now(at_ms, 0)):
            if isinstance(instruction, CallReader):
                self.calls.append(instruction)
            else:
                self.rest.append(instruction)
        self.rules.validate()
        return self

    def answer(self, *answers: Any, at_ms: int = 0) -> Rules:
        """Answer the last call, and those that follow."""
        for answer in answers:
            self.handle(ReaderAnswered(self.calls[-1], answer), at_ms)
        return self

    @property
    def asked(self) -> list[Asked]:
        return [(each.method, *each.arguments) for each in self.calls]

    @property
    def assigned(self) -> list[int]:
        """The ranges that were assigned; 0: the end, before any range."""
        return [each.range.number for each in self.rest if isinstance(each, AssignSplits)]


def splits(start: str, end: str, *payloads: bytes, digest: bytes = b"d", number: int = 1) -> Any:
    planned = PlannedRange(number, start, end, digest, payloads)
    return planned, planned


def accepted(rows: int, *, done: bool = False) -> dict[str, bytes]:
    return {partition_key(0): SplitPosition(ReaderRange(1, "0", "5", 1, b"d"), rows, done).pack()}


FIRST = ((), "0", "5", splits("0", "5", b"x"))


def test_what_is_asked_to_open_and_commit_a_range() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST)
    assert rules.asked == [PROGRESS, INITIAL, (LATEST, "0"), ask_splits("0", "5")]
    assert rules.assigned == [1]
    rules.handle(SplitDone("src", 1, 0))
    assert rules.asked[4:] == [(COMMIT, "5")]
    rules.answer("5")
    assert rules.asked[5:] == [(LATEST, "5")]


def test_the_pause_doubles_while_there_is_nothing_new() -> None:
    rules = Rules().handle(PollDue()).answer((), "0")
    pauses = []
    at_ms = 1_000
    for _ in range(6):
        rules.answer("0", at_ms=at_ms)
        due_ms = rules.rules.due_ms
        assert due_ms is not None
        asked = len(rules.asked)
        assert len(rules.handle(PollDue(), due_ms - 1).asked) == asked
        assert len(rules.handle(PollDue(), due_ms).asked) == asked + 1
        pauses.append(due_ms - at_ms)
        at_ms = due_ms
    assert pauses == [POLL_MS, 40, 80, 160, MAX_POLL_MS, MAX_POLL_MS]


def test_a_subtask_that_is_back_waits_for_what_was_asked_behind_it() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST)
    rules.handle(SubtaskDown(0)).handle(SubtaskUp(0))
    assert rules.asked[4:] == [PROGRESS]
    rules.handle(SubtaskDown(0)).handle(SubtaskUp(0))
    rules.answer(progress_of("src", accepted(2)))
    assert rules.asked[4:] == [PROGRESS, PROGRESS]
    assert rules.assigned == [1]
    rules.answer(progress_of("src", accepted(3)))
    assert [each.mine[0].rows for each in rules.rest if isinstance(each, AssignSplits)] == [0, 3]


@pytest.mark.parametrize("digest", [b"d", b"e"])
def test_a_range_of_the_run_before_is_read_on_if_it_is_planned_as_it_was(digest: bytes) -> None:
    (before,) = progress_of("src", accepted(3))
    rules = Rules().handle(SubtaskUp(0)).answer((before,))
    assert rules.asked == [PROGRESS, ask_splits("0", "5")]
    rules.answer(splits("0", "5", b"x", digest=digest))
    if digest == b"d":
        assert rules.rest == [AssignSplits("src", 0, ReaderRange(1, "0", "5", 1, b"d"), (Split(0, b"x", 3),))]
    else:
        again = AssignSplits("src", 0, ReaderRange(2, "0", "5", 1, b"e"), (Split(0, b"x", 0),))
        assert rules.rest == [WarnReadAgain(before), again]


def test_a_complete_range_of_the_run_before_is_committed_again() -> None:
    rules = Rules().handle(PollDue()).answer(progress_of("src", accepted(3, done=True)))
    assert rules.asked == [PROGRESS, (COMMIT, "5")]


def test_a_backlog_is_told_when_it_changes() -> None:
    rules = Rules(tells_backlog=True).handle(SubtaskUp(0)).answer(*FIRST)
    assert rules.asked[4:] == [(ReaderCalls.is_behind, "0", "5")]
    assert rules.assigned == []
    for number, is_behind in enumerate((True, True, False), 1):
        end = str(5 * number)
        rules.answer(is_behind)
        rules.handle(SplitDone("src", number, 0))
        rules.answer(end, end + "0", splits(end, end + "0", b"x", number=number + 1))
    assert [each for each in rules.rest if isinstance(each, TellBacklog)] == [
        TellBacklog(True),
        TellBacklog(False),
    ]


def test_the_lag_is_asked_now_and_then_from_the_first_record_that_is_not_read() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST)
    assert rules.rules.due_ms == LAG_MS
    assert rules.handle(PollDue(), LAG_MS - 1).asked[4:] == []
    rules.handle(PollDue(), LAG_MS).answer(12, at_ms=LAG_MS)
    assert rules.asked[4:] == [(ReaderCalls.lag, "0")]
    assert (rules.rules.lag, rules.rules.due_ms) == (12, 2 * LAG_MS)
    rules.handle(SplitDone("src", 1, 0), LAG_MS).answer("5", "5", at_ms=LAG_MS)
    rules.handle(PollDue(), 2 * LAG_MS)
    assert rules.asked[-1] == (ReaderCalls.lag, "5")


def test_a_reader_that_cannot_tell_its_lag_is_not_asked_again() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST).handle(PollDue(), LAG_MS)
    rules.answer(None, at_ms=LAG_MS)
    assert rules.rules.lag is None
    assert rules.rules.due_ms is None


def test_draining_opens_no_range_that_is_being_planned() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST[:3]).handle(DrainSource()).answer(FIRST[3])
    assert rules.assigned == []
    assert rules.rules.due_ms is None


def test_the_end_is_told_when_it_is_read() -> None:
    rules = Rules(stop_at_latest=True).handle(SubtaskUp(0))
    rules.answer((), "0", "5", splits("0", "5", b"x"))
    assert rules.asked == [PROGRESS, INITIAL, (ReaderCalls.find_end, "0"), ask_splits("0", "5")]
    rules.handle(SplitDone("src", 1, 0)).answer("5")
    assert rules.rest[1:] == [AssignSplits("src", 0, ReaderRange(1, "5", "5", 0, b""), ())]
    assert rules.rules.due_ms is None


def test_closing_waits_for_a_commit_that_is_due() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST).handle(SplitDone("src", 1, 0)).handle(CloseSource())
    assert rules.asked[4:] == [(COMMIT, "5")]
    assert StopReader() not in rules.rest
    rules.answer("5")
    assert rules.rest[1:] == [StopReader()]
    assert rules.handle(SubtaskDown(0)).asked[5:] == []


def test_closing_waits_for_what_the_reader_does() -> None:
    rules = Rules().handle(PollDue()).answer(*FIRST[:2]).handle(CloseSource())
    assert rules.rest == []
    rules.answer("5")
    assert rules.rest == [StopReader()]


def test_an_answer_from_before_a_restore_is_ignored() -> None:
    rules = Rules(checkpoints=True).handle(SubtaskUp(0))
    assert rules.calls == []
    rules.ranges.restore({}, None)
    first = rules.calls[-1]
    rules.handle(SubtaskDown(0))
    rules.ranges.restore({}, None)
    rules.handle(SubtaskUp(0))
    assert rules.asked == [INITIAL, INITIAL]
    assert rules.handle(ReaderAnswered(first, "7")).asked == [INITIAL, INITIAL]
    rules.answer("0", "5")
    stale = rules.calls[-1]
    checkpoint = rules.ranges.capture({})
    rules.handle(SubtaskDown(0))
    rules.ranges.restore({}, checkpoint)
    rules.handle(ReaderAnswered(stale, splits("0", "5", b"x")))
    assert rules.assigned == []
    assert rules.ranges.capture({}) == checkpoint


def test_where_a_source_ends_is_asked_once_however_often_it_is_restored() -> None:
    rules = Rules(checkpoints=True, stop_at_latest=True)
    rules.ranges.restore({}, None)
    rules.answer("0")
    rules.ranges.restore({}, None)
    assert rules.asked == [INITIAL, (ReaderCalls.find_end, "0")]
    rules.answer("5", "0")
    assert rules.asked[2:] == [INITIAL, ask_splits("0", "5")]


def test_a_report_behind_the_loss_counts_where_what_was_read_outlives_the_subtask() -> None:
    done = SplitDone("src", 1, 0)
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST).handle(SubtaskDown(0)).handle(done)
    assert rules.asked[4:] == [(COMMIT, "5")]
    rules = Rules(checkpoints=True).handle(SubtaskUp(0))
    rules.ranges.restore({}, None)
    rules.answer(*FIRST[1:]).handle(SubtaskDown(0)).handle(done)
    assert rules.asked[3:] == []
    rules.handle(SubtaskUp(0)).handle(done)
    assert rules.asked[3:] == [(LATEST, "5")]
