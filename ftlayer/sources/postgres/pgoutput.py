"""The messages of PostgreSQL's output plugin ``pgoutput``, version 1 of its protocol, values as texts.

Bytes in, messages out: nothing is connected to here.
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import TypeAlias

EPOCH_US = 946_684_800_000_000
"""2000-01-01 UTC, from where the server counts, in microseconds since 1970."""


class Unchanged(Enum):
    """Stands for a large value that an update has not changed: the server does not send it."""

    VALUE = "unchanged"


UNCHANGED = Unchanged.VALUE

Value: TypeAlias = str | Unchanged | None
Values: TypeAlias = tuple[Value, ...]


class PgOutputError(ValueError):
    """Bytes that are no message of this protocol."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction begins. ``lsn``: of its commit; ``time_us``: of its commit, since 1970."""

    lsn: int
    time_us: int
    xid: int


@dataclass(frozen=True, slots=True)
class CommitMessage:
    """A transaction ends. ``lsn``: of the commit, ``end``: behind it; ``time_us``: since 1970."""

    lsn: int
    end: int
    time_us: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction came here by replication from elsewhere."""

    lsn: int
    name: str


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column. ``is_key``: it is in the replica identity; ``type``: its type's oid, ``modifier``: of the type."""

    name: str
    is_key: bool
    type: int
    modifier: int


@dataclass(frozen=True, slots=True)
class Relation:
    """A table, sent before its first change, and when it has become another. ``identity``: d, n, f or i."""

    oid: int
    schema: str
    table: str
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class TypeName:
    """A type that is not built in."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Insert:
    relation: int
    new: Values


@dataclass(frozen=True, slots=True)
class Update:
    """A row that is another. ``old``: as it was; all of it if ``is_full``, else its key; None: the key is the same."""

    relation: int
    old: Values | None
    is_full: bool
    new: Values


@dataclass(frozen=True, slots=True)
class Delete:
    """A row that is gone. ``old``: all of it if ``is_full``, else its key."""

    relation: int
    old: Values
    is_full: bool


@dataclass(frozen=True, slots=True)
class Truncate:
    relations: tuple[int, ...]
    cascades: bool
    restarts_identity: bool


Message: TypeAlias = (
    Begin | CommitMessage | Origin | Relation | TypeName | Insert | Update | Delete | Truncate
)

_BEGIN = Struct(">QqI")
_COMMIT = Struct(">BQQq")
_RELATION = Struct(">H")
_COLUMN_TYPE = Struct(">Ii")
_TRUNCATE = Struct(">IB")
_INT16 = Struct(">H")
_INT32 = Struct(">I")
_INT64 = Struct(">Q")

_NULL, _SAME, _TEXT = b"nut"


def parse(data: bytes) -> Message:
    """Return the message that these bytes are. Raises `PgOutputError`."""
    if not data:
        raise PgOutputError("a message without bytes")
    kind = chr(data[0])
    parser = _PARSERS.get(kind)
    if parser is None:
        raise PgOutputError(f"a message of the unknown kind {kind!r}")
    try:
        message, at = parser(data)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise PgOutputError(f"a message of kind {kind!r} that is cut or damaged: {error}") from error
    if at != len(data):
        raise PgOutputError(f"a message of kind {kind!r} with {len(data) - at} bytes behind its end")
    return message


def _begin(data: bytes) -> tuple[Begin, int]:
    lsn, time, xid = _BEGIN.unpack_from(data, 1)
    return Begin(lsn, time + EPOCH_US, xid), 1 + _BEGIN.size


def _commit(data: bytes) -> tuple[CommitMessage, int]:
    _flags, lsn, end, time = _COMMIT.unpack_from(data, 1)
    return CommitMessage(lsn, end, time + EPOCH_US), 1 + _COMMIT.size


def _origin(data: bytes) -> tuple[Origin, int]:
    (lsn,) = _INT64.unpack_from(data, 1)
    name, at = _text(data, 1 + _INT64.size)
    return Origin(lsn, name), at


def _relation(data: bytes) -> tuple[Relation, int]:
    (oid,) = _INT32.unpack_from(data, 1)
    schema, at = _text(data, 5)
    table, at = _text(data, at)
    identity = chr(data[at])
    (count,) = _RELATION.unpack_from(data, at + 1)
    at += 1 + _RELATION.size
    columns = []
    for _ in range(count):
        flags = data[at]
        name, at = _text(data, at + 1)
        kind, modifier = _COLUMN_TYPE.unpack_from(data, at)
        at += _COLUMN_TYPE.size
        columns.append(RelationColumn(name, bool(flags & 1), kind, modifier))
    # No name stands for the catalog's own schema.
    return Relation(oid, schema or "pg_catalog", table, identity, tuple(columns)), at


def _type(data: bytes) -> tuple[TypeName, int]:
    (oid,) = _INT32.unpack_from(data, 1)
    schema, at = _text(data, 5)
    name, at = _text(data, at)
    return TypeName(oid, schema or "pg_catalog", name), at


def _insert(data: bytes) -> tuple[Insert, int]:
    (relation,) = _INT32.unpack_from(data, 1)
    new, at = _marked(data, 5, "N")
    return Insert(relation, new), at


def _update(data: bytes) -> tuple[Update, int]:
    (relation,) = _INT32.unpack_from(data, 1)
    mark = chr(data[5])
    if mark == "N":
        new, at = _marked(data, 5, "N")
        return Update(relation, None, False, new), at
    old, at = _marked(data, 5, "KO")
    new, at = _marked(data, at, "N")
    return Update(relation, old, mark == "O", new), at


def _delete(data: bytes) -> tuple[Delete, int]:
    (relation,) = _INT32.unpack_from(data, 1)
    old, at = _marked(data, 5, "KO")
    return Delete(relation, old, data[5] == ord("O")), at


def _truncate(data: bytes) -> tuple[Truncate, int]:
    count, options = _TRUNCATE.unpack_from(data, 1)
    relations = Struct(f">{count}I")
    at = 1 + _TRUNCATE.size
    if len(data) < at + relations.size:
        raise IndexError("relations are missing")
    return Truncate(
        relations.unpack_from(data, at), bool(options & 1), bool(options & 2)
    ), at + relations.size


_PARSERS: dict[str, Callable[[bytes], tuple[Message, int]]] = {
    "B": _begin,
    "C": _commit,
    "O": _origin,
    "R": _relation,
    "Y": _type,
    "I": _insert,
    "U": _update,
    "D": _delete,
    "T": _truncate,
}


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.find(b"\0", at)
    if end < 0:
        raise IndexError("a text without an end")
    # Of a server without an encoding (SQL_ASCII) names are any bytes.
    return data[at:end].decode("utf-8", "replace"), end + 1


def _marked(data: bytes, at: int, marks: str) -> tuple[Values, int]:
    """Return the values of a row behind a mark that says what row it is."""
    mark = chr(data[at])
    if mark not in marks:
        raise PgOutputError(f"a row is marked {mark!r}, expected one of {marks!r}")
    (count,) = _INT16.unpack_from(data, at + 1)
    at += 1 + _INT16.size
    values: list[Value] = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == _TEXT:
            (size,) = _INT32.unpack_from(data, at)
            at += _INT32.size
            end = at + size
            if end > len(data):
                raise IndexError("a value is cut")
            values.append(data[at:end].decode())
            at = end
        elif kind == _NULL:
            values.append(None)
        elif kind == _SAME:
            values.append(UNCHANGED)
        else:
            raise PgOutputError(f"a value of the unknown kind {chr(kind)!r}")
    return tuple(values), at
