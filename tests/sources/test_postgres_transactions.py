"""Transactions of a replication stream: whole ones, pieces, and where a stream is read on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.connectors.postgres.transactions import (
    Begin,
    CommitMessage,
    Insert,
    LogPlace,
    Message,
    Relation,
    Transactions,
    Truncate,
    Unit,
)
from ftlayer.errors import SourceError

MINE = Relation(1, ("n",))
OTHER = Relation(2, ("n",))

Stream = list[tuple[int, list[tuple[int, int]]]]
"""Transactions: where each was committed, and its changes: of which table, and which number."""


@st.composite
def streams(draw: Any) -> Stream:
    number, lsn, found = 0, 0, []
    for _ in range(draw(st.integers(1, 8))):
        lsn += draw(st.integers(1, 5)) * 10
        relations = draw(st.lists(st.sampled_from([1, 1, 2]), max_size=12))
        found.append((lsn, [(relation, number + place) for place, relation in enumerate(relations)]))
        number += len(relations)
    return found


def messages_of(stream: Stream, behind: int) -> list[Message]:
    """What the server sends to one who wants what was committed from ``behind`` on."""
    found: list[Message] = [MINE, OTHER]
    for lsn, changes in stream:
        if lsn >= behind:
            found.append(Begin(lsn, 0, lsn))
            found += [Insert(relation, (str(number),)) for relation, number in changes]
            found.append(CommitMessage(lsn + 5))
    return found


def numbers_of(units: list[Unit]) -> list[int]:
    return [int(row.columns[0] or "") for unit in units for row in unit.rows]


def begun(start: LogPlace | None, whole_rows: int) -> Transactions:
    return Transactions(1, ["n"], start, whole_rows)


def run(stream: Stream, start: LogPlace | None, whole: int, takes: list[int]) -> list[Unit]:
    transactions, units = begun(start, whole), []
    for turn, message in enumerate(messages_of(stream, start.lsn if start else 0)):
        transactions.feed(message, 10)
        if takes[turn % len(takes)] and (unit := transactions.take(takes[turn % len(takes)])):
            units.append(unit)
    while unit := transactions.take(1):
        units.append(unit)
    return units


TAKES = st.lists(st.integers(0, 15), min_size=1, max_size=6)


@given(streams(), st.integers(1, 6), TAKES, st.data())
def test_a_stream_is_read_on_behind_any_place(
    stream: Stream, whole: int, takes: list[int], data: st.DataObject
) -> None:
    expected = [number for _, changes in stream for relation, number in changes if relation == 1]
    units = run(stream, None, whole, takes)
    assert numbers_of(units) == expected
    places = [unit.behind for unit in units]
    assert places == sorted(set(places))
    for unit in units:
        # What may be forgotten has no row that is not durable by then.
        assert unit.end is None or unit.end <= unit.behind.lsn
    if units:
        last = data.draw(st.integers(0, len(units) - 1))
        rest = run(stream, places[last], data.draw(st.integers(1, 6)), takes)
        assert numbers_of(units[: last + 1]) + numbers_of(rest) == expected


@given(streams(), TAKES)
def test_transactions_are_whole(stream: Stream, takes: list[int]) -> None:
    units = run(stream, None, 100, takes)
    wholes = [[number for relation, number in changes if relation == 1] for _, changes in stream]
    for unit in units:
        found = numbers_of([unit])
        while found:
            whole = next(each for each in wholes if each and each[0] == found[0])
            assert found[: len(whole)] == whole
            found = found[len(whole) :]


def test_a_large_value_cuts_a_transaction() -> None:
    transactions = begun(None, 100)
    for message in (MINE, Begin(10, 0, 1), Insert(1, ("1",))):
        transactions.feed(message, 20 << 20)
    unit = transactions.take(1)
    assert unit is not None
    assert (unit.behind, unit.end) == (LogPlace(10, 1), None)


def test_what_has_no_row_is_passed_when_all_before_it_was_taken() -> None:
    transactions = begun(None, 100)
    for message in (MINE, OTHER, Begin(10, 0, 1), Insert(1, ("1",)), CommitMessage(15)):
        transactions.feed(message, 10)
    for message in (Begin(20, 0, 2), Insert(2, ("1",)), CommitMessage(25)):
        transactions.feed(message, 10)
    assert transactions.passed == 0
    unit = transactions.take(10)
    assert unit is not None
    assert (unit.behind, unit.end) == (LogPlace(25), 25)
    transactions.reached(40)
    assert transactions.passed == 40
    transactions.feed(Begin(50, 0, 3), 10)
    transactions.reached(60)
    assert transactions.passed == 40, "a transaction is under way"


def test_truncating_the_table_is_a_row_and_another_is_none() -> None:
    transactions = begun(None, 100)
    for message in (MINE, OTHER, Begin(10, 0, 1), Truncate((2,)), Truncate((2, 1))):
        transactions.feed(message, 10)
    transactions.feed(CommitMessage(15), 10)
    unit = transactions.take(10)
    assert unit is not None
    assert [(row.operation, row.place, row.columns) for row in unit.rows] == [("truncate", 2, (None,))]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([CommitMessage(2)], "that had not begun"),
        ([MINE, Insert(1, ("1",))], "outside of a transaction"),
        ([Begin(1, 0, 0), Insert(7, ("1",))], "not described, with the oid 7"),
    ],
)
def test_what_cannot_come_is_an_error(messages: list[Message], said: str) -> None:
    transactions = begun(None, 100)
    *before, last = messages
    for message in before:
        transactions.feed(message, 1)
    with pytest.raises(SourceError, match=said):
        transactions.feed(last, 1)
