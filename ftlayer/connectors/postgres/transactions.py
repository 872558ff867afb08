"""Transactions of a replication stream as units of rows, each with the position behind it. Rules alone: no I/O."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from struct import Struct
from typing import NamedTuple, TypeAlias

from ftlayer.errors import SourceError

# The messages of PostgreSQL's output plugin ``pgoutput``, version 1 of its protocol, values as texts.
#
# Bytes in, messages out: nothing is connected to here.
# https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html


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
    """A transaction ends; ``end`` is behind its commit."""

    end: int


@dataclass(frozen=True, slots=True)
class Relation:
    """The names of a table's columns, sent before its first change, and when it has become another."""

    oid: int
    columns: tuple[str, ...]


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


Message: TypeAlias = Begin | CommitMessage | Relation | Insert | Update | Delete | Truncate

_BEGIN = Struct(">QqI")
_COMMIT = Struct(">BQQq")
_RELATION = Struct(">H")
_COLUMN_TYPE = Struct(">Ii")
_TRUNCATE = Struct(">IB")
_INT16 = Struct(">H")
_INT32 = Struct(">I")
_INT64 = Struct(">Q")

_NULL, _SAME, _TEXT = b"nut"


def parse(data: bytes) -> Message | None:
    """Return a message; None for an origin, or a type's name: values are read as texts."""
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
    _flags, _lsn, end, _time = _COMMIT.unpack_from(data, 1)
    return CommitMessage(end), 1 + _COMMIT.size


def _origin(data: bytes) -> tuple[None, int]:
    _name, at = _text(data, 1 + _INT64.size)
    return None, at


def _relation(data: bytes) -> tuple[Relation, int]:
    (oid,) = _INT32.unpack_from(data, 1)
    _schema, at = _text(data, 5)
    _table, at = _text(data, at)
    (count,) = _RELATION.unpack_from(data, at + 1)
    at += 1 + _RELATION.size
    columns = []
    for _ in range(count):
        name, at = _text(data, at + 1)
        at += _COLUMN_TYPE.size
        columns.append(name)
    return Relation(oid, tuple(columns)), at


def _type(data: bytes) -> tuple[None, int]:
    _schema, at = _text(data, 5)
    _name, at = _text(data, at)
    return None, at


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
    count, _options = _TRUNCATE.unpack_from(data, 1)
    relations = Struct(f">{count}I")
    at = 1 + _TRUNCATE.size
    if len(data) < at + relations.size:
        raise IndexError("relations are missing")
    return Truncate(relations.unpack_from(data, at)), at + relations.size


