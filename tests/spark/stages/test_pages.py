"""Pages and their heads: what goes in comes out, and bytes that are none are refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import CodecError
from ftlayer.records.failures import FailedRow
from ftlayer.spark.stages.pages import (
    PAGE_SCHEMA,
    PageHead,
    ipc_to_rows,
    keep_rows,
    page_row,
    roots_of,
    rows_to_ipc,
    to_roots,
    with_roots,
)

u64 = st.integers(1, 2**64 - 1)
V = pa.schema([("v", pa.int64())])


def rows(values: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"v": value} for value in values], schema=V)


heads = st.builds(
    PageHead,
    rows_in=st.integers(0, 2**40),
    rows_out=st.integers(0, 2**40),
    failures=st.lists(
        st.builds(FailedRow, u64, st.integers(-1, 99), st.text(), st.text(), st.integers(0, 9), st.booleans()),
        max_size=3,
    ).map(tuple),
    tracebacks=st.lists(st.text(), max_size=3).map(tuple),
    failed_rows=st.none() | st.binary(),
    delivered=st.none() | st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
    delivered_roots=st.binary(),
    delivered_origins=st.binary(),
    delivered_tries=st.binary(),
    carried=st.binary(),
    seen_roots=st.binary(),
    sent_roots=st.binary(),
    emitted_roots=st.binary(),
    emitted_values=st.binary(),
)  # fmt: skip


@given(heads)
def test_a_head_comes_back_as_it_went(head: PageHead) -> None:
    assert PageHead.from_bytes(head.to_bytes()) == head


@given(
    st.binary() | heads.flatmap(lambda head: st.binary(max_size=9).map(lambda b: head.to_bytes()[:-1] + b))
)
def test_other_bytes_are_no_head(data: bytes) -> None:
    # Some bytes are a head by chance; no others may raise anything else.
    with suppress(CodecError):
        PageHead.from_bytes(data)


@pytest.mark.parametrize("value", [{}, {3: 4}, 5, "four", [1, 2, 3, 4], [1, 2, 3, [[1]]], [0] * 13])
def test_other_messages_are_no_head(value: Any) -> None:
    import msgpack

    with pytest.raises(CodecError):
        PageHead.from_bytes(msgpack.packb(value))


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4))
def test_rows_come_back_as_they_went_and_nothing_is_none(parts: list[list[int]]) -> None:
    data = rows_to_ipc(rows(part) for part in parts)
    back = [row["v"] for part in ipc_to_rows(data) for row in part.to_pylist()]
    assert back == [value for part in parts for value in part]
    assert (data is None) == (not back)


@given(st.data())
def test_rows_that_were_cut_short_or_never_were_rows_are_refused(data: Any) -> None:
    whole = rows_to_ipc([rows([1, 2, 3])])
    assert whole is not None
    cut = data.draw(st.integers(0, len(whole) - 9).map(lambda end: whole[:end]) | st.binary(max_size=64))
    with suppress(CodecError):
        list(ipc_to_rows(cut))


def test_no_bytes_are_refused() -> None:
    with pytest.raises(CodecError):
        list(ipc_to_rows(b""))


@given(st.lists(u64, max_size=20), st.lists(u64, max_size=5), st.data())
def test_rows_of_dropped_roots_are_left_out(roots: list[int], others: list[int], data: Any) -> None:
    dropped = set(others) | set(data.draw(st.lists(st.sampled_from(roots), max_size=5)) if roots else [])
    batch = with_roots(rows(list(range(len(roots)))), np.array(roots, np.uint64))
    kept = keep_rows(batch, np.array(sorted(dropped), np.uint64))
    assert kept.column("v").to_pylist() == [i for i, root in enumerate(roots) if root not in dropped]
    assert roots_of(kept).tolist() == [root for root in roots if root not in dropped]


def test_a_page_is_one_row_of_three_columns() -> None:
    head = PageHead(1, 0, (), (), None, None, b"", b"", b"", b"", b"", b"")
    page = page_row(head, None, pa.py_buffer(b"source"))
    assert page.schema == PAGE_SCHEMA
    assert page.to_pylist() == [{"head": head.to_bytes(), "data": None, "source": b"source", "part": 0}]
    assert to_roots(b"").tolist() == []
