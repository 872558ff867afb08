"""The parser of pgoutput: what PostgreSQL's documentation says of its messages, written anew and read again."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.sources.postgres import transactions as pgoutput
from ftlayer.sources.postgres.transactions import (
    EPOCH_US,
    UNCHANGED,
    Begin,
    CommitMessage,
    Delete,
    Insert,
    Message,
    Origin,
    PgOutputError,
    Relation,
    RelationColumn,
    Truncate,
    TypeName,
    Update,
)

OID = st.integers(0, (1 << 32) - 1)
LSN = st.integers(0, (1 << 64) - 1)
TIME = st.integers(-(1 << 62), 1 << 62).map(lambda time: time + EPOCH_US)
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.lists(st.none() | TEXT | st.just(UNCHANGED), max_size=6).map(tuple)
COLUMN = st.builds(RelationColumn, NAME, st.booleans(), OID, st.integers(-1, 1 << 30))


@st.composite
def updates(draw: Any) -> Update:
    old = draw(st.none() | VALUES)
    return Update(draw(OID), old, old is not None and draw(st.booleans()), draw(VALUES))


MESSAGES = st.one_of(
    st.builds(Begin, LSN, TIME, OID),
    st.builds(CommitMessage, LSN, LSN, TIME),
    st.builds(Origin, LSN, NAME),
    st.builds(Relation, OID, NAME, NAME, st.sampled_from("dnfi"), st.lists(COLUMN, max_size=5).map(tuple)),
    st.builds(TypeName, OID, NAME, NAME),
    st.builds(Insert, OID, VALUES),
    updates(),
    st.builds(Delete, OID, VALUES, st.booleans()),
    st.builds(Truncate, st.lists(OID, max_size=4).map(tuple), st.booleans(), st.booleans()),
)


def written(message: Message) -> bytes:
    """Write a message as the server does."""
    match message:
        case Begin(lsn, time, xid):
            return b"B" + struct.pack(">QqI", lsn, time - EPOCH_US, xid)
        case CommitMessage(lsn, end, time):
            return b"C\0" + struct.pack(">QQq", lsn, end, time - EPOCH_US)
        case Origin(lsn, name):
            return b"O" + struct.pack(">Q", lsn) + name.encode() + b"\0"
        case Relation(oid, schema, table, identity, columns):
            head = struct.pack(">I", oid) + f"{schema}\0{table}\0{identity}".encode()
            body = b"".join(
                bytes([column.is_key])
                + column.name.encode()
                + b"\0"
                + struct.pack(">Ii", column.type, column.modifier)
                for column in columns
            )
            return b"R" + head + struct.pack(">H", len(columns)) + body
        case TypeName(oid, schema, name):
            return b"Y" + struct.pack(">I", oid) + f"{schema}\0{name}\0".encode()
        case Insert(relation, new):
            return b"I" + struct.pack(">I", relation) + b"N" + row(new)
        case Update(relation, old, is_full, new):
            before = b"" if old is None else (b"O" if is_full else b"K") + row(old)
            return b"U" + struct.pack(">I", relation) + before + b"N" + row(new)
        case Delete(relation, old, is_full):
            return b"D" + struct.pack(">I", relation) + (b"O" if is_full else b"K") + row(old)
        case Truncate(relations, cascades, restarts):
            head = struct.pack(">IB", len(relations), cascades | restarts << 1)
            return b"T" + head + struct.pack(f">{len(relations)}I", *relations)


def row(values: pgoutput.Values) -> bytes:
    return struct.pack(">H", len(values)) + b"".join(map(cell, values))


def cell(value: pgoutput.Value) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, pgoutput.Unchanged):
        return b"u"
    data = value.encode()
    return b"t" + struct.pack(">I", len(data)) + data


@given(MESSAGES)
def test_what_is_written_is_read(message: Message) -> None:
    assert pgoutput.parse(written(message)) == message


@given(MESSAGES, st.data())
def test_what_is_cut_or_too_long_is_refused(message: Message, data: st.DataObject) -> None:
    whole = written(message)
    with pytest.raises(PgOutputError):
        pgoutput.parse(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(PgOutputError):
        pgoutput.parse(whole + b"\0")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = pgoutput.parse(data)
    except PgOutputError:
        return
    # Flags have bits that are not looked at.
    assert pgoutput.parse(written(message)) == message


def test_tables_of_the_catalog_have_no_schema() -> None:
    found = pgoutput.parse(b"R" + struct.pack(">I", 1) + b"\0t\0d" + struct.pack(">H", 0))
    assert found == Relation(1, "pg_catalog", "t", "d", ())


def test_values_in_binary_are_refused() -> None:
    with pytest.raises(PgOutputError, match="unknown kind 'b'"):
        pgoutput.parse(b"I" + struct.pack(">I", 1) + b"N" + struct.pack(">H", 1) + b"b\0\0\0\0")
