"""The parser of pgoutput: what PostgreSQL's documentation says of its messages, written anew and read again."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.connectors.postgres import transactions as pgoutput
from ftlayer.connectors.postgres.transactions import (
    EPOCH_US,
    UNCHANGED,
    Begin,
    CommitMessage,
    Delete,
    Insert,
    Message,
    PgOutputError,
    Relation,
    Truncate,
    Update,
)

OID = st.integers(0, (1 << 32) - 1)
LSN = st.integers(0, (1 << 64) - 1)
TIME = st.integers(-(1 << 62), 1 << 62).map(lambda time: time + EPOCH_US)
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.lists(st.none() | TEXT | st.just(UNCHANGED), max_size=6).map(tuple)


@st.composite
def updates(draw: Any) -> Update:
    old = draw(st.none() | VALUES)
    return Update(draw(OID), old, old is not None and draw(st.booleans()), draw(VALUES))


MESSAGES = st.one_of(
    st.builds(Begin, LSN, TIME, OID),
    st.builds(CommitMessage, LSN),
    st.builds(Relation, OID, st.lists(NAME, max_size=5).map(tuple)),
    st.builds(Insert, OID, VALUES),
    updates(),
    st.builds(Delete, OID, VALUES, st.booleans()),
    st.builds(Truncate, st.lists(OID, max_size=4).map(tuple)),
)
SKIPPED = [
    b"O" + struct.pack(">Q", 7) + b"elsewhere\0",
    b"Y" + struct.pack(">I", 7) + b"public\0mood\0",
    b"Y" + struct.pack(">I", 7) + b"\0int4\0",
]
"""An origin, and names of types."""


def written(message: Message) -> bytes:
    """Write a message as the server does."""
    match message:
        case Begin(lsn, time, xid):
            return b"B" + struct.pack(">QqI", lsn, time - EPOCH_US, xid)
        case CommitMessage(end):
            return b"C\0" + struct.pack(">QQq", 6, end, 7)
        case Relation(oid, columns):
            head = struct.pack(">I", oid) + b"public\0t\0d"
            body = b"".join(b"\1" + name.encode() + b"\0" + struct.pack(">Ii", 23, -1) for name in columns)
            return b"R" + head + struct.pack(">H", len(columns)) + body
        case Insert(relation, new):
            return b"I" + struct.pack(">I", relation) + b"N" + row(new)
        case Update(relation, old, is_full, new):
            before = b"" if old is None else (b"O" if is_full else b"K") + row(old)
            return b"U" + struct.pack(">I", relation) + before + b"N" + row(new)
        case Delete(relation, old, is_full):
            return b"D" + struct.pack(">I", relation) + (b"O" if is_full else b"K") + row(old)
        case Truncate(relations):
            head = struct.pack(">IB", len(relations), 3)
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


@pytest.mark.parametrize("data", SKIPPED)
def test_what_rows_do_not_need_is_none(data: bytes) -> None:
    assert pgoutput.parse(data) is None


@given(MESSAGES.map(written) | st.sampled_from(SKIPPED), st.data())
def test_what_is_cut_or_too_long_is_refused(whole: bytes, data: st.DataObject) -> None:
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
    assert message is None or pgoutput.parse(written(message)) == message


def test_tables_of_the_catalog_have_no_schema() -> None:
    found = pgoutput.parse(b"R" + struct.pack(">I", 1) + b"\0t\0d" + struct.pack(">H", 0))
    assert found == Relation(1, ())


def test_values_in_binary_are_refused() -> None:
    with pytest.raises(PgOutputError, match="unknown kind 'b'"):
        pgoutput.parse(b"I" + struct.pack(">I", 1) + b"N" + struct.pack(">H", 1) + b"b\0\0\0\0")
