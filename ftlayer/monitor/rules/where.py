"""The filter language of records: ``operator = parse and reason ~ timeout and record.price > 10 and age > 5m``.

=====================  ======================================================================================
word                   of a record
=====================  ======================================================================================
``stream``             its stream, or its job, by any of their names; ``=`` and ``!=`` alone
``operator``           where the last attempt failed
``reason``             why
``key``                its key, hexadecimal; ``=`` and ``!=`` alone
``root``, ``origin``   its id, the id of its first attempt: 16 hexadecimal digits; ``=`` and ``!=`` alone
``attempt``            how many it has had
``age``                the time since its last failure: ``30s``, ``5m``, ``1h``
``record``             all of it, as JSON; ``record.price`` a column, ``record.who.name`` a field of one,
                       ``record."odd name"`` one that is no word
=====================  ======================================================================================

Comparisons are ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``~`` (contains) and ``!~``, joined by ``and``, ``or``,
``not`` and parentheses. Values are words or in double quotes, as in JSON. A value without quotes that is a number
compares as one, also with text that is one; ``true``, ``false`` and ``null`` are JSON's. Text is compared by its
characters, upper and lower case apart. What a record does not have equals ``null`` alone, and is neither less nor more.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from types import UnionType
from typing import Any, NoReturn

from ftlayer.common.checks import duration_ms, shown
from ftlayer.errors import ConfigError
from ftlayer.monitor.rules.names import JobNames
from ftlayer.monitor.rules.row_json import json_of_column, json_of_row
from ftlayer.vertex.calls import RecordInfo

_PLAIN_PART = re.compile(r'[^\s"()=<>!~.]+')


@dataclass(frozen=True, slots=True)
class Value:
    """What something is compared with: ``text``, in quotes text and nothing else."""

    text: str
    quoted: bool = False

    def __str__(self) -> str:
        return json.dumps(self.text, ensure_ascii=False) if self.quoted else self.text

    @property
    def number(self) -> Decimal | None:
        return None if self.quoted else number_of(self.text)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison. ``path`` is the word, and behind ``record`` the names of column and fields."""

    path: tuple[str, ...]
    operator: str
    value: Value

    def __str__(self) -> str:
        return f"{'.'.join(map(_part_text, self.path))} {self.operator} {self.value}"


