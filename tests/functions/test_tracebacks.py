"""Tracebacks whose frames were formatted before read as Python's own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.functions import failures as tracebacks
from ftlayer.functions.failures import traceback_text


class Unreadable(Exception):  # noqa: N818 - the name is in the text
    def __str__(self) -> str:
        raise RuntimeError("no text")


def value(text: str) -> None:
    raise ValueError(text)


def many_lines(text: str) -> None:
    raise KeyError(text, text)


def wrong_name(text: str) -> None:
    misspelled = text
    print(mispelled)  # type: ignore[name-defined] # noqa: F821 - a name that is suggested
    print(misspelled)


def wrong_attribute(text: str) -> None:
    text.uper()  # type: ignore[attr-defined]


def wrong_syntax(text: str) -> None:
    compile(f"{text!r} +* 1", text, "exec")


def noted(text: str) -> None:
    error = OSError(text)
    error.add_note(f"note {text}")
    raise error


def unreadable(text: str) -> None:
    raise Unreadable(text)


def group(text: str) -> None:
    raise ExceptionGroup(text, [ValueError(text), TypeError()])


def caused(text: str) -> None:
    try:
        value(text)
    except ValueError as error:
        raise TypeError(text) from error


def while_handling(text: str) -> None:
    try:
        value(text)
    except ValueError:
        many_lines(text)


def from_none(text: str) -> None:
    try:
        value(text)
    except ValueError:
        raise TypeError(text) from None


def deep(text: str, depth: int = 6) -> None:
    if not depth:
        raise ValueError(text)
    deep(text, depth - 1)


RAISING: list[Callable[[str], None]] = [
    value,
    many_lines,
    wrong_name,
    wrong_attribute,
    wrong_syntax,
    noted,
    unreadable,
    group,
    caused,
    while_handling,
    from_none,
    deep,
]


def raised(function: Callable[[str], Any], text: str) -> BaseException:
    try:
        function(text)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("nothing was raised")


def python_says(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


@given(st.lists(st.tuples(st.sampled_from(RAISING), st.text(max_size=5)), max_size=12))
def test_whatever_was_raised_before_the_text_is_pythons(calls: list[tuple[Any, str]]) -> None:
    for function, text in calls:
        error = raised(function, text)
        assert traceback_text(error, error.__traceback__) == python_says(error)


def test_frames_may_be_left_out() -> None:
    error = raised(deep, "x")
    assert error.__traceback__ is not None
    for frames in (None, error.__traceback__.tb_next, error.__traceback__):
        for _ in range(2):
            expected = "".join(traceback.format_exception(type(error), error, frames))
            assert traceback_text(error, frames) == expected


def test_frames_are_formatted_once_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "_kept", {})
    formatted: list[int] = []

    def format_frames(summary: traceback.StackSummary, **options: Any) -> list[str]:
        formatted.append(len(summary))
        return own(summary, **options)

    own = traceback.StackSummary.format
    monkeypatch.setattr(traceback.StackSummary, "format", format_frames)
    for number in range(5):
        error = raised(value, str(number))
        assert traceback_text(error, error.__traceback__).endswith(f"ValueError: {number}\n")
    assert formatted == [2]


def test_code_that_is_made_anew_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "_kept", {})
    monkeypatch.setattr(tracebacks, "MOST_PLACES", 3)
    for number in range(10):
        made: dict[str, Any] = {}
        exec(f"def fail_{number}(text): raise ValueError(text)", made)
        error = raised(made[f"fail_{number}"], "x")
        assert f"fail_{number}" in traceback_text(error, error.__traceback__)
        assert traceback_text(error, error.__traceback__) == python_says(error)
        assert len(tracebacks._kept) <= 3
