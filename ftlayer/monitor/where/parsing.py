"""A filter from its text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from ftlayer.checks import duration_ms, shown
from ftlayer.errors import ConfigError
from ftlayer.monitor.where.conditions import Comparison, Condition, Every, Negation, Some, Value

DEEPEST = 50
"""So many parentheses and ``not`` may stand within each other."""

_OPERATORS = ("!=", "<=", ">=", "!~", "=", "<", ">", "~")
_JOINING = ("and", "or", "not")
_RECORD = "record"
_WORDS = ("stream", "operator", "reason", "key", "root", "origin", "attempt", "age", _RECORD)
_EQUAL_ALONE = ("stream", "key", "root", "origin")
_TOKEN = re.compile(
    r'\s*(?:(?P<quoted>"(?:[^"\\\x00-\x1f]|\\.)*")|(?P<operator>!=|<=|>=|!~|=|<|>|~)|(?P<bracket>[()])'
    r'|(?P<word>(?:[^\s"()=<>!~]|(?<=\.)"(?:[^"\\\x00-\x1f]|\\.)*")+))',
)
_PART = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"|[^".]+')


def parse_condition(text: str) -> Condition:
    """Read a condition. Raises `ConfigError` that says where what is wrong."""
    return _WhereParser(text).parsed()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int


class _WhereParser:
    """Reads a filter from the left; a rule of the grammar a method."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._next = 0
        self._depth = 0

    def parsed(self) -> Condition:
        condition = self._some()
        if self._token.kind != "end":
            self._fail("expected 'and', 'or' or the end")
        return condition

    def _split(self) -> Iterator[_Token]:
        at = 0
        while match := _TOKEN.match(self._text, at):
            kind = str(match.lastgroup)
            yield _Token(kind, match[kind], match.start(kind))
            at = match.end()
        rest = self._text[at:]
        yield _Token("end" if not rest.strip() else "odd", rest.strip(), at + len(rest) - len(rest.lstrip()))

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _is(self, word: str) -> bool:
        return self._token.kind in ("word", "bracket") and self._token.text == word

    def _fail(self, said: str, token: _Token | None = None) -> NoReturn:
        token = token or self._token
        got = "the end" if token.kind == "end" else shown(token.text)
        raise ConfigError(f"{self._place(token)}: {said}, got {got}, in {shown(self._text)}")

    def _place(self, token: _Token) -> str:
        return f"where, character {token.start + 1}"

    def _some(self) -> Condition:
        return self._joined("or", self._every, Some)

    def _every(self) -> Condition:
        return self._joined("and", self._one, Every)

    def _joined(
        self, word: str, part: Callable[[], Condition], joined: Callable[[tuple[Condition, ...]], Condition]
    ) -> Condition:
        parts = [part()]
        while self._is(word):
            self._take()
            parts.append(part())
        return parts[0] if len(parts) == 1 else joined(tuple(parts))

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > DEEPEST:
            self._fail(f"at most {DEEPEST} parentheses and 'not' may stand within each other")
        condition = (
            self._negation() if self._is("not") else self._nested() if self._is("(") else self._comparison()
        )
        self._depth -= 1
        return condition

    def _negation(self) -> Condition:
        self._take()
        return Negation(self._one())

    def _nested(self) -> Condition:
        self._take()
        condition = self._some()
        if not self._is(")"):
            self._fail("expected ')'")
        self._take()
        return condition

    def _comparison(self) -> Condition:
        path = self._path()
        if self._token.kind != "operator":
            self._fail(f"expected one of {' '.join(_OPERATORS)} behind {'.'.join(path)!r}")
        operator = self._take()
        if path[0] in _EQUAL_ALONE and operator.text not in ("=", "!="):
            self._fail(f"{path[0]!r} is compared with = and != alone", operator)
        if path[0] in ("attempt", "age") and operator.text in ("~", "!~"):
            self._fail(f"{path[0]!r} is compared with = != < <= > >=", operator)
        return Comparison(path, operator.text, self._value(path[0]))

    def _path(self) -> tuple[str, ...]:
        token = self._token
        if token.kind != "word" or token.text in _JOINING:
            self._fail(f"expected one of {', '.join(_WORDS)}, or record.<column>")
        word, dot, rest = token.text.partition(".")
        if word not in _WORDS or (dot and word != _RECORD):
            self._fail(f"expected one of {', '.join(_WORDS)}, or record.<column>")
        self._take()
        return (word, *self._parts(rest, token)) if dot else (word,)

    def _parts(self, text: str, token: _Token) -> list[str]:
        """Split ``who."odd name"`` at its dots, those in quotes left alone."""
        parts = _PART.findall(text)
        if ".".join(parts) != text or not parts:
            self._fail("expected names of columns and fields with dots between them", token)
        return [self._unquoted(part, token) if part.startswith('"') else part for part in parts]

    def _unquoted(self, text: str, token: _Token) -> str:
        try:
            return str(json.loads(text))
        except ValueError:
            self._fail("expected text in quotes as JSON has it", token)

    def _value(self, word: str) -> Value:
        token = self._token
        if token.kind == "quoted":
            value = Value(self._unquoted(token.text, token), quoted=True)
        elif token.kind == "word" and token.text not in _JOINING and '"' not in token.text:
            value = Value(token.text)
        else:
            self._fail("expected a value: a word, a number, or text in double quotes")
        try:
            _check_value(word, value.text)
        except ConfigError as error:
            raise ConfigError(f"{self._place(token)}: {error}, in {shown(self._text)}") from None
        self._take()
        return value


def _check_value(word: str, text: str) -> None:
    if word == "age":
        duration_ms(text, "age", least=0)
    elif word == "attempt" and not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError("expected a whole number")
    elif word == "key" and not re.fullmatch(r"([0-9a-fA-F]{2})+", text):
        raise ConfigError("expected a key, hexadecimal")
    elif word in ("root", "origin") and not re.fullmatch(r"[0-9a-fA-F]{16}", text):
        raise ConfigError("expected an id as 16 hexadecimal digits")
