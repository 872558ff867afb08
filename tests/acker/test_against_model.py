"""AckerTable does what ExactTracker does, whatever comes in whatever order."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ftlayer.records.ids import RootRange
from ftlayer.vertex.acker import AckerTable, ExactTracker, Roots

ROOTS = [*range(1, 40), *(n << 58 for n in range(1, 8)), *(2**64 - n for n in range(1, 8))]
LONGEST = 20
ALL = sorted({root + n for root in ROOTS for n in range(LONGEST) if root + n < 2**64})
# Few values, so that XORs of duplicated, lost, early and late events often come to 0.
EVENTS = st.lists(st.tuples(st.sampled_from(ROOTS), st.integers(0, 3)), max_size=60)
SOME = st.lists(st.sampled_from([*ROOTS, 0]), max_size=24)
BUCKET = st.integers(0, 4)


def rows(roots: Roots) -> list[tuple[int, int]]:
    return list(zip(roots.roots.tolist(), roots.locations.tolist(), strict=True))


def columns(events: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([root for root, _ in events], np.uint64), np.array([v for _, v in events], np.uint64)


class TrackersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = AckerTable(least_range=2)
        self.model = ExactTracker()
        self.locations = 0

    def pad(self, size: int) -> np.ndarray:
        """Distinct locations, so that a mixed-up one shows."""
        self.locations += size
        return np.arange(self.locations - size, self.locations, dtype=np.uint64)

    @rule(events=EVENTS, bucket=BUCKET)
    def register(self, events: list[tuple[int, int]], bucket: int) -> None:
        roots, values = columns(events)
        places = self.pad(roots.size)
        table = self.table.register(roots, values, locations=places, bucket=bucket)
        model = self.model.register(roots, values, locations=places, bucket=bucket)
        assert rows(table) == rows(model)

    @rule(first=st.sampled_from(ROOTS), count=st.integers(0, LONGEST), bucket=BUCKET, data=st.data())
    def register_range(self, first: int, count: int, bucket: int, data: st.DataObject) -> None:
        roots = RootRange(first, min(count, 2**64 - first))
        values = None
        if data.draw(st.booleans()):
            drawn = data.draw(st.lists(st.integers(0, 3), min_size=roots.count, max_size=roots.count))
            values = np.array(drawn, np.uint64)
        location = int(self.pad(roots.count)[0]) if roots.count else 0
        table = self.table.register_range(roots, values, location=location, bucket=bucket)
        model = self.model.register_range(roots, values, location=location, bucket=bucket)
        assert rows(table) == rows(model)

    @rule(some=SOME)
    def complete(self, some: list[int]) -> None:
        """The event that a root waits for comes."""
        roots = np.array(list(dict.fromkeys(some)), np.uint64)
        values = self.model.values(roots)
        table, model = self.table.xor(roots, values), self.model.xor(roots, values)
        assert sorted(rows(table)) == sorted(rows(model))

    @rule(events=EVENTS, hold=st.booleans(), bucket=st.integers(5, 7))
    def xor(self, events: list[tuple[int, int]], hold: bool, bucket: int) -> None:
        roots, values = columns([*events, (0, 1)])
        table = self.table.xor(roots, values, hold_unregistered=hold, bucket=bucket)
        model = self.model.xor(roots, values, hold_unregistered=hold, bucket=bucket)
        assert sorted(rows(table)) == sorted(rows(model))

    @rule(some=SOME)
    def forget(self, some: list[int]) -> None:
        table, model = (tracker.forget(np.array(some, np.uint64)) for tracker in (self.table, self.model))
        assert table.pending.tolist() == model.pending.tolist()
        assert table.locations.tolist() == model.locations.tolist()

    @rule(some=SOME, bucket=BUCKET)
    def touch(self, some: list[int], bucket: int) -> None:
        roots = np.array(some, np.uint64)
        assert self.table.touch(roots, bucket).tolist() == self.model.touch(roots, bucket).tolist()

    @rule(buckets=st.lists(BUCKET, max_size=3, unique=True), keep_as=st.none() | BUCKET)
    def expire(self, buckets: list[int], keep_as: int | None) -> None:
        table = self.table.expire(buckets, keep_as=keep_as)
        model = self.model.expire(buckets, keep_as=keep_as)
        assert sorted(rows(table)) == sorted(rows(model))

    @rule(buckets=st.lists(st.integers(0, 7), max_size=3))
    def drop_orphans(self, buckets: list[int]) -> None:
        assert self.table.drop_orphans(buckets) == self.model.drop_orphans(buckets)

    @invariant()
    def same_state(self) -> None:
        roots = np.array([*ALL, 0], np.uint64)
        assert self.table.contains(roots).tolist() == self.model.contains(roots).tolist()
        assert self.table.values(roots).tolist() == self.model.values(roots).tolist()
        table, model = self.table.locate(roots), self.model.locate(roots)
        assert table.pending.tolist() == model.pending.tolist()
        assert table.locations.tolist() == model.locations.tolist()
        assert set(rows(self.table.pending())) == {
            row
            for row in zip(roots.tolist(), table.locations.tolist(), strict=True)
            if row[0] in roots[table.pending]
        }
        assert sorted(rows(self.table.pending())) == sorted(rows(self.model.pending()))
        for count in ("pending_count", "orphan_count", "unknown_xors", "duplicate_registrations"):
            assert getattr(self.table, count) == getattr(self.model, count), count


TestTrackers = TrackersMachine.TestCase
TestTrackers.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
