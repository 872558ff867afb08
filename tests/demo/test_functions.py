from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.cli.demo.ledger import MOST_FAILURES, LineError, Service, class_of, reason_of, words_of


def words(text: str) -> list[str]:
    return [word for _, _, word in words_of(f"f.py:1\t{text}")]


def test_a_line_becomes_its_words() -> None:
    lines, places, found = zip(*words_of("f.py:7\tfor x in range(0x1F, 10):\t# tab"), strict=True)
    assert found == ("for", "x", "in", "range", "tab")
    assert set(lines) == {"f.py:7"}
    assert places == tuple(range(5))


def test_a_line_without_words_is_one_row() -> None:
    assert words("  })") == ["})"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("an 8bit number", "LineError: not a number"),
        ("0x", "LineError: not a number"),
        ("x" * 251, "LineError: longer than 250 characters"),
        ("naïve", "UnicodeEncodeError: a character beyond ASCII"),
    ],
)
def test_lines_that_cannot_be_parsed(text: str, reason: str) -> None:
    with pytest.raises((LineError, UnicodeEncodeError)) as caught:
        words(text)
    assert class_of(reason_of(caught.value)) == reason


@given(st.text(alphabet=st.characters(exclude_characters="\n")))
def test_any_text_gives_rows_or_a_value_error(text: str) -> None:
    try:
        found = words(text)
    except ValueError:
        return
    assert found


def test_the_service_fails_a_line_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.0)
    service = Service(str(tmp_path))
    assert not service.has_failed("f.py:1")
    for _ in range(MOST_FAILURES):
        with pytest.raises(ConnectionError):
            service.kind("f.py:1", "print")
    assert service.has_failed("f.py:1")
    assert service.kind("f.py:1", "print") == "builtin"
    with pytest.raises(ConnectionError):
        service.kind("f.py:2", "print")