_PARSERS: dict[str, Callable[[bytes], tuple[Message | None, int]]] = {
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


MOST_BYTES = 16 << 20
"""A transaction with more bytes than this is cut, however few rows those are."""

Projected = tuple[str | None, ...]


class LogPlace(NamedTuple):
    """Where a stream was read to.

    With ``done`` 0 all transactions were that were committed before ``lsn``. Otherwise so were those before the one
    that was committed at ``lsn``, and its first ``done`` changes.
    """

    lsn: int
    done: int = 0


class ChangedRow(NamedTuple):
    """A change of the table: its columns afterwards (of a row that is gone: before), and before, where that is known.

    ``place``: which change of its transaction it is. ``unchanged``: columns whose value the server has not sent.
    """

    operation: str
    lsn: int
    place: int
    xid: int | None
    time_us: int | None
    columns: Projected
    before: Projected | None = None
    unchanged: tuple[str, ...] = ()


@dataclass(slots=True)
class Unit:
    """Rows that belong together: those of a transaction, or a piece of one that is too large for that.

    ``behind``: where the stream was read to with them. ``end``: what the server may forget once they are durable; None:
    nothing that it could not before, as the transaction goes on.
    """

    rows: list[ChangedRow]
    behind: LogPlace
    end: int | None


@dataclass(slots=True)
class _Open:
    """The transaction that is under way. ``skip``: so many of its changes were taken before; None: all of them."""

    begin: Begin
    skip: int | None
    changes: int = 0
    rows: list[ChangedRow] = field(default_factory=list)
    size: int = 0


class Transactions:
    def __init__(self, oid: int, columns: Sequence[str], start: LogPlace | None, whole_rows: int) -> None:
        """``oid``: the table's, whatever it is called when; ``start``: what was taken before; ``whole_rows``: a
        transaction with more rows is cut.
        """
        self._oid = oid
        self._columns = tuple(columns)
        self._start = start or LogPlace(0)
        self._whole_rows = whole_rows
        self._places: dict[int, tuple[int | None, ...] | None] = {}
        self._open: _Open | None = None
        self._units: deque[Unit] = deque()
        self.rows = 0
        self.missing: tuple[str, ...] = ()
        """Columns that the table had not when its last `Relation` came."""
        self.passed = 0
        """The server may forget what is before this, once all units that were taken are durable."""

    def feed(self, message: Message | None, size: int) -> None:
        """Take the next message, which had ``size`` bytes. Raises `SourceError` for one that cannot come here."""
        match message:
            case Begin():
                self._open = _Open(message, self._skipped_of(message))
            case CommitMessage(end=end):
                self._commit(end)
            case Relation():
                self._places[message.oid] = self._places_in(message)
            case Insert() | Update() | Delete() | Truncate():
                self._change(message, size)

    def reached(self, lsn: int) -> None:
        """The server has sent all that was committed before this."""
        if self._open is None:
            self._advance(lsn)

    def take(self, max_rows: int) -> Unit | None:
        """Return a unit, and those behind it, as many as have up to ``max_rows`` together; None if there is none."""
        if not self._units:
            return None
        taken = [self._units.popleft()]
        count = len(taken[0].rows)
        while self._units and count + len(self._units[0].rows) <= max_rows:
            taken.append(self._units.popleft())
            count += len(taken[-1].rows)
        self.rows -= count
        rows = taken[0].rows if len(taken) == 1 else [row for unit in taken for row in unit.rows]
        # A piece is no progress, but those before it are.
        end = max((unit.end for unit in taken if unit.end is not None), default=None)
        return replace(taken[-1], rows=rows, end=end)

    def _skipped_of(self, begin: Begin) -> int | None:
        if begin.lsn < self._start.lsn:
            return None
        return self._start.done if begin.lsn == self._start.lsn else 0

    def _commit(self, end: int) -> None:
        opened, self._open = self._open, None
        if opened is None:
            raise SourceError("a transaction was committed that had not begun")
        if opened.rows:
            self._put(Unit(opened.rows, LogPlace(end), end))
        else:
            self._advance(end)

    def _change(self, message: Insert | Update | Delete | Truncate, size: int) -> None:
        opened = self._open
        if opened is None:
            raise SourceError("a change came outside of a transaction")
        opened.changes += 1
        if opened.skip is None or opened.changes <= opened.skip:
            return
        rows = self._rows_of(message, opened)
        if rows is None:
            return
        opened.rows.append(rows)
        opened.size += size
        if len(opened.rows) > self._whole_rows or opened.size > MOST_BYTES:
            self._put(Unit(opened.rows, LogPlace(opened.begin.lsn, opened.changes), None))
            opened.rows, opened.size = [], 0

    def _put(self, unit: Unit) -> None:
        self._units.append(unit)
        self.rows += len(unit.rows)

    def _advance(self, lsn: int) -> None:
        if not self._units:
            self.passed = max(self.passed, lsn)
            return
        last = self._units[-1]
        last.behind = max(last.behind, LogPlace(lsn))
        last.end = last.behind.lsn

    def _places_in(self, relation: Relation) -> tuple[int | None, ...] | None:
        """Return where the columns are in its rows; None for another table."""
        if relation.oid != self._oid:
            return None
        places = {name: place for place, name in enumerate(relation.columns)}
        self.missing = tuple(name for name in self._columns if name not in places)
        return tuple(places.get(name) for name in self._columns)

    def _places_of(self, oid: int) -> tuple[int | None, ...] | None:
        try:
            return self._places[oid]
        except KeyError:
            raise SourceError(f"a change of a table that was not described, with the oid {oid}") from None

    def _rows_of(self, message: Insert | Update | Delete | Truncate, opened: _Open) -> ChangedRow | None:
        if isinstance(message, Truncate):
            if all(self._places_of(oid) is None for oid in message.relations):
                return None
            return self._row("truncate", opened, (None,) * len(self._columns))
        places = self._places_of(message.relation)
        if places is None:
            return None
        if isinstance(message, Delete):
            old = _projected(message.old, places)
            return self._row("delete", opened, old, old)
        if isinstance(message, Insert):
            return self._row("insert", opened, _projected(message.new, places))
        before = None if message.old is None else _projected(message.old, places)
        new = _at(message.new, places)
        if UNCHANGED not in new:
            return self._row("update", opened, _shown(new), before)
        if before is not None and message.is_full:
            known = (old if value is UNCHANGED else value for value, old in zip(new, before, strict=True))
            return self._row("update", opened, _shown(known), before)
        same = tuple(name for name, value in zip(self._columns, new, strict=True) if value is UNCHANGED)
        return self._row("update", opened, _shown(new), before, same)

    def _row(
        self,
        operation: str,
        opened: _Open,
        columns: Projected,
        before: Projected | None = None,
        unchanged: tuple[str, ...] = (),
    ) -> ChangedRow:
        begin = opened.begin
        return ChangedRow(
            operation, begin.lsn, opened.changes, begin.xid, begin.time_us, columns, before, unchanged
        )


def _at(values: Values, places: tuple[int | None, ...]) -> list[Value]:
    return [None if place is None else values[place] for place in places]


def _shown(values: Iterable[Value]) -> Projected:
    return tuple(None if isinstance(value, Unchanged) else value for value in values)


def _projected(values: Values, places: tuple[int | None, ...]) -> Projected:
    return _shown(_at(values, places))
