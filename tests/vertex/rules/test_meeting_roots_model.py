"""Root ids that meet: the same ones in several streams, whose rows are stored or kept by a source's holder."""

from __future__ import annotations

from dataclasses import dataclass, field
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

from ftlayer.common.rules.circuit import Limit
from ftlayer.records.ids import RootRange
from ftlayer.vertex import calls

STREAMS = ("job/stored", "job/source", "job/other")
SOURCES = STREAMS[1:]
HOLDER, PARTITION = "run/1", "p"
ROOTS = 4  # those of records are below, those that the vertex gives out are not


@dataclass
class Record:
    """One record. ``root`` is the id under which somebody works on it, None while it is idle."""

    stream: str
    root: int | None = None
    done: bool = False
    stored: bool = False  # it has left its range


@dataclass
class Held:
    """A range as its holder keeps it."""

    facts: calls.RowRange
    roots: Any
    texts: list[str]
    segment: int


@dataclass
class Source:
    """What the holder of a stream's one partition has."""

    ranges: list[Held] = field(default_factory=list)

    @property
    def end(self) -> int:
        return len(self.ranges)


def position(number: int) -> bytes | None:
    return b"%d" % number if number else None


def machine(kit: Any, tracker: str) -> type[RuleBasedStateMachine]:
    class Meeting(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.vertex = kit.Vertex(tracker=tracker)
            self.records: dict[str, Record] = {}
            self.late: dict[int, Record] = {}  # roots whose attempt timed out
            self.held: set[int] = set()  # roots that have failed before they were registered
            self.sources = {stream: Source() for stream in SOURCES}

        @initialize(circuit=st.booleans())
        def open(self, circuit: bool) -> None:

            self.circuits = (calls.StreamCircuit("", Limit(count=2)),) if circuit else ()
            for stream in STREAMS:
                self.declare(stream)

        def declare(self, stream: str, *, read_again: bool = False) -> None:
            replay = "source" if stream in SOURCES else "store"
            options = {
                "timeout_ms": 1_000,
                "backoff_ms": (),
                "max_attempts": 1_000,
                "circuits": self.circuits,
            }
            self.vertex.open(stream, replay=replay, **options)
            if replay == "source":
                self.take_over(stream, read_again=read_again)

        def take_over(self, stream: str, *, read_again: bool) -> None:
            """Hold the partition, and register again what a lost vertex knows nothing of."""
            source = self.sources[stream]
            (taken,) = self.vertex.call(calls.TakeOver(stream, (PARTITION,), HOLDER)).partitions
            at = int(taken.position or b"0")
            if read_again:
                del source.ranges[at:]
            known = {each.range: each.segment for each in taken.ranges}
            for held in source.ranges[:at]:
                held.segment = known.get(held.facts, -1)  # -1: all of it has left
            for held in source.ranges[at:]:
                held.segment = self.register(stream, held, wanted=True)

        def register(self, stream: str, held: Held, *, wanted: bool = False) -> int:
            roots = held.roots if isinstance(held.roots, RootRange) else kit.u64(held.roots)
            incarnation = self.vertex.layer.incarnation
            call = calls.Register(stream, held.facts, roots, None, HOLDER, incarnation, wanted=wanted)
            assert self.vertex.layer.intake_blocked(call, self.vertex.now) is None or self.circuits
            return int(self.vertex.call(call).segment)

        def in_work(self) -> dict[int, Record]:
            return {r.root: r for r in self.records.values() if r.root is not None and not r.done}

        # -------------------------------------------------------- rows come

        def entered(self, stream: str, roots: list[int], texts: list[str]) -> None:
            taken = set(self.in_work()) | set(self.late)
            for root, text in zip(roots, texts, strict=True):
                self.records[text] = Record(stream, None if root in taken else root)
                taken.add(root)
            for root in self.held.intersection(roots):
                self.ended(root)
            self.held.difference_update(roots)
            self.vertex.tick()

        @rule(
            stream=st.sampled_from(STREAMS),
            roots=st.one_of(
                st.lists(st.integers(1, ROOTS), min_size=1, max_size=4),
                st.builds(RootRange, st.integers(1, ROOTS // 2), st.integers(2, ROOTS // 2 + 1)),
            ),
        )
        def come(self, stream: str, roots: Any) -> None:
            each = roots.ids().tolist() if isinstance(roots, RootRange) else roots
            texts = [f"record {len(self.records) + place}" for place in range(len(each))]
            if stream in SOURCES:
                source = self.sources[stream]
                end, rows = source.end, len(each)
                facts = calls.RowRange(PARTITION, position(end), b"%d" % (end + 1), end, 0, rows, rows)
                held = Held(facts, roots, texts, -1)
                held.segment = self.register(stream, held)
                source.ranges.append(held)
            else:
                given = roots if isinstance(roots, RootRange) else kit.u64(roots)
                self.vertex.call(calls.Persist(stream, kit.payload(texts), given, None))
            self.entered(stream, each, texts)

        # -------------------------------------------------------- events

        @precondition(lambda self: self.in_work() or self.late)
        @rule(which=st.integers(0))
        def acknowledge(self, which: int) -> None:
            work = {**self.in_work(), **self.late}
            root = sorted(work)[which % len(work)]
            assert self.vertex.xor((root, root)).completed == 1
            work[root].done = True
            self.late.pop(root, None)
            self.vertex.advance(100)  # so that a loss does not bring it back

        def ended(self, root: int) -> None:
            record = self.in_work().get(root)
            if record is not None:
                record.root = None
            self.late.pop(root, None)

        @rule(root=st.integers(1, ROOTS), hold=st.booleans())
        def fail(self, root: int, hold: bool) -> None:
            known = root in self.in_work() or root in self.late
            failures = (calls.Failure(root, "broken", "", "", False),)
            self.vertex.call(calls.Fail(failures, self.vertex.layer.incarnation, hold))
            self.ended(root)
            if hold and not known:
                self.held.add(root)

        @rule(root=st.integers(1, ROOTS))
        def touch(self, root: int) -> None:
            self.vertex.call(calls.Touch(kit.u64([root]), self.vertex.layer.incarnation))

        @rule(stream=st.sampled_from(STREAMS))
        def recall(self, stream: str) -> None:
            self.vertex.recall(stream)
            for record in self.records.values():
                if record.stream == stream and record not in self.late.values():
                    record.root = None

        # -------------------------------------------------------- time and losses

        @rule()
        def all_time_out(self) -> None:
            for root, record in self.in_work().items():
                self.late[root] = record
                record.root = None
            self.vertex.advance(2_000)
            self.held.clear()
            self.vertex.advance(2_000)

        @rule()
        def the_vertex_is_lost(self) -> None:
            self.vertex.restart()
            self.late.clear()
            self.held.clear()
            for record in self.records.values():
                record.root = None
            for stream in STREAMS:
                self.declare(stream)

        @rule(stream=st.sampled_from(SOURCES))
        def rows_are_stored_from_here_on(self, stream: str) -> None:
            """What the holder has is read again, under other roots, by a program that wants it stored."""
            self.vertex.open(stream, timeout_ms=1_000, backoff_ms=(), max_attempts=1_000)
            for record in self.records.values():
                if record.stream == stream and not record.stored and not record.done:
                    self.ended(record.root or -1)
                    self.late = {root: late for root, late in self.late.items() if late is not record}
                    record.done = True
            self.declare(stream, read_again=True)
            self.vertex.tick()

        # -------------------------------------------------------- replays

        @rule(stream=st.sampled_from(SOURCES))
        def holders_store_what_is_wanted(self, stream: str) -> None:
            incarnation = self.vertex.layer.incarnation
            told = self.vertex.call(calls.AskRanges(stream, HOLDER, incarnation))
            by_segment = {held.segment: held for held in self.sources[stream].ranges}
            for wanted in told.wanted:
                texts = [by_segment[wanted.segment].texts[row] for row in wanted.rows.tolist()]
                assert not any(self.records[text].done for text in texts)
                assert not any(self.records[text].root for text in texts)
                store = calls.StoreRows(
                    stream, wanted.segment, wanted.rows, kit.payload(texts), HOLDER, incarnation
                )
                assert self.vertex.call(store).rows == len(texts)
                for text in texts:
                    self.records[text].stored = True

        @rule(stream=st.sampled_from(STREAMS), limit=st.integers(1, 5))
        def take(self, stream: str, limit: int) -> None:
            for root, _, _, text in self.vertex.take(limit, stream):
                assert root > 2 * ROOTS
                record = self.records[text]
                assert (record.stream, record.root, record.done) == (stream, None, False)
                record.root = root
                for late in [late for late, other in self.late.items() if other is record]:
                    del self.late[late]

        # -------------------------------------------------------- what must hold

        @invariant()
        def all_that_is_not_done_is_there(self) -> None:
            stats = self.vertex.stats()
            left = sum(not record.done for record in self.records.values())
            assert stats["pending"] + stats["waiting"] == left
            assert stats["tracked_roots"] == len(self.in_work()) + len(self.late)

        def teardown(self) -> None:
            for _ in range(200):
                self.vertex.advance(
                    100_000
                )  # what is out counts as timed out, what is held by a breaker is tried
                for root, record in self.in_work().items():
                    self.late[root] = record
                    record.root = None
                for stream in SOURCES:
                    self.holders_store_what_is_wanted(stream)
                for stream in STREAMS:
                    self.take(stream, 1_000)
                for root in self.in_work():
                    self.vertex.xor((root, root))
                    self.in_work()[root].done = True
                if all(record.done for record in self.records.values()):
                    break
            self.vertex.advance(100)
            assert self.vertex.stats()["pending"] == self.vertex.stats()["waiting"] == 0
            assert self.vertex.stored("segments") == self.vertex.stored("waiting") == {}

    return Meeting


@pytest.mark.parametrize(("tracker", "examples"), [("table", 100), ("exact", 30)])
def test_records_whose_roots_meet_are_followed_each_by_itself(kit: Any, tracker: str, examples: int) -> None:
    run_state_machine_as_test(
        machine(kit, tracker),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("as_range", [False, True])
def test_rows_of_a_source_whose_roots_are_pending_elsewhere_are_wanted(kit: Any, as_range: bool) -> None:
    vertex = kit.Vertex()
    vertex.open("a")
    vertex.open("b", replay="source")
    vertex.call(calls.TakeOver("b", ("p",), HOLDER))
    vertex.persist([7], stream="a")
    facts = calls.RowRange("p", None, b"2", 0, 0, 2, 2)
    roots = RootRange(7, 2) if as_range else kit.u64([7, 8])
    incarnation = vertex.layer.incarnation
    segment = vertex.call(calls.Register("b", facts, roots, None, HOLDER, incarnation)).segment
    assert vertex.take(stream="b") == []
    (wanted,) = vertex.call(calls.AskRanges("b", HOLDER, incarnation)).wanted
    assert (wanted.segment, wanted.rows.tolist()) == (segment, [0])
    vertex.xor((7, 7), (8, 8))
    vertex.call(calls.StoreRows("b", segment, wanted.rows, kit.payload(["b7"]), HOLDER, incarnation))
    ((root, origin, attempt, text),) = vertex.take(stream="b")
    assert (origin, attempt, text) == (7, 1, "b7")
    vertex.xor((root, root))
    vertex.advance(1_000)
    assert vertex.stats()["pending"] == vertex.stats()["waiting"] == 0
