"""The core rules about completion, with events as tasks send them, for both trackers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.vertex.acker import (
    AckerTable,
    BucketRotation,
    ExactTracker,
    IdLists,
    Tracker,
    fold_ids,
    kernels,
    warm_up,
)

U64 = Callable[..., np.ndarray]


def random_tree(rng: random.Random) -> tuple[list[int], list[list[int]]]:
    """Ids emitted for a root, and one event for each record: its id, then its children's."""
    emitted = [rng.getrandbits(64) | 1 for _ in range(rng.randint(1, 3))]
    events, todo = [], list(emitted)
    while todo:
        record = todo.pop(rng.randrange(len(todo)))
        children = (
            [] if len(events) > 12 else [rng.getrandbits(64) | 1 for _ in range(rng.choice([0, 0, 1, 2]))]
        )
        events.append([record, *children])
        todo += children
    return emitted, events


def lists(*ids: list[int]) -> IdLists:
    offsets = np.cumsum([0, *(len(part) for part in ids)])
    return IdLists(np.array(list(itertools.chain(*ids)), np.uint64), offsets)


@given(seed=st.integers(0, 2**32), roots=st.integers(1, 30), batch=st.integers(1, 40), exact=st.booleans())
@settings(max_examples=150, deadline=None)
def test_each_root_completes_exactly_once_with_its_last_event(
    seed: int, roots: int, batch: int, exact: bool
) -> None:
    """Events of many roots in any order, in batches of any size: nothing early, nothing twice."""
    rng = random.Random(seed)
    tracker: Tracker = ExactTracker() if exact else AckerTable()
    names = [rng.getrandbits(64) | 1 for _ in range(roots)]
    events: list[tuple[int, list[int]]] = []
    for name in names:
        emitted, own = random_tree(rng)
        ids = lists(emitted)
        tracker.register(np.array([name], np.uint64), fold_ids(ids), ids=ids)
        events += [(name, event) for event in own]
    rng.shuffle(events)
    left = {name: sum(root == name for root, _ in events) for name in names}
    for start in range(0, len(events), batch):
        part = events[start : start + batch]
        ids = lists(*(event for _, event in part))
        done = tracker.xor(np.array([root for root, _ in part], np.uint64), fold_ids(ids), ids=ids)
        order = []
        for root, _ in part:
            left[root] -= 1
            if left[root] == 0:
                order.append(root)
        assert done.roots.tolist() == order
    assert tracker.pending_count == 0
    assert tracker.unknown_xors == 0


def test_a_root_without_receivers_completes_at_registration(tracker: Tracker, u64: U64) -> None:
    done = tracker.register(u64(1, 2, 3), u64(0, 7, 0), locations=u64(10, 20, 30))
    assert done.roots.tolist() == [1, 3]
    assert done.locations.tolist() == [10, 30]
    assert tracker.contains(u64(1, 2, 3)).tolist() == [False, True, False]


def test_early_events_wait_for_the_registration(tracker: Tracker, u64: U64) -> None:
    assert tracker.xor(u64(5, 5), u64(6, 9), hold_unregistered=True, bucket=3).roots.size == 0
    assert (tracker.orphan_count, tracker.pending_count) == (1, 0)
    assert not tracker.contains(u64(5)).any()
    done = tracker.register(u64(5, 6), u64(6 ^ 9, 1), locations=u64(55, 66))
    assert (done.roots.tolist(), done.locations.tolist()) == ([5], [55])
    assert (tracker.orphan_count, tracker.pending_count) == (0, 1)


def test_orphans_are_dropped_after_their_time(tracker: Tracker, u64: U64) -> None:
    rotation = BucketRotation(2 * 1000, buckets=3, first_bucket=1)
    tracker.xor(u64(5), u64(6), hold_unregistered=True, bucket=rotation.bucket_at(0))
    assert tracker.drop_orphans(rotation.advance(1999)) == 0
    assert tracker.drop_orphans(rotation.advance(3000)) == 1
    assert tracker.orphan_count == 0
    assert tracker.register(u64(5), u64(6)).roots.size == 0


def test_events_without_a_root_are_ignored_and_counted(tracker: Tracker, u64: U64) -> None:
    tracker.register(u64(1), u64(4))
    done = tracker.xor(u64(9, 1, 1, 0), u64(4, 4, 8, 1))
    assert done.roots.tolist() == [1]
    assert tracker.unknown_xors == 3
    assert tracker.pending_count == 0


def test_a_late_event_of_a_root_completed_in_the_same_batch_is_not_held(tracker: Tracker, u64: U64) -> None:
    tracker.register(u64(1), u64(4))
    tracker.xor(u64(1, 1), u64(4, 8), hold_unregistered=True)
    assert (tracker.orphan_count, tracker.unknown_xors) == (0, 1)