@dataclass(frozen=True, slots=True)
class Every:
    """All of ``parts`` hold, of which there are two at least."""

    parts: tuple[Condition, ...]

    def __str__(self) -> str:
        return " and ".join(_within(part, Some | Every) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Some:
    """At least one of ``parts`` holds, of which there are two at least."""

    parts: tuple[Condition, ...]

    def __str__(self) -> str:
        return " or ".join(_within(part, Some) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Negation:
    part: Condition

    def __str__(self) -> str:
        return f"not {_within(self.part, Some | Every)}"


Condition = Comparison | Every | Some | Negation


def _within(part: Condition, bracketed: type | UnionType) -> str:
    return f"({part})" if isinstance(part, bracketed) else str(part)


def number_of(value: object) -> Decimal | None:
    """Return the number that a value or a text is, None where it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _part_text(part: str) -> str:
    return part if _PLAIN_PART.fullmatch(part) else json.dumps(part, ensure_ascii=False)


class Subject:
    """A record that conditions are asked about. Of its payload it reads the columns that they name."""

    def __init__(self, vertex: str, info: RecordInfo, names: JobNames, now_ms: int) -> None:
        self.vertex, self.info, self.names, self.now_ms = vertex, info, names, now_ms

    def value(self, path: tuple[str, ...]) -> Any:
        """Return what the record has under a path of a `Comparison`; None where it has nothing."""
        match path[0]:
            case "operator" | "reason" | "attempt" as word:
                return getattr(self.info, word)
            case "key":
                return self.info.key.hex()
            case "root" | "origin" as word:
                return f"{getattr(self.info, word):016x}"
        if len(path) == 1:
            return json_of_row(self.info.payload)
        found: Any = json_of_column(self.info.payload, path[1])
        for name in path[2:]:
            if not isinstance(found, dict):
                return None
            found = found.get(name)
        return found


def holds(condition: Condition, subject: Subject) -> bool:
    match condition:
        case Every(parts):
            return all(holds(part, subject) for part in parts)
        case Some(parts):
            return any(holds(part, subject) for part in parts)
        case Negation(part):
            return not holds(part, subject)
        case Comparison(path, operator, value):
            if operator in ("!=", "!~"):
                return not _compared(path, operator[1:], value, subject)
            return _compared(path, operator, value, subject)


def _compared(path: tuple[str, ...], operator: str, value: Value, subject: Subject) -> bool:
    match path[0]:
        case "stream":
            return (subject.vertex, subject.info.stream) in subject.names.streams(value.text)
        case "key" | "root" | "origin":
            return bool(subject.value(path) == value.text.lower())
        case "age":
            if not subject.info.history:
                return False
            age_ms = subject.now_ms - subject.info.history[-1].at_ms
            return _ordered(operator, age_ms, duration_ms(value.text, "age", least=0))
        case "attempt":
            return _ordered(operator, subject.info.attempt, int(value.text))
    found = subject.value(path)
    if operator == "~":
        return value.text in _text(found)
    if operator == "=":
        return _equal(found, value)
    return _in_order(found, operator, value)


def _equal(found: Any, value: Value) -> bool:
    if found is None:
        return not value.quoted and value.text == "null"
    if isinstance(found, bool):
        return not value.quoted and value.text == ("true" if found else "false")
    if _text(found) == value.text:
        return True
    return value.number is not None and value.number == number_of(found)


def _in_order(found: Any, operator: str, value: Value) -> bool:
    number, other = value.number, number_of(found)
    if number is not None and other is not None:
        return _ordered(operator, other, number)
    return isinstance(found, str) and number is None and _ordered(operator, found, value.text)


_ORDERS = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def _ordered(sign: str, left: Any, right: Any) -> bool:
    return bool(_ORDERS[sign](left, right))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


DEEPEST = 50
"""So many parentheses and ``not`` may stand within each other."""

_OPERATORS = ("!=", "<=", ">=", "!~", "=", "<", ">", "~")
_JOINING = ("and", "or", "not")
_RECORD = "record"
_WORDS = ("stream", "operator", "reason", "key", "root", "origin", "attempt", "age", _RECORD)
_EQUAL_ALONE = ("stream", "key", "root", "origin")
_TOKEN = re.compile(
    r'\s*(?:(?P<quoted>"(?:[^"\\\x00-\x1f]|\\.)*")|(?P<operator>!=|<=|>=|!~|=|<|>|~)|(?P<bracket>[()])'
    r'|(?P<word>(?:[^\s"()=<>!~]|(?<=\.)"(?:[^"\\\x00-\x1f]|\\.)*")+))'
)
_PART = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"|[^".]+')


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int


class _WhereParser:
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
        parts = self._joined("or", self._every)
        return parts[0] if len(parts) == 1 else Some(parts)

    def _every(self) -> Condition:
        parts = self._joined("and", self._one)
        return parts[0] if len(parts) == 1 else Every(parts)

    def _joined(self, word: str, part: Callable[[], Condition]) -> tuple[Condition, ...]:
        parts = [part()]
        while self._is(word):
            self._take()
            parts.append(part())
        return tuple(parts)

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > DEEPEST:
            self._fail(f"at most {DEEPEST} parentheses and 'not' may stand within each other")
        condition: Condition
        if self._is("not"):
            self._take()
            condition = Negation(self._one())
        elif self._is("("):
            self._take()
            condition = self._some()
            if not self._is(")"):
                self._fail("expected ')'")
            self._take()
        else:
            condition = self._comparison()
        self._depth -= 1
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
        word, dot, rest = token.text.partition(".")
        if token.kind != "word" or word not in _WORDS or (dot and word != _RECORD):
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


LONGEST = 10_000
"""Characters that a filter may have."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The part of a filter that a vertex can do (`ftlayer.vertex.calls.records.SelectRecords`).

    ``stream`` is as people say it, "" for all. ``is_all``: nothing is left to be checked of what the vertex gives.
    """

    stream: str = ""
    operator: str = ""
    text: str = ""
    root: int = 0
    keys: tuple[bytes, ...] = ()
    since_ms: int = 0
    until_ms: int = 0
    is_all: bool = True


@dataclass(frozen=True, slots=True)
class Where:
    """A filter of records; ``condition`` None takes all. As a text it is parsed to the same."""

    condition: Condition | None = None

    def __str__(self) -> str:
        return "" if self.condition is None else str(self.condition)

    def pushed(self, now_ms: int) -> Pushed:
        """Return what a vertex can do of it for dead letters; the rest of it is for `matches`."""
        parts = self.condition.parts if isinstance(self.condition, Every) else (self.condition,)
        return _all_pushed([part for part in parts if part is not None], now_ms)

    def matches(self, vertex: str, info: RecordInfo, names: JobNames, now_ms: int) -> bool:
        return self.condition is None or holds(self.condition, Subject(vertex, info, names, now_ms))


def parse_where(text: str) -> Where:
    """Read a filter; "" takes all. Raises `ConfigError` that says where what is wrong.

    Blanks alone are none: they come from a variable that was not set, and would mean everything.
    """
    if text and not text.strip():
        raise ConfigError("where: expected a filter, got blanks")
    if len(text) > LONGEST:
        raise ConfigError(f"where: expected {LONGEST:,} characters at most, got {len(text):,}")
    return Where(_WhereParser(text).parsed()) if text else Where()


# ---------------------------------------------------------------- what a vertex can do


def _all_pushed(parts: Sequence[Condition], now_ms: int) -> Pushed:
    """Return what a vertex can do for dead letters of conditions that all have to hold."""
    found: dict[str, Any] = {}
    is_all = True
    for part in parts:
        done = _pushed(part, now_ms)
        if done is None or set(done[0]) & set(found):
            is_all = False
            continue
        found |= done[0]
        is_all = is_all and done[1]
    return Pushed(**found, is_all=is_all)


def _pushed(part: Condition, now_ms: int) -> tuple[dict[str, Any], bool] | None:
    """Return fields of `Pushed` for a condition, and whether they say all of it; None for what a vertex cannot do."""
    if not isinstance(part, Comparison):
        return None
    text = part.value.text
    if part.path == ("age",):
        return _pushed_age(part.operator, now_ms - duration_ms(text, "age", least=0))
    if part.path == ("reason",) and part.operator == "~" and text:
        return {"text": text}, False
    if part.operator != "=" or not text:
        return None
    match part.path[0]:
        case "operator" if part.value.number is None:  # a vertex compares its text alone
            return {"operator": text}, True
        case "stream":
            return {"stream": text}, True
        case "key":
            return {"keys": (bytes.fromhex(text),)}, True
        case "root" | "origin" if int(text, 16):
            return {"root": int(text, 16)}, False
    return None


def _pushed_age(operator: str, then_ms: int) -> tuple[dict[str, Any], bool] | None:
    """Return a bound of the last failure, which was at ``then_ms`` for what has the age that is named."""
    match operator:
        case ">" if then_ms > 0:
            return {"until_ms": then_ms}, True
        case ">=" if then_ms >= 0:
            return {"until_ms": then_ms + 1}, True
        case "<" if then_ms >= 0:
            return {"since_ms": then_ms + 1}, True
        case "<=" if then_ms > 0:
            return {"since_ms": then_ms}, True
    return None
