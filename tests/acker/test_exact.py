"""What only the exact tracker knows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ftlayer.errors import ConfigError
from ftlayer.records.ids import OwedId
from ftlayer.vertex.acker import AckerTable, ExactTracker, IdLists, fold_ids

U64 = Callable[..., np.ndarray]


def event(owners: dict[int, str | None]) -> IdLists:
    names = [owner if owner is not None else "" for owner in owners.values()]
    return IdLists(np.array(list(owners), np.uint64), np.array([0, len(owners)]), names)


def test_explains_which_id_is_missing_and_who_owes_it(u64: U64) -> None:
    tracker = ExactTracker()
    emitted = event({11: "parse", 12: "count"})
    tracker.register(u64(1), fold_ids(emitted), ids=emitted)
    parsed = event({11: None, 21: "write", 22: "write"})
    tracker.xor(u64(1), fold_ids(parsed), ids=parsed)
    written = event({21: None})
    tracker.xor(u64(1), fold_ids(written), ids=written)
    early = event({99: None})
    tracker.xor(u64(1), fold_ids(early), ids=early)
    explanation = tracker.explain(1)
    assert explanation is not None
    assert explanation.registered
    assert explanation.ids_known
    assert set(explanation.owed) == {
        OwedId(12, "count", emitted=True),
        OwedId(22, "write", emitted=True),
        OwedId(99, "", emitted=False),
    }
    assert tracker.explain(2) is None


def test_a_root_whose_xor_is_0_early_does_not_complete(u64: U64) -> None:
    """Three ids whose XOR is 0: the table is deceived, the exact tracker is not."""
    emitted = IdLists(u64(3, 5, 9), np.array([0, 3]))
    table, exact = AckerTable(), ExactTracker()
    for tracker in (table, exact):
        tracker.register(u64(1), fold_ids(emitted), ids=emitted)
    lone = IdLists(u64(3 ^ 5 ^ 9), np.array([0, 1]))
    assert table.xor(u64(1), fold_ids(lone), ids=lone).roots.tolist() == [1]
    assert exact.xor(u64(1), fold_ids(lone), ids=lone).roots.size == 0


def test_no_early_zero_among_many_random_events() -> None:
    """The documented chance that the table takes a root for complete too early is about events x 2^-64."""
    rng = np.random.default_rng(4)
    tracker = AckerTable()
    count = 20_000
    roots = rng.integers(1, 2**64, count, dtype=np.uint64)
    ids = rng.integers(1, 2**64, (count, 3), dtype=np.uint64)
    lists = IdLists(ids.ravel(), np.arange(0, 3 * count + 1, 3))
    tracker.register(roots, fold_ids(lists), ids=lists)
    done = 0
    for column in range(3):
        acked = IdLists(np.ascontiguousarray(ids[:, column]), np.arange(count + 1))
        done += tracker.xor(roots, fold_ids(acked), ids=acked).roots.size
        assert done == (count if column == 2 else 0)


def test_a_root_with_an_event_that_names_no_ids_is_judged_by_its_xor(u64: U64) -> None:
    tracker = ExactTracker()
    emitted = IdLists(u64(3, 5), np.array([0, 2]))
    tracker.register(u64(1), fold_ids(emitted), ids=emitted)
    tracker.xor(u64(1), u64(3))
    explanation = tracker.explain(1)
    assert explanation is not None
    assert not explanation.ids_known
    assert tracker.xor(u64(1), u64(5)).roots.tolist() == [1]


def test_refuses_ids_that_are_not_the_values(u64: U64) -> None:
    tracker = ExactTracker()
    with pytest.raises(ConfigError, match="differs from the values"):
        tracker.register(u64(1), u64(3), ids=IdLists(u64(4), np.array([0, 1])))
    with pytest.raises(ConfigError, match="rising from 0 to 1"):
        IdLists(u64(4), np.array([0, 2]))
    with pytest.raises(ConfigError, match="owners: expected 1 names"):
        IdLists(u64(4), np.array([0, 1]), ["a", "b"])
    assert fold_ids(IdLists(u64(1, 2, 4), np.array([0, 0, 2, 3]))).tolist() == [0, 3, 4]
