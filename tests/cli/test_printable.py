"""What records say, as a terminal gets it; and errors, as long as an answer may be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from ftlayer.cli.records import FoundRecords, print_record
from ftlayer.cli.tables import print_records
from ftlayer.common.printable import (
    LONGEST_ANSWER_BYTES,
    LetterWarnings,
    printable,
    printable_json,
    printing_console,
    shortened,
)
from ftlayer.errors import MalformedRequestError
from ftlayer.monitor.rules.names import JobNames
from ftlayer.transport.flight_connection import flight_error
from ftlayer.vertex.calls import Attempt, RecordInfo

ATTACK = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b31m \r\x08 \u202e \x7f"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# What the console itself writes: colours.
STYLES = re.compile(r"\x1b\[[0-9;]*m")


@given(st.text())
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    assert not OBEYED.search(shown)
    shown.encode()
    assert (
        shown == text
        or OBEYED.search(text)
        or any(char in text for char in "\u061c\u200e\u200f")
        or (any("\ud800" <= char <= "\udfff" for char in text))
    )


def test_ordinary_text_stays() -> None:
    for text in ("héllo\n\tworld", "日本語 👩‍👩‍👧", "[bold]brackets[/bold]", ""):
        assert printable(text) == text


def record() -> RecordInfo:
    payload = pa.record_batch({"line": [ATTACK], ATTACK: [1]})
    return RecordInfo(
        key=b"k",
        state="dead",
        stream=ATTACK,
        root=1,
        origin=1,
        attempt=1,
        not_before_ms=0,
        history=(Attempt(1, 1, ATTACK, ATTACK, ATTACK, ATTACK),),
        payload=payload,
    )


def test_lists_and_details_of_records(capsys: pytest.CaptureFixture[str]) -> None:
    console = printing_console()
    print_records(console, Path("ft"), iter([record()]), f"dead letters of {ATTACK}", 20)
    print_record(console, FoundRecords(ATTACK, record()), JobNames([]), several=True)
    table = Table(ATTACK, title=ATTACK)
    table.add_row(ATTACK)
    console.print(table)
    shown = STYLES.sub("", capsys.readouterr().out)
    assert "x1b]52" in shown
    assert not OBEYED.search(shown)


@given(st.text(), st.integers(40, 300))
def test_short_texts_stay_and_long_ones_say_how_much_is_left_out(text: str, most: int) -> None:
    short = shortened(text, most)
    size = len(text.encode("utf-8", "backslashreplace"))
    assert len(short.encode()) <= most
    assert ("bytes more" in short) == (size > most) or "bytes more" in text


@pytest.mark.parametrize("quoted", ["x" * 1_000_000, "é" * 1_000_000, "\n" * 1_000_000, "💥" * 1_000_000])
def test_an_error_fits_into_the_headers_of_an_answer(quoted: str) -> None:
    error = flight_error(MalformedRequestError(f"call: unknown key {quoted}; do something else"))
    text, frame = str(error), error.extra_info
    assert len(text.encode()) <= LONGEST_ANSWER_BYTES + 20
    assert text.endswith("do something else")
    # Percent-encoded, and in base64.
    assert 3 * len(text.encode()) + len(frame) * 4 // 3 < 8 << 10


@given(st.text())
def test_json_stays_json_and_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = printable_json({"text": text})
    assert not OBEYED.search(shown)
    shown.encode()
    assert json.loads(shown) == {"text": text}
    assert "é" in printable_json("é\x9b")


def test_new_dead_letters_are_told_of_at_once_and_then_once_a_minute() -> None:
    letters = LetterWarnings()
    assert letters.take(0, now_ms=5) == ""
    assert letters.take(1_200, now_ms=10).startswith("1,200 new dead letters: ftlayer dead list")
    assert letters.take(1_201, now_ms=60_009) == ""
    assert letters.take(1_203, now_ms=60_010).startswith("3 new dead letters")
    assert letters.take(1_203, now_ms=900_000) == ""
