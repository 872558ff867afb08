"""The rotating hash map, its buckets rotated by a clock, against a dict with the time of each key's last put."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ftlayer.errors import ConfigError
from ftlayer.vertex.acker import BucketRotation, RotatingHashMap
from ftlayer.vertex.acker.rotating_map import as_stamp, as_u64, no_zeros

# Few keys, so that they meet again; some collide in their low bits, some in their high bits.
KEYS = st.sampled_from([*range(1, 30), *(n << 56 for n in range(1, 15)), *(2**64 - n for n in range(1, 15))])
BATCH = st.lists(KEYS, max_size=40)
TIMEOUT_MS = 1_200


def u64(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


class RotatingMapMachine(RuleBasedStateMachine):
    @initialize(buckets=st.integers(2, 5))
    def start(self, buckets: int) -> None:
        self.map = RotatingHashMap()
        self.rotation = BucketRotation(TIMEOUT_MS, buckets)
        self.interval_ms = TIMEOUT_MS // (buckets - 1)
        self.values: dict[int, int] = {}
        self.put_ms: dict[int, int] = {}
        self.now_ms = 0

    @property
    def newest(self) -> np.uint16:
        return as_stamp(self.rotation.bucket_at(self.now_ms))

    @rule(keys=BATCH, data=st.data())
    def put(self, keys: list[int], data: st.DataObject) -> None:
        values = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=len(keys), max_size=len(keys)))
        self.map.upsert(u64(keys), u64(values), self.newest, fold=False)
        for key, value in zip(keys, values, strict=True):
            self.values[key] = value
            self.put_ms[key] = self.now_ms

    @rule(keys=BATCH)
    def touch(self, keys: list[int]) -> None:
        assert self.map.restamp(u64(keys), self.newest).tolist() == [key in self.values for key in keys]
        self.put_ms.update({key: self.now_ms for key in keys if key in self.values})

    @rule(keys=BATCH)
    def remove(self, keys: list[int]) -> None:
        lookup = self.map.remove(u64(keys))
        for key, found, value in zip(keys, lookup.found, lookup.values.tolist(), strict=True):
            assert found == (key in self.values)
            assert value == self.values.pop(key, 0)

    @rule(pause_ms=st.integers(0, 3 * TIMEOUT_MS))
    def rotate(self, pause_ms: int) -> None:
        self.now_ms += pause_ms
        expired: list[tuple[int, int]] = []
        for bucket in self.rotation.advance(self.now_ms):
            entries = self.map.stamped(as_stamp(bucket))
            self.map.remove(entries.keys)
            self.map.shrink_one()
            expired += zip(entries.keys.tolist(), entries.values.tolist(), strict=True)
        # An entry expires a timeout after the interval in which it was put.
        ends_ms = {key: (self.put_ms[key] // self.interval_ms + 1) * self.interval_ms for key in self.values}
        due = {key for key, end_ms in ends_ms.items() if end_ms + TIMEOUT_MS <= self.now_ms}
        assert sorted(expired) == sorted((key, self.values.pop(key)) for key in due)

    @invariant()
    def same_content(self) -> None:
        assert len(self.map) == len(self.values)
        found, values, _ = self.map.look_up(u64([*self.values, 77777]))
        assert found.tolist() == [True] * len(self.values) + [False]
        assert values.tolist() == [*self.values.values(), 0]


TestRotatingMap = RotatingMapMachine.TestCase
TestRotatingMap.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_cannot_be_held_is_refused() -> None:
    with pytest.raises(ConfigError, match="item 1 is 0"):
        no_zeros(u64([1, 0]), "keys")
    with pytest.raises(ConfigError, match="values: expected 2 items"):
        as_u64(u64([1]), "values", 2)
    with pytest.raises(ConfigError, match="uint64 array, got int64"):
        as_u64(np.array([1, 2]), "keys")
    with pytest.raises(ConfigError, match="bucket 65536"):
        as_stamp(1 << 16)
    assert RotatingHashMap().look_up(u64([0])).found.tolist() == [False]
