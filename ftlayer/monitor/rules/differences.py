"""Where two records differ, as JSON has them: by path, within texts by words, within texts of JSON by path again."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ftlayer.monitor.rules.row_json import JSON, structure_of

Stretches = tuple[tuple[str, bool], ...]
"""A value as JSON, in stretches: their text, and whether it is what differs. () is no value."""

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_PLAIN_NAME = re.compile(r'[^\s"()=<>!~.\[\]]+')
_MOST_PAIRS = 250_000
"""Words of two texts are compared while their numbers multiply to no more: it takes so long."""
_KEPT, _MOST_SHOWN = 40, 2_000


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs. ``path``: names, places in arrays, None from a text to the structure that it is as JSON.

    In an array the place is that in both; of what is there once, that in the one that has it.
    """

    path: tuple[str | int | None, ...]
    before: Stretches
    after: Stretches

    @property
    def place(self) -> str:
        """The path as a filter has it, ``[0]`` for a place and ``(JSON)`` behind a text that is some."""
        parts = "".join(map(_written, self.path))
        return parts.removeprefix(".")

    def shown(self) -> tuple[Stretches, Stretches]:
        """Return both sides with ``…`` for what is long."""
        return _excerpt(self.before), _excerpt(self.after)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return where two records of `json_of_row` differ, column by column."""
    return list(_between(dict(before), dict(after), ()))


def _between(before: Any, after: Any, path: tuple[str | int | None, ...]) -> Iterator[Difference]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            if name not in after:
                yield Difference((*path, name), _whole(before[name]), ())
            elif name not in before:
                yield Difference((*path, name), (), _whole(after[name]))
            else:
                yield from _between(before[name], after[name], (*path, name))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _between_arrays(before, after, path)
    elif _json(before) != _json(after):
        if isinstance(before, str) and isinstance(after, str):
            yield from _between_texts(before, after, path)
        else:
            yield Difference(path, _whole(before), _whole(after))


def _between_arrays(
    before: list[Any], after: list[Any], path: tuple[str | int | None, ...]
) -> Iterator[Difference]:
    old, new = [*map(_json, before)], [*map(_json, after)]
    start, end = _common(old, new)
    olds, news = range(start, len(old) - end), range(start, len(new) - end)
    for place in range(start, max(olds.stop, news.stop)):
        if place not in news:
            yield Difference((*path, place), _whole(before[place]), ())
        elif place not in olds:
            yield Difference((*path, place), (), _whole(after[place]))
        else:
            yield from _between(before[place], after[place], (*path, place))


def _between_texts(before: str, after: str, path: tuple[str | int | None, ...]) -> Iterator[Difference]:
    old, new = structure_of(before), structure_of(after)
    found = [] if old is None or new is None else list(_between(old, new, (*path, None)))
    if found:
        yield from found
        return
    olds, news = _WORD.findall(before), _WORD.findall(after)
    start, end = _common(olds, news)
    middle, other = olds[start : len(olds) - end], news[start : len(news) - end]
    blocks = [(0, len(middle), 0, len(other))]
    if len(middle) * len(other) <= _MOST_PAIRS:
        matcher = difflib.SequenceMatcher(None, middle, other, autojunk=False)
        blocks = [place for tag, *place in matcher.get_opcodes() if tag != "equal"]  # type: ignore[misc]
    yield Difference(
        path,
        _marked(olds, [(start + block[0], start + block[1]) for block in blocks]),
        _marked(news, [(start + block[2], start + block[3]) for block in blocks]),
    )


def _common(before: list[str], after: list[str]) -> tuple[int, int]:
    """Return how many of two lists are the same at their beginning, and behind that at their end."""
    least = min(len(before), len(after))
    start = next((place for place in range(least) if before[place] != after[place]), least)
    least -= start
    return start, next((place for place in range(least) if before[-1 - place] != after[-1 - place]), least)


def _marked(words: list[str], changed: list[tuple[int, int]]) -> Stretches:
    found, at = [('"', False)], 0
    for start, end in [*changed, (len(words), len(words))]:
        found += [(_inner(words[at:start]), False), (_inner(words[start:end]), True)]
        at = end
    return tuple((text, mark) for text, mark in (*found, ('"', False)) if text)


def _inner(words: list[str]) -> str:
    return _json("".join(words))[1:-1]


def _whole(value: Any) -> Stretches:
    return ((_json(value), True),)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _written(part: str | int | None) -> str:
    if part is None:
        return f" ({JSON.upper()})"
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part if _PLAIN_NAME.fullmatch(part) else _json(part)}"


def _excerpt(stretches: Stretches) -> Stretches:
    return tuple(
        (text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}", mark)
        for text, mark in stretches
        for most in (_MOST_SHOWN if mark else 2 * _KEPT,)
    )
