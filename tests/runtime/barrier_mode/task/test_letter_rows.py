"""Dead letters of barrier mode as the rows that a stream of them has."""

from __future__ import annotations

import datetime as dt
import json

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA
from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.records.ipc import as_stream
from ftlayer.runtime.barrier_mode.task.mode import letter_rows
from ftlayer.state.snapshots.serializer import Serializer
from ftlayer.vertex.calls import Attempt

LETTER = bytes(range(255, 239, -1))


def letter(kind: LetterKind, payload: bytes, *, key: bytes = b"") -> ChainLetter:
    attempts = (
        Attempt(1, 1_500, "first", "parse", "here"),
        Attempt(4, 9_000, "last", "parse", "there", "Traceback …"),
    )
    return ChainLetter(LETTER, 3, "parse", 1, 0, kind, "score", key, payload, 77, attempts, 1_500, 9_250)


def test_a_record_is_a_row_of_the_schema_that_acker_mode_has() -> None:
    batch = pa.record_batch({"n": [7], "text": ["é"], "blob": [b"\xff"]})
    rows = letter_rows([letter(LetterKind.RECORD, as_stream(batch).to_pybytes())], "shop")
    assert rows.schema == LETTER_SCHEMA
    (row,) = rows.to_pylist()
    assert json.loads(row.pop("record")) == {"n": 7, "text": "é", "blob": "\\xff"}
    assert row == {
        "key": LETTER.hex(),
        "stream": "shop/parse",
        "origin_id": LETTER[:8].hex(),
        "attempts": 4,
        "first_failed_at": dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, dt.UTC),
        "died_at": dt.datetime(1970, 1, 1, 0, 0, 9, 250_000, dt.UTC),
        "reason": "last",
        "operator": "score",
        "traceback": "Traceback …",
    }


@given(st.one_of(st.text(), st.integers(-(2**63), 2**63 - 1), st.tuples(st.integers(0, 9), st.text())))
def test_of_a_timer_its_key_and_its_time_are_shown(key: object) -> None:
    rows = letter_rows([letter(LetterKind.TIMER, b"", key=Serializer().pack(key))], "shop")
    (row,) = rows.to_pylist()
    said = json.loads(row["record"])
    assert said["timer_ms"] == 77
    assert said["key"] == (list(key) if isinstance(key, tuple) else key)


def test_no_letters_are_no_rows() -> None:
    assert letter_rows([], "shop").num_rows == 0
