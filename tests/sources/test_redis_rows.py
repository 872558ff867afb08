"""Entries of a Redis stream as rows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.connectors.redis import schema_of, to_rows

AT = datetime(2026, 11, 23, 14, 30, 0, 7_000, tzinfo=UTC)
ID = f"{int(AT.timestamp() * 1_000)}-3".encode()


def rows(fields: list[str], *entries: list[bytes]) -> list[dict[str, Any]]:
    batch = to_rows([[ID, list(pairs)] for pairs in entries], schema_of(fields))
    batch.validate(full=True)
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


def test_all_fields_are_a_map() -> None:
    found = rows([], [b"user", b"ada", b"raw", b"\xff\0"], [], [b"user", b"bob"])
    assert [row["fields"] for row in found] == [
        [("user", b"ada"), ("raw", b"\xff\0")],
        [],
        [("user", b"bob")],
    ]
    assert found[0]["id"] == ID.decode()
    assert found[0]["time"] == AT


def test_fields_are_columns() -> None:
    pairs = [b"user", b"ada", b"page", b"/"], [b"user", b"bob", b"page", b"/x"]
    assert [(row["user"], row["page"]) for row in rows(["user", "page"], *pairs)] == [
        ("ada", "/"),
        ("bob", "/x"),
    ]


@pytest.mark.parametrize(
    "odd",
    [
        [b"page", b"/", b"user", b"ada"],
        [b"user", b"ada", b"page", b"/", b"more", b"!"],
        [b"user", b"old", b"page", b"/", b"user", b"ada"],
    ],
)
def test_fields_come_in_any_order_and_number(odd: list[bytes]) -> None:
    found = rows(["user", "page"], [b"user", b"bob", b"page", b"/x"], odd, [b"page", b"/y"])
    assert [(row["user"], row["page"]) for row in found] == [("bob", "/x"), ("ada", "/"), (None, "/y")]


def test_bytes_that_are_no_text_do_not_stop_the_others() -> None:
    assert [row["user"] for row in rows(["user"], [b"user", b"\xffa"], [b"user", "é".encode()])] == [
        "�a",
        "é",
    ]


def test_no_entries_are_no_rows() -> None:
    for fields in ([], ["user"]):
        assert to_rows([], schema_of(fields)).equals(pa.RecordBatch.from_pylist([], schema=schema_of(fields)))
