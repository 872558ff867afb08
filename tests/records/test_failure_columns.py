"""Failures as columns: what goes in comes out, shared texts are written once, other bytes are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import MalformedRequestError
from ftlayer.records.failures import COLUMNS, Failure, from_columns, to_columns, well_formed

texts = st.one_of(
    st.sampled_from(["", "\n", "a\n", "a\nb", "a\nb\n", "\n\n"]), st.text(st.characters(codec="utf-8"))
)
rows = st.builds(
    Failure,
    st.integers(1, 2**64 - 1),
    texts,
    texts,
    texts,
    st.booleans(),
    st.none() | st.integers(0, 2**40),
    st.booleans(),
    st.sampled_from(["", "", "slot 1 on w1, pid 4711"]),
)


def through(failures: list[Failure]) -> list[Failure]:
    return from_columns(msgpack.unpackb(msgpack.packb(to_columns(failures))))


@settings(deadline=None)
@given(st.lists(rows, max_size=6))
def test_failures_come_back(failures: list[Failure]) -> None:
    assert through(failures) == failures


def test_texts_that_repeat_are_written_once_and_read_as_one() -> None:
    frames = "Traceback:\n" + "  File somewhere\n" * 100
    failures = [Failure(i, f"no {i}", "parse", f"{frames}ValueError: no {i}", False) for i in range(1, 1_001)]
    same = [replace(row, traceback=frames) for row in failures]
    assert len(msgpack.packb(to_columns(failures))) < 100 * len(failures)
    assert through(failures) == failures
    assert len({id(row.traceback) for row in through(same)}) == 1


def test_lone_surrogates_become_their_escapes() -> None:
    failure = Failure(1, "no file caf\udce9", "op\ud800", "in caf\udce9\nlast \udfff", True)
    (came,) = through([failure])
    assert came == Failure(1, "no file caf\\udce9", "op\\ud800", "in caf\\udce9\nlast \\udfff", True)
    assert well_formed("héllo 😀") == "héllo 😀"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"after_ms": b"\0" * 16}, "map"),
        ({"after_ms": b"\0" * 15, "uses_attempt": b"\1\1"}, "after_ms"),
        ({"after_ms": b"\0" * 16, "uses_attempt": b"\1"}, "uses_attempt"),
        ({"roots": [1]}, "fatal"),
        ({"roots": [1, "2"]}, "roots"),
        ({"roots": b"12"}, "roots"),
        ({"texts": ["a", 1]}, "texts"),
        ({"texts": []}, "reasons"),
        ({"reasons": b"\0" * 4}, "reasons"),
        ({"operators": [0, 0]}, "operators"),
        ({"frames": b"\xff" * 8}, "frames"),
        ({"last_lines": b"\x07\0\0\0\0\0\0\0"}, "last_lines"),
        ({"fatal": b"\0\2"}, "fatal"),
        ({"places": b"\xff" * 8}, "places"),
        ({"more": 1}, "map"),
    ],
)
def test_other_columns_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    good = to_columns([Failure(i, "r", "o", "t", False) for i in (1, 2)])
    assert set(good) == set(COLUMNS)
    with pytest.raises(ValueError, match=named):
        from_columns(good | change)
    with pytest.raises(ValueError, match="map"):
        from_columns([good])


@pytest.mark.parametrize("pause", [-1, -2, -5_000])
def test_a_negative_pause_is_refused_and_not_taken_for_none(pause: int) -> None:
    with pytest.raises(
        MalformedRequestError, match=f"after_ms: expected a pause of 0 ms or more.*got {pause}"
    ):
        to_columns([Failure(1, "r", "o", "t", False, pause)])
