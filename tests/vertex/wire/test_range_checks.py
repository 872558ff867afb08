"""Calls about ranges that cannot be meant are refused where they enter the vertex."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.errors import MalformedRequestError
from ftlayer.vertex.calls import AskRanges, Envelope, NoteRange, Register, RowRange, StoreRows, TakeOver
from ftlayer.vertex.wire.frames import decode_call, encode_call

IDS = np.array([1, 2], np.uint64)
ROWS = pa.record_batch({"n": [1, 2]})
FACTS = RowRange("p0", None, b"2", 0, 0, 2, 2)
REGISTER = Register("job/a", FACTS, IDS, IDS, "run/1", 1)
STORE = StoreRows("job/a", 3, np.array([0, 4], np.uint64), ROWS, "run/1", 1)
TAKE = TakeOver("job/a", ("p0",), "run/1")
ASK = AskRanges("job/a", "run/1", 1)
NOTE = NoteRange("job/a", 7, b"what it is", 5)


@pytest.mark.parametrize("call", [REGISTER, STORE, TAKE, ASK, NOTE], ids=lambda call: type(call).__name__)
def test_what_is_sent_is_what_comes(call: Any) -> None:
    came, _ = decode_call(encode_call(call, Envelope("client", 1)))
    assert type(came) is type(call)
    for name in type(call).__dataclass_fields__:
        sent, got = getattr(call, name), getattr(came, name)
        assert np.array_equal(sent, got) if isinstance(sent, np.ndarray) else sent == got


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (replace(REGISTER, stream=""), "Register.stream"),
        (replace(REGISTER, holder=""), "Register.holder"),
        (replace(REGISTER, roots=np.array([1, 0], np.uint64)), r"Register.roots\[1\]: 0 is never an id"),
        (replace(REGISTER, values=IDS[:1]), "Register.values: expected 2 rows"),
        (replace(REGISTER, range=replace(FACTS, rows=3, span=3)), "Register.range.rows: expected 2"),
        (replace(REGISTER, range=replace(FACTS, partition="")), "Register.range.partition"),
        (replace(REGISTER, range=replace(FACTS, first=-1)), "Register.range.first"),
        (replace(REGISTER, range=replace(FACTS, digest=bytes(65))), "Register.range.digest"),
        (replace(STORE, segment=-1), "StoreRows.segment"),
        (replace(STORE, rows=STORE.rows[:1]), "StoreRows.payload: expected 1 rows"),
        (replace(STORE, rows=STORE.rows[::-1].copy()), "StoreRows.rows: expected places"),
        (replace(STORE, rows=np.array([0, 1 << 20], np.uint64)), "StoreRows.rows: expected places"),
        (replace(STORE, key_hashes=np.zeros(3, np.int32)), "StoreRows.key_hashes"),
        (replace(TAKE, partitions=("p0", "")), r"TakeOver.partitions\[1\]"),
        (replace(REGISTER, range=replace(FACTS, span=1)), "Register.range.span"),
        (replace(ASK, stream="a\0"), "AskRanges.stream"),
        (replace(NOTE, stream=""), "NoteRange.stream"),
        (replace(NOTE, first=-1), "NoteRange.first"),
        (replace(NOTE, number=4), "NoteRange.number"),
        (replace(NOTE, number=1 << 63), "NoteRange.number"),
        (replace(NOTE, planned=bytes((16 << 20) + 1)), "NoteRange.planned"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Any, said: str) -> None:
    with pytest.raises(MalformedRequestError, match=said):
        decode_call(encode_call(call, Envelope("client", 1)))
