"""Records of the vertex as rows of a DataFrame, whatever they hold."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pyarrow as pa

from ftlayer.checkpoint.dead_letters.letter import letter_of
from ftlayer.cli.main import parse_root
from ftlayer.cli.records import parsed_keys
from ftlayer.monitor.rules.facts import record_facts
from ftlayer.monitor.rules.names import JobNames
from ftlayer.spark.facade import record_row
from ftlayer.vertex.calls import Attempt, RecordInfo


def shown(**columns: pa.Array) -> Any:
    payload = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    info = RecordInfo(
        b"key", "s/s", "dead", 1 << 63, 5, 2, 0, (Attempt(1, 1_000, "why", "op", "slot 1", "trace"),), payload
    )
    row = record_row(info)
    assert row[:3] == ("6b6579", "s/s", "dead")
    assert row[3:6] == ("8000000000000000", "0000000000000005", 2)
    # The terminal takes what Python shows, and Python what the terminal shows.
    facts = record_facts("here", info, JobNames([]))
    assert (
        (letter_of(info).key, letter_of(info).origin) == (facts["key"], facts["origin"]) == (row[0], row[4])
    )
    assert parsed_keys([row[0]]) == (b"key",)
    assert parse_root(row[3]) == info.root
    assert row[10] == [(1, dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC), "why", "op", "slot 1", "trace")]
    return json.loads(row[-1])


def test_a_record_is_json() -> None:
    when = pa.array([dt.datetime(2024, 1, 2, tzinfo=dt.UTC)], pa.timestamp("us", "UTC"))
    record = shown(n=pa.array([1]), at=when, body=pa.array([b"abc\xff"]), none=pa.nulls(1))
    assert record == {"n": 1, "at": "2024-01-02 00:00:00+00:00", "body": "abc\\xff", "none": None}


def test_what_python_cannot_hold_is_shown_as_bytes_and_numbers() -> None:
    text = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    at = pa.array([1 << 60], pa.int64()).view(pa.timestamp("us"))
    assert shown(n=pa.array([1]), text=text, at=at) == {"n": 1, "text": "\\xff\\xfe", "at": 1 << 60}
