"""Schemas written as Spark's DDL, ``"ts timestamp, host string, tags array<string>"``, as Arrow schemas.

A recursive descent over the part of Spark's grammar that has an Arrow type. Types map as Spark's own Arrow
conversion maps them: ``timestamp`` is in UTC, microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow as pa

from ftlayer.errors import ConfigError

_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}

_NAMES = {
    kind: name
    for name, kind in _TYPES.items()
    if name not in ("byte", "short", "integer", "long", "real", "timestamp_ltz")
}

_DECIMAL = ("decimal", "dec", "numeric")
_TEXTS = ("varchar", "char")
_NESTED = ("array", "map", "struct", *_TEXTS, *_DECIMAL)
_MAX_PRECISION = 38
_MAX_DEPTH = 100
"""Types within types: deeper ones would meet Python's own limit."""

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'(?:[^'\\]|\\.)*')|(?P<word>\w+)|(?P<sign>[<>(),:]))"
)


def parse_ddl(text: str) -> pa.Schema:
    """Return the schema that ``name type, name type, …`` describes.

    Raises `ConfigError` with the place for anything else, and for a name that comes twice.
    """
    parser = _Parser(text)
    fields = parser.fields(end=None)
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"schema {text!r}: two columns are called {name!r}")
    return pa.schema(fields)


def to_ddl(fields: Iterable[pa.Field]) -> str:
    """Write a schema as `parse_ddl` reads it; a type that Spark does not have as Arrow calls it."""
    return ", ".join(
        f"{_quoted(field.name)} {_type_text(field.type)}{'' if field.nullable else ' not null'}"
        for field in fields
    )


def _type_text(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array<{_type_text(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{_type_text(kind.key_type)},{_type_text(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{to_ddl(kind)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _NAMES.get(kind, str(kind))


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, int]] = []
        self._next = 0
        self._depth = 0
        place = 0
        while place < len(text.rstrip()):
            match = _TOKEN.match(text, place)
            if match is None:
                raise self._error("a name or a type", place)
            self._tokens.append((match[match.lastgroup or 0], match.start(match.lastgroup or 0)))
            place = match.end()

    def fields(self, end: str | None) -> list[pa.Field]:
        """Read fields up to ``end`` (of a struct) or the end of the text."""
        if end is not None and self._peek() == end:
            return []
        fields = [self._field()]
        while self._peek() == ",":
            self._take()
            fields.append(self._field())
        if end is None and self._peek() is not None:
            raise self._error("',' or the end")
        return fields

    def _field(self) -> pa.Field:
        name = self._name()
        if self._peek() == ":":
            self._take()
        type_ = self._type()
        nullable = True
        if self._is_word("not"):
            self._take()
            if not self._is_word("null"):
                raise self._error("NULL")
            if pa.types.is_null(type_):
                raise self._error("a type that has values before NOT NULL")
            self._take()
            nullable = False
        if self._is_word("comment"):
            self._take()
            if not (self._peek() or "").startswith("'"):
                raise self._error("a comment in single quotes")
            self._take()
        return pa.field(name, type_, nullable=nullable)

    def _name(self) -> str:
        token = self._peek()
        if token is None or token[0] in "<>(),:'":
            raise self._error("a column's name")
        self._take()
        return token[1:-1].replace("``", "`") if token.startswith("`") else token

    def _type(self) -> pa.DataType:
        word = (self._peek() or "").lower()
        if word not in _TYPES and word not in _NESTED:
            raise self._error("a type")
        self._take()
        if word in _TYPES:
            return _TYPES[word]
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"at most {_MAX_DEPTH} types within types")
        type_ = self._decimal() if word in _DECIMAL else self._nested(word)
        self._depth -= 1
        return type_

    def _nested(self, word: str) -> pa.DataType:
        type_: pa.DataType
        opens, closes = "()" if word in _TEXTS else "<>"
        self._expect(opens)
        if word == "array":
            type_ = pa.list_(pa.field("element", self._type()))
        elif word == "map":
            key = self._type()
            if pa.types.is_null(key):
                raise self._error("a type for the map's key that has values")
            self._expect(",")
            type_ = pa.map_(key, self._type())
        elif word == "struct":
            type_ = pa.struct(self.fields(end=closes))
        else:
            self._number(1, 2**31 - 1)
            type_ = pa.string()
        self._expect(closes)
        return type_

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._peek() == "(":
            self._take()
            precision = self._number(1, _MAX_PRECISION)
            if self._peek() == ",":
                self._take()
                scale = self._number(0, precision)
            self._expect(")")
        return pa.decimal128(precision, scale)

    def _number(self, least: int, most: int) -> int:
        token = self._peek() or ""
        if not (re.fullmatch(r"[0-9]{1,10}", token) and least <= int(token) <= most):
            raise self._error(f"a number from {least} to {most}")
        self._take()
        return int(token)

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise self._error(f"{sign!r}")
        self._take()

    def _is_word(self, word: str) -> bool:
        return (self._peek() or "").lower() == word

    def _peek(self) -> str | None:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else None

    def _take(self) -> None:
        self._next += 1

    def _error(self, expected: str, place: int | None = None) -> ConfigError:
        if place is None:
            place = self._tokens[self._next][1] if self._next < len(self._tokens) else len(self._text)
        rest = self._text[place:].strip()
        found = repr(rest if len(rest) <= 20 else rest[:20] + "…") if rest else "the end"
        return ConfigError(
            f"schema {self._text!r}: expected {expected} at position {place}, found {found}; write it as "
            "'name type, name type', or give a pyarrow.Schema"
        )