def test_a_second_registration_changes_nothing(tracker: Tracker, u64: U64) -> None:
    tracker.register(u64(1), u64(4), locations=u64(11))
    assert tracker.register(u64(1, 1), u64(0, 5), locations=u64(12, 13)).roots.size == 0
    assert tracker.duplicate_registrations == 2
    assert tracker.values(u64(1)).tolist() == [4]
    assert tracker.xor(u64(1), u64(4)).locations.tolist() == [11]


def test_expiry_takes_what_was_not_touched(tracker: Tracker, u64: U64) -> None:
    fast = BucketRotation(100, buckets=2, first_bucket=1)
    slow = BucketRotation(1000, buckets=3, first_bucket=3)
    tracker.register(u64(1, 2), u64(7, 7), locations=u64(10, 20), bucket=fast.bucket_at(0))
    tracker.register(u64(3), u64(7), locations=u64(30), bucket=slow.bucket_at(0))
    assert fast.advance(150) == []
    tracker.touch(u64(2, 99), fast.bucket_at(150))
    expired = tracker.expire(fast.advance(200) + slow.advance(200))
    assert (expired.roots.tolist(), expired.locations.tolist()) == ([1], [10])
    assert tracker.expire(fast.advance(299)).roots.size == 0
    assert tracker.expire(fast.advance(300)).roots.tolist() == [2]
    assert tracker.expire(slow.advance(1500)).roots.tolist() == [3]


def test_a_timed_out_root_that_is_kept_can_still_complete(tracker: Tracker, u64: U64) -> None:
    tracker.register(u64(1, 2), u64(7, 7), locations=u64(10, 20), bucket=1)
    assert sorted(tracker.expire([1], keep_as=0).roots.tolist()) == [1, 2]
    assert tracker.xor(u64(1), u64(7)).locations.tolist() == [10]
    forgotten = tracker.forget(u64(1, 2, 2))
    assert forgotten.pending.tolist() == [False, True, False]
    assert forgotten.locations.tolist() == [0, 20, 0]
    assert tracker.expire([0, 1]).roots.size == 0


def test_bad_input_is_refused_and_changes_nothing(tracker: Tracker, u64: U64) -> None:
    with pytest.raises(ConfigError, match="roots: item 1 is 0"):
        tracker.register(u64(1, 0), u64(1, 1))
    with pytest.raises(ConfigError, match="values: expected 2 items"):
        tracker.register(u64(1, 2), u64(1))
    with pytest.raises(ConfigError, match="locations: expected 1 items"):
        tracker.register(u64(1), u64(1), locations=u64(1, 2))
    with pytest.raises(ConfigError, match="uint64 array, got int64"):
        tracker.xor(np.array([1]), u64(1))
    with pytest.raises(ConfigError, match="bucket 65536"):
        tracker.register(u64(1), u64(1), bucket=65536)
    assert tracker.pending_count == 0


def test_read_only_and_strided_input_compiles_nothing_new(u64: U64) -> None:
    """Arrow's buffers are read-only; a kernel compiled for them in a running vertex is a pause of seconds."""
    warm_up()
    compiled = len(kernels.insert.signatures), len(kernels.fold_and_take.signatures)
    read_only = np.frombuffer(u64(1, 2, 3, 4).tobytes(), np.uint64)
    unaligned = np.frombuffer(b"x" + u64(1, 2).tobytes(), np.uint64, offset=1)
    tracker = AckerTable()
    tracker.register(read_only, read_only, locations=read_only, bucket=1)
    assert tracker.xor(read_only[::2], read_only[::2]).roots.tolist() == [1, 3]
    tracker.register(unaligned, unaligned)
    assert (len(kernels.insert.signatures), len(kernels.fold_and_take.signatures)) == compiled


def test_locations_survive_the_moves_of_growth_and_deletion() -> None:
    """Roots leave in batches while others come: what comes back is what was given."""
    rng = np.random.default_rng(3)
    tracker = AckerTable()
    live = np.zeros(0, np.uint64)
    for _ in range(60):
        coming = rng.integers(1, 2**64, 4000, dtype=np.uint64)
        tracker.register(coming, coming, locations=~coming, bucket=1)
        live = rng.permutation(np.concatenate([live, coming]))
        leaving, live = live[:3000], live[3000:]
        mixed = rng.permutation(np.concatenate([leaving, leaving]))
        # Half of the value with each of the two events of a root, which come in any order.
        first = rng.integers(1, 2**64, leaving.size, dtype=np.uint64)
        order = np.argsort(leaving)
        at = order[np.searchsorted(leaving[order], mixed)]
        seen = np.zeros(leaving.size, np.bool_)
        values = np.empty_like(mixed)
        for position, index in enumerate(at.tolist()):
            values[position] = first[index] ^ leaving[index] if seen[index] else first[index]
            seen[index] = True
        done = tracker.xor(mixed, values)
        assert (done.locations == ~done.roots).all()
        assert np.sort(done.roots).tolist() == np.sort(leaving).tolist()
    assert tracker.pending_count == live.size
    assert (np.sort(tracker.expire([1]).locations) == np.sort(~live)).all()
    assert tracker.pending_count == 0
