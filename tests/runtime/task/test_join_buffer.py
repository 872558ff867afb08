from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.records.keyhash import spark_hash
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, MIN_TIME_MS
from ftlayer.runtime.task import build as join_past
from ftlayer.runtime.task import join_buffer
from ftlayer.runtime.task.build import PastRows
from ftlayer.runtime.task.join_buffer import JoinBuffer, JoinRows, same_keys, shifted

NAN = float("nan")
VALUES = [
    (pa.bool_(), [True, False, None]),
    (pa.int32(), [1, 2, None]),
    (pa.float64(), [1.0, NAN, None]),
    (pa.decimal128(10, 2), [decimal.Decimal("1.00"), decimal.Decimal("2.50"), None]),
    (pa.string(), ["a", "b", None]),
    (pa.large_binary(), [b"a", b"b", None]),
    (pa.date32(), [datetime.date(2020, 1, 1), datetime.date(2021, 1, 1), None]),
    (pa.timestamp("us", "UTC"), [0, 1, None]),
    (pa.list_(pa.int64()), [[1], [1, 2], None]),
    (pa.struct([("a", pa.int64())]), [{"a": 1}, {"a": None}, None]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b", None]),
    (pa.null(), [None, None, None]),
]


def column_of(type_: pa.DataType, values: list) -> pa.Array:
    return pa.array(values, type_.value_type if pa.types.is_dictionary(type_) else type_).cast(type_)


def rows_of(column: pa.Array, times: list[int] | None = None) -> JoinRows:
    payload = pa.RecordBatch.from_arrays([column], names=["key"])
    at = np.array(times or [0] * len(column), np.int64)
    return JoinRows(payload, spark_hash([column]), at, at)


@pytest.mark.parametrize(("type_", "values"), VALUES, ids=[str(type_) for type_, _ in VALUES])
def test_keys_of_every_kind(type_, values):
    ours, theirs = column_of(type_, values), column_of(type_, values[::-1])
    left, right = np.repeat(np.arange(3), 3), np.tile(np.arange(3), 3)
    expected = [
        a is not None and (a == b or (a != a and b is not None and b != b))
        for a in values
        for b in values[::-1]
    ]
    assert same_keys([ours], left, [theirs], right).tolist() == expected
    buffer = JoinBuffer()
    buffer.add(rows_of(ours))
    buffer.add(rows_of(theirs))
    (run,) = buffer.runs
    stored = run.keys(("key",))[0].to_pylist()
    assert sorted(map(repr, stored)) == sorted(map(repr, column_of(type_, values + values[::-1]).to_pylist()))


def test_runs_stay_few_and_what_is_gone_goes_out_of_memory():
    buffer = JoinBuffer()
    for time in range(1_000):
        buffer.add(rows_of(pa.array([time % 7], pa.int64()), [time]))
    assert len(buffer) == 1_000
    assert len(buffer.runs) <= 10
    gone = sum(len(rows) for _, rows in buffer.expire(900, 0))
    buffer.tidy()
    assert gone == 900
    assert len(buffer) == 100
    assert sum(len(run.rows) for run in buffer.runs) <= 200
    assert sum(len(rows) for _, rows in buffer.expire(MAX_TIME_MS, 0)) == 100
    buffer.tidy()
    assert buffer.runs == ()


def test_times_at_the_ends_of_their_range():
    ends = np.array([MIN_TIME_MS, 0, MAX_TIME_MS], np.int64)
    assert shifted(ends, 10).tolist() == [MIN_TIME_MS + 10, 10, MAX_TIME_MS]
    assert shifted(ends, -10).tolist() == [MIN_TIME_MS, -10, MAX_TIME_MS - 10]
    buffer = JoinBuffer()
    buffer.add(rows_of(pa.array([1, 1, 1], pa.int64()), ends.tolist()))
    key = spark_hash([pa.array([1], pa.int64())])
    everything = list(buffer.matches(key, np.array([MIN_TIME_MS]), np.array([MAX_TIME_MS]), 10))
    assert sum(len(rows) for block in everything for _, _, rows in block) == 3


def test_what_is_remembered_has_an_end_in_time_and_in_bytes(monkeypatch):
    past = PastRows(160)
    for time in range(0, 400, 5):
        past.add(rows_of(pa.array([time], pa.int64())), time)
        past.forget(time)
        stored = sorted(
            value for run in past.buffer.runs for value in run.keys(("key",))[0].filter(run.alive).to_pylist()
        )
        assert set(stored) >= set(range(max(time - 155, 0), time + 1, 5))
        assert not stored or stored[0] > time - 160 - 2 * 10
    monkeypatch.setattr(join_past, "MAX_PAST_BYTES", 100_000)
    monkeypatch.setattr(join_buffer, "MAX_RUN_BYTES", 20_000)
    for number in range(200):
        past.add(rows_of(pa.array([number] * 100, pa.int64())), 400)
    assert 60_000 <= past.buffer.payload_bytes <= 100_000
    assert 199 in past.buffer.runs[-1].keys(("key",))[0].to_pylist()
