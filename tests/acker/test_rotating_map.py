"""RotatingHashMap against a dict with the rotation of each key's last put."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ftlayer.acker import RotatingHashMap
from ftlayer.errors import ConfigError

# Few keys, so that they meet again; some collide in their low bits, some in their high bits.
KEYS = st.sampled_from([*range(1, 30), *(n << 56 for n in range(1, 15)), *(2**64 - n for n in range(1, 15))])
BATCH = st.lists(KEYS, max_size=40)


def u64(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


class RotatingMapMachine(RuleBasedStateMachine):
    @initialize(buckets=st.integers(2, 5))
    def start(self, buckets: int) -> None:
        self.buckets = buckets
        self.expired: list[tuple[int, int]] = []
        self.map = RotatingHashMap(buckets, self.note_expired)
        self.values: dict[int, int] = {}
        self.put_at: dict[int, int] = {}
        self.rotations = 0

    def note_expired(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.expired += zip(keys.tolist(), values.tolist(), strict=True)

    @rule(keys=BATCH, data=st.data())
    def put(self, keys: list[int], data: st.DataObject) -> None:
        values = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=len(keys), max_size=len(keys)))
        self.map.put(u64(keys), u64(values))
        for key, value in zip(keys, values, strict=True):
            self.values[key] = value
            self.put_at[key] = self.rotations

    @rule(keys=BATCH)
    def touch(self, keys: list[int]) -> None:
        assert self.map.touch(u64(keys)).tolist() == [key in self.values for key in keys]
        self.put_at.update({key: self.rotations for key in keys if key in self.values})

    @rule(keys=BATCH)
    def remove(self, keys: list[int]) -> None:
        lookup = self.map.remove(u64(keys))
        for key, found, value in zip(keys, lookup.found, lookup.values.tolist(), strict=True):
            assert found == (key in self.values)
            assert value == self.values.pop(key, 0)

    @rule()
    def rotate(self) -> None:
        self.rotations += 1
        due = {key for key in self.values if self.put_at[key] + self.buckets <= self.rotations}
        self.expired.clear()
        assert self.map.rotate() == len(due)
        assert sorted(self.expired) == sorted((key, self.values.pop(key)) for key in due)

    @invariant()
    def same_content(self) -> None:
        assert len(self.map) == len(self.values)
        keys = [*self.values, 77777]
        found, values = self.map.get(u64(keys))
        assert found.tolist() == [True] * len(self.values) + [False]
        assert values.tolist() == [*self.values.values(), 0]


TestRotatingMap = RotatingMapMachine.TestCase
TestRotatingMap.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_expired_function_may_put_the_entries_again() -> None:
    again: list[int] = []

    def put_again(keys: np.ndarray, values: np.ndarray) -> None:
        again.extend(keys.tolist())
        rotating.put(keys, values)

    rotating = RotatingHashMap(2, put_again)
    rotating.put(u64([5, 6]), u64([50, 60]))
    for _ in range(4):
        rotating.rotate()
    assert sorted(again) == [5, 5, 6, 6]
    assert rotating.get(u64([5, 6]))[1].tolist() == [50, 60]


def test_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="buckets: expected 2"):
        RotatingHashMap(1)
    rotating = RotatingHashMap()
    with pytest.raises(ConfigError, match="item 1 is 0"):
        rotating.put(u64([1, 0]), u64([1, 1]))
    with pytest.raises(ConfigError, match="values: expected 2 items"):
        rotating.put(u64([1, 2]), u64([1]))
    with pytest.raises(ConfigError, match="uint64 array, got int64"):
        rotating.contains(np.array([1, 2]))
    assert rotating.contains(u64([0])).tolist() == [False]
    assert len(rotating) == 0
