"""The source rows that a seal took, found again in any order: as a multiset, by content."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import CodecError, QueryError
from ftlayer.spark.batch.runner import choose, rows_to_skip
from ftlayer.spark.deliveries.source import row_digests
from ftlayer.vertex.calls import BatchBegun, BatchState, Failure, SealedRows

S = pa.schema([("a", pa.int64()), ("s", pa.string())])
RICH = pa.schema(
    [
        ("s", pa.struct([("x", pa.string()), ("t", pa.list_(pa.date32()))])),
        ("m", pa.map_(pa.string(), pa.timestamp("us", "UTC"))),
        ("d", pa.decimal128(10, 2)),
        ("ntz", pa.timestamp("us")),
        ("bin", pa.binary()),
        ("f", pa.float64()),
        ("dur", pa.duration("us")),
        ("time", pa.time64("us")),
    ]
)
rich = st.fixed_dictionaries(
    {
        "s": st.none()
        | st.fixed_dictionaries(
            {"x": st.none() | st.text(max_size=2), "t": st.none() | st.lists(st.dates(), max_size=2)}
        ),
        "m": st.none()
        | st.dictionaries(st.text(max_size=1), st.none() | st.datetimes(), max_size=2).map(
            lambda found: list(found.items())
        ),
        "d": st.none() | st.decimals(-9, 9, places=2),
        "ntz": st.none() | st.datetimes(),
        "bin": st.none() | st.binary(max_size=2),
        "f": st.none() | st.sampled_from([0.0, 1.0, math.nan, math.inf]),
        "dur": st.none() | st.timedeltas(dt.timedelta(-9), dt.timedelta(9)),
        "time": st.none() | st.times(),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(rich, min_size=1, max_size=6), st.randoms())
def test_equal_rows_have_equal_digests_wherever_they_lie(rows: list[dict[str, Any]], random: Any) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=RICH)
    digests = row_digests(batch)
    order = random.sample(range(len(rows)), len(rows))
    assert row_digests(batch.take(pa.array(order))) == [digests[i] for i in order]
    assert row_digests(batch.slice(1)) == digests[1:]
    plain = [repr(row) for row in batch.to_pylist()]
    for i, left in enumerate(plain):
        assert [digests[i] == other for other in digests] == [left == right for right in plain]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": 1, "s": None}, {"a": 1, "s": "None"}),
        ({"a": 1, "s": ""}, {"a": 1, "s": None}),
        ({"a": 1, "s": "1"}, {"a": 11, "s": ""}),
        ({"a": None, "s": "a"}, {"a": 0, "s": "a"}),
    ],
)
def test_rows_that_look_alike_differ(left: Any, right: Any) -> None:
    one, other = row_digests(pa.RecordBatch.from_pylist([left, right], schema=S))
    assert one != other


def test_rows_that_python_cannot_hold_have_digests_too() -> None:
    # They are just what fails in a batch, and is looked for when it runs again.
    batch = pa.record_batch(
        {
            "text": pa.array([b"\xff", b"\xfe", b"\xff"], pa.binary()).view(pa.string()),
            "when": pa.array([2**62] * 3, pa.int64()).view(pa.timestamp("us", "UTC")),
            "day": pa.array([2**30] * 3, pa.int32()).view(pa.date32()),
        }
    )
    one, two, three = row_digests(batch)
    assert one == three != two


found_rows = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), max_size=15)


@given(found_rows, st.lists(st.sampled_from("abcd"), max_size=6))
def test_as_many_of_equal_rows_are_chosen_as_were_sealed(
    rows: list[tuple[int, str]], sealed: list[str]
) -> None:
    ordinals: Counter[int] = Counter()
    found = []
    content = {}
    for partition, letter in rows:
        place = (partition, ordinals[partition])
        ordinals[partition] += 1
        content[place] = letter
        found.append((*place, letter.encode()))
    wanted = Counter(letter.encode() for letter in sealed)
    if Counter(sealed) - Counter(content.values()):
        missing = (Counter(sealed) - Counter(content.values())).total()
        with pytest.raises(QueryError, match=rf"^{missing} of {len(sealed)} source rows"):
            choose(found, wanted)
        return
    chosen = choose(found, wanted)
    taken = Counter(content[partition, place] for partition, places in chosen.items() for place in places)
    assert taken == Counter(sealed)
    assert wanted == Counter(letter.encode() for letter in sealed)


def sealed_of(payloads: list[pa.RecordBatch], **more: Any) -> BatchBegun:
    parts = tuple(
        SealedRows("q/files", payload, np.arange(1, payload.num_rows + 1, dtype=np.uint64), ())
        for payload in payloads
    )
    return BatchBegun(BatchState.SEALED, parts, **more)


def row(a: int) -> dict[str, Any]:
    return {"a": a, "s": "x"}


def test_places_are_found_in_any_partition_and_delivered_rows_are_no_match(kit: SimpleNamespace) -> None:
    frame = kit.FakeFrame(
        [
            [kit.source_rows([row(1), row(2)], S), kit.delivered_rows([row(3)], S, [77], 0, 1)],
            [],
            [kit.source_rows([row(9)], S), kit.source_rows([row(3), row(2), row(3)], S)],
        ]
    )
    payloads = [
        pa.RecordBatch.from_pylist([row(3)], schema=S),
        pa.RecordBatch.from_pylist([row(1)], schema=S),
    ]
    skip = rows_to_skip(frame, sealed_of(payloads, redelivered=(5,), resumed=(Failure(6, "r"),)), S)
    assert skip.ordinals == {0: frozenset({0}), 2: frozenset({1})}
    assert skip.roots == frozenset({5, 6})


def test_without_sealed_rows_the_source_is_not_read(kit: SimpleNamespace) -> None:
    class Unread:
        def mapInArrow(self, *arguments: Any) -> Any:
            raise AssertionError

    skip = rows_to_skip(Unread(), sealed_of([], redelivered=(5,)), S)  # type: ignore[arg-type]
    assert (skip.ordinals, skip.roots) == ({}, frozenset({5}))


def test_rows_that_are_gone_stop_the_batch(kit: SimpleNamespace) -> None:
    frame = kit.FakeFrame([[kit.source_rows([row(1)], S)]])
    payload = pa.RecordBatch.from_pylist([row(1), row(1)], schema=S)
    with pytest.raises(QueryError, match=r"1 of 2 source rows .* not in it any more"):
        rows_to_skip(frame, sealed_of([payload]), S)


# ---------------------------------------------------------------- a source whose schema has changed since


def test_a_column_that_the_source_has_gained_does_not_hide_the_sealed_rows(kit: SimpleNamespace) -> None:
    gained = pa.schema([*S, ("new", pa.string())])
    read = [{**row(1), "new": "x"}, {**row(2), "new": None}, {**row(1), "new": "y"}]
    frame = kit.FakeFrame([[kit.source_rows(read, gained)]])
    payload = pa.RecordBatch.from_pylist([row(1), row(2)], schema=S)
    assert rows_to_skip(frame, sealed_of([payload]), gained).ordinals == {0: frozenset({0, 1})}


def test_rows_sealed_before_and_after_a_column_came_are_each_found_once(kit: SimpleNamespace) -> None:
    gained = pa.schema([*S, ("new", pa.string())])
    read = [{**row(1), "new": "x"}, {**row(1), "new": "y"}]
    frame = kit.FakeFrame([[kit.source_rows(read, gained)]])
    old = pa.RecordBatch.from_pylist([row(1)], schema=S)
    new = pa.RecordBatch.from_pylist([{**row(1), "new": "x"}], schema=gained)
    for payloads in ([old, new], [new, old]):
        assert rows_to_skip(frame, sealed_of(payloads), gained).ordinals == {0: frozenset({0, 1})}


def test_a_column_that_became_wider_does_not_hide_the_sealed_rows(kit: SimpleNamespace) -> None:
    narrow = pa.schema([("a", pa.int32()), ("s", pa.string())])
    frame = kit.FakeFrame([[kit.source_rows([row(2), row(1)], S)]])
    payload = pa.RecordBatch.from_pylist([row(1)], schema=narrow)
    assert rows_to_skip(frame, sealed_of([payload]), S).ordinals == {0: frozenset({1})}


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (pa.schema([("a", pa.int64())]), "have a column 's'"),
        (pa.schema([("a", pa.bool_()), ("s", pa.string())]), "do not fit column 'a'"),
        (
            pa.schema([("a", pa.int64()), ("s", pa.int64())]),
            r"with the source's schema.*'s'.*'x'.*former schema",
        ),
    ],
    ids=["a column is gone", "another kind of type", "a value does not fit"],
)
def test_sealed_rows_that_do_not_fit_the_source_stop_the_batch_with_the_reason(
    kit: SimpleNamespace, now: pa.Schema, named: str
) -> None:
    payload = pa.RecordBatch.from_pylist([row(1)], schema=S)
    with pytest.raises(CodecError, match=named):
        rows_to_skip(kit.FakeFrame([]), sealed_of([payload]), now)
