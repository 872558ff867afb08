"""Root ids that come more than once: every record is followed by itself, through losses, recalls and replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ftlayer.vertex import calls


@dataclass
class Record:
    """One record. ``root`` is the id under which somebody works on it, None while it is idle; ``late`` timed out."""

    root: int | None = None
    late: int | None = None
    done: bool = False


def machine(kit: Any, tracker: str) -> type[RuleBasedStateMachine]:
    class Twins(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.vertex = kit.Vertex(tracker=tracker)
            self.records: dict[str, Record] = {}
            self.given: set[int] = set()  # all root ids that the vertex ever gave out

        @initialize()
        def open(self) -> None:
            self.vertex.open(timeout_ms=1_000, backoff_ms=(), max_attempts=1_000)

        def in_work(self) -> dict[int, Record]:
            return {r.root: r for r in self.records.values() if r.root is not None and not r.done}

        def written_down(self) -> None:
            """Completions become durable, so that a loss does not bring them back."""
            self.vertex.advance(100)

        @rule(roots=st.lists(st.integers(1, 3), min_size=1, max_size=4))
        def persist(self, roots: list[int]) -> None:
            texts = [f"record {len(self.records) + place}" for place in range(len(roots))]
            taken = set(self.in_work()) | {record.late for record in self.records.values()}
            self.vertex.call(calls.Persist("s", kit.payload(texts), kit.u64(roots), kit.u64(roots)))
            for root, text in zip(roots, texts, strict=True):
                self.records[text] = Record(None if root in taken else root)
                taken.add(root)

        @precondition(lambda self: self.in_work())
        @rule(which=st.integers(0))
        def acknowledge(self, which: int) -> None:
            work = self.in_work()
            root = sorted(work)[which % len(work)]
            assert self.vertex.xor((root, root)).completed == 1
            work[root].done = True
            self.written_down()

        @precondition(lambda self: self.in_work())
        @rule(which=st.integers(0))
        def fail(self, which: int) -> None:
            work = self.in_work()
            root = sorted(work)[which % len(work)]
            assert self.vertex.fail(root) == calls.Failed(1, 0, 0)
            work[root].root = None

        @rule(limit=st.integers(1, 5))
        def take(self, limit: int) -> None:
            for root, _, _, text in self.vertex.take(limit):
                assert root not in self.given, "an id that was given out names another record now"
                assert root > 3
                self.given.add(root)
                record = self.records[text]
                assert record.root is None
                assert not record.done
                record.root, record.late = root, None

        @rule()
        def recall(self) -> None:
            self.vertex.recall()
            self.let_go()

        @rule()
        def all_time_out(self) -> None:
            for record in self.in_work().values():
                record.late = record.root
            self.vertex.advance(2_000)
            self.let_go()

        def tracked_late(self) -> list[Record]:
            return [record for record in self.records.values() if record.late is not None]

        @precondition(lambda self: self.tracked_late())
        @rule(which=st.integers(0), failed=st.booleans())
        def its_late_event_comes(self, which: int, failed: bool) -> None:
            late = self.tracked_late()
            record = late[which % len(late)]
            root, record.late = record.late, None
            if failed:
                assert self.vertex.fail(root) == calls.Failed(0, 0, 1)
                return
            assert self.vertex.xor((root, root)).completed == 1
            record.done = True
            self.written_down()

        @rule()
        def the_vertex_is_lost(self) -> None:
            self.vertex.restart()
            self.let_go()
            for record in self.records.values():
                record.late = None

        def let_go(self) -> None:
            for record in self.records.values():
                if not record.done:
                    record.root = None

        @invariant()
        def what_is_not_done_is_there_under_its_root(self) -> None:
            open_records = [record for record in self.records.values() if not record.done]
            listed = self.vertex.list("pending") + self.vertex.list("waiting")
            assert len(listed) == len(open_records)
            roots = {info.root for info in self.vertex.list("pending")}
            assert {record.root for record in open_records if record.root is not None} <= roots

        def teardown(self) -> None:
            for _ in range(3):
                self.take(1_000)
                for root, record in self.in_work().items():
                    assert self.vertex.xor((root, root)).completed == 1
                    record.done = True
                self.written_down()
            assert all(record.done for record in self.records.values())
            assert self.vertex.list("pending") == self.vertex.list("waiting") == []

    return Twins


@pytest.mark.parametrize(("tracker", "examples"), [("table", 60), ("exact", 20)])
def test_every_record_is_followed_by_itself(kit: Any, tracker: str, examples: int) -> None:
    run_state_machine_as_test(
        machine(kit, tracker),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_two_records_of_one_root_get_roots_of_their_own_after_a_restart(vertex: Any, kit: Any) -> None:
    vertex.open()
    vertex.call(calls.Persist("s", kit.payload(["a", "b"]), kit.u64([7, 7]), kit.u64([7, 7])))
    vertex.restart()
    (a, *_, first), (b, *_, second) = vertex.take()
    assert (first, second) == ("a", "b")
    vertex.xor((b, b))
    assert [record.root for record in vertex.list("pending")] == [a] != [b]


@pytest.mark.parametrize("tracker", ["table", "exact"])
@pytest.mark.parametrize("late", [False, True])
def test_a_record_of_an_earlier_incarnation_takes_no_other_out_of_the_tracker(
    kit: Any, tracker: str, late: bool
) -> None:
    """One waits since before the loss of the vertex, another of the same root since then: only that is tracked."""
    twins = machine(kit, tracker)()
    for step in (
        twins.open,
        lambda: twins.persist([1, 1]),
        twins.all_time_out,
        twins.the_vertex_is_lost,
        lambda: twins.persist([1, 1, 1]),
        twins.all_time_out,
        lambda: twins.take(4),  # all but the one that timed out last
    ):
        step()
        twins.what_is_not_done_is_there_under_its_root()
    waiting = twins.records["record 2"]
    assert waiting.late == 1
    if late:
        assert twins.vertex.xor((1, 1)).completed == 1
        waiting.done = True
        twins.written_down()
    else:
        twins.persist([1])
        assert twins.records["record 5"].root is None
    twins.what_is_not_done_is_there_under_its_root()
    twins.teardown()
