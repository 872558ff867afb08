"""What another system says of a record beside its payload can never stop a source."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftlayer.connectors import amqp as amqp_rows
from ftlayer.connectors import mqtt as mqtt_rows
from ftlayer.connectors import redis as redis_rows
from ftlayer.connectors.kafka import source as kafka_rows
from ftlayer.connectors.nats import source as nats_rows
from ftlayer.connectors.nats.source import StreamDelivery
from ftlayer.connectors.postgres.catalog import change_batch, schema_of_changes
from ftlayer.connectors.postgres.transactions import ChangedRow
from ftlayer.records import beside

SCALES = {"s": 1_000_000, "ms": 1_000, "us": 1}
NUMBERS = st.one_of(
    st.none(), st.integers(), st.integers(-(1 << 63), 1 << 64), st.sampled_from((0, 1_700_000_000))
)


@given(st.lists(NUMBERS, max_size=5), st.sampled_from(sorted(SCALES)))
@example([1 << 64, 5], "s")
@example([1_700_000_000_000_000_000], "ms")
def test_a_time_is_what_it_was_or_null(given: list[int | None], unit: str) -> None:
    def expected(value: int | None) -> int | None:
        us = None if value is None else value * SCALES[unit]
        return us if us is not None and beside.FIRST_US <= us <= beside.LAST_US else None

    before = beside.misfits()
    found = beside.times(given, unit, "here", "a time")
    assert found.cast("int64").to_pylist() == [expected(value) for value in given]
    bad = sum(value is not None and expected(value) is None for value in given)
    assert beside.misfits() - before == bad
    if all(value is not None and abs(value) < 1 << 62 for value in given):
        assert beside.times(np.array(given, np.int64), unit, "here", "a time").equals(found)


@given(
    st.lists(
        st.one_of(st.none(), st.binary(), st.text(st.characters()), st.text("\ud800\udfffa")), max_size=4
    )
)
def test_a_text_is_what_it_was_or_has_replacements(given: list[Any]) -> None:
    for value, text in zip(given, beside.texts(given, "here", "a text").to_pylist(), strict=True):
        if value is None:
            assert text is None
        elif isinstance(value, bytes):
            assert text == value.decode("utf-8", "replace")
        else:
            # Two surrogates may be one letter.
            same = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            assert text in (value, same)


def test_a_time_of_another_type_that_fits_is_no_misfit() -> None:
    assert beside.times(["7", None], "s", "x", "a time").cast("int64").to_pylist() == [7_000_000, None]


def test_it_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    before = beside.misfits()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            beside.times([1 << 70, 1 << 71], "s", "a queue of this test", "a timestamp")
    assert beside.misfits() - before == 6
    (record,) = caplog.records
    assert "a queue of this test: a timestamp is none of the years 1 to 9999, and null" in record.getMessage()


ODD_TIMES = (1 << 64) - 1, 1_700_000_000_000_000, 253_402_300_800, -62_135_596_801


@pytest.mark.parametrize("time", ODD_TIMES)
def test_amqp(time: int) -> None:
    properties = SimpleNamespace(
        message_id="\ud800", timestamp=time, headers={"\udcff": b"\xff", "n": [time]}
    )
    method = SimpleNamespace(routing_key="a\udcff", redelivered=False)
    (row,) = amqp_rows.to_rows([(method, properties, b"kept")]).to_pylist()
    assert (row["value"], row["timestamp"]) == (b"kept", None)
    assert row["routing_key"].startswith("a\ufffd")


@pytest.mark.parametrize("time", [*(each * 1_000 for each in ODD_TIMES[1:]), (1 << 63) - 1])
def test_kafka(time: int) -> None:
    def message(offset: int, stamp: tuple[int, int], headers: Any) -> Any:
        def read() -> Any:
            return headers if headers != "odd" else b"\xff".decode()

        values = {"key": None, "value": b"kept", "offset": offset, "timestamp": stamp}
        return SimpleNamespace(
            headers=read, **{name: lambda value=value: value for name, value in values.items()}
        )

    messages = [
        message(0, (1, time), None),
        message(1, (0, -1), "odd"),
        message(2, (2, 5), [("\ud800", b"x")]),
    ]
    rows = kafka_rows.to_rows(messages, "t", 0).to_pylist()
    assert [row["value"] for row in rows] == [b"kept"] * 3
    assert [row["timestamp"] and row["timestamp"].microsecond for row in rows] == [None, None, 5_000]
    assert [row["headers"] and row["headers"][0]["key"][0] for row in rows] == [None, None, "\ufffd"]


def test_redis_nats_and_mqtt() -> None:
    ids = [b"18446744073709551615-1", b"5-0", b"253402300800000-0"]
    found = redis_rows.to_rows([[each, []] for each in ids], redis_rows.schema_of([]))
    assert [time and time.microsecond for time in found["time"].to_pylist()] == [None, 5_000, None]
    delivery = StreamDelivery(1, 1, 1 << 70, 1, "r")
    message = SimpleNamespace(data=b"kept", subject="\ud800", headers={"\ud800": "\udcff"})
    (row,) = nats_rows.to_rows([message], [delivery]).to_pylist()
    assert (row["value"], row["timestamp"]) == (b"kept", None)
    properties = SimpleNamespace(UserProperty=[("\ud800", "\udcff")])
    sent = SimpleNamespace(
        payload=b"kept", topic="\ud800", qos=1, retain=False, dup=False, properties=properties
    )
    (row,) = mqtt_rows.to_rows([sent]).to_pylist()
    assert row["value"] == b"kept"


def test_texts_of_headers_count() -> None:
    before = beside.misfits()
    message = SimpleNamespace(data=b"kept", subject="s", headers={"\ud800": "\udcff", "fine": "too"})
    nats_rows.to_rows([message], [StreamDelivery(1, 1, 5_000, 1, "r")])
    assert beside.misfits() - before == 2
    properties = SimpleNamespace(UserProperty=[("\ud800", "v"), ("n", "\udcff")])
    sent = SimpleNamespace(payload=b"", topic="t", qos=1, retain=False, dup=False, properties=properties)
    mqtt_rows.to_rows([sent])
    assert beside.misfits() - before == 4
    headers = SimpleNamespace(message_id="m", timestamp=5, headers={"\ud800": b"\xff", "n": 7})
    amqp_rows.to_rows([(SimpleNamespace(routing_key="k", redelivered=False), headers, b"")])
    assert beside.misfits() - before == 6
    redis_rows.to_rows([[b"5-0", [b"\xff", b"kept", b"a", b"\xfe"]]], redis_rows.schema_of([]))
    redis_rows.to_rows([[b"5-0", [b"a", b"\xfe"]]], redis_rows.schema_of(["a"]))
    assert beside.misfits() - before == 8


PLACE = "$JS.ACK.s.c."


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (PLACE + "2.7.3.1700000000000000000.0", (2, 7, 3, 1_700_000_000_000_000_000)),
        ("$JS.ACK.hub.account.s.c.2.7.3.5.0.token", (2, 7, 3, 5)),
        (PLACE + "1.7.3.x.0", (1, 7, 3, 0)),
        (PLACE + f"1.7.3.{1 << 64}.0", (1, 7, 3, 0)),
        (PLACE + "1.x.3.5.0", None),
        (PLACE + f"1.{1 << 63}.3.5.0", None),
        (PLACE + "1.-7.3.5.0", None),
        (PLACE + "1.\u0667.3.5.0", None),
        ("_INBOX.of.another", None),
        ("", None),
    ],
)
def test_a_reply_of_nats_without_numbers_is_left_out(reply: str, expected: Any) -> None:
    before = beside.misfits()
    found = nats_rows.delivery_of(reply)
    assert beside.misfits() - before == (expected is None or expected[3] == 0)
    if expected is not None:
        assert found is not None
        assert (found.delivered, found.sequence, found.consumer_sequence, found.time_ns) == expected
        (row,) = nats_rows.to_rows(
            [SimpleNamespace(data=b"", subject="s", headers=None)], [found]
        ).to_pylist()
        assert (row["timestamp"] is None) == (expected[3] == 0)


def test_a_commit_of_postgres_beyond_the_years_is_null() -> None:
    schema = schema_of_changes([pa.field("n", pa.int64())])
    times = (beside.LAST_US, beside.LAST_US + 1, (1 << 63) - 1, None)
    rows = [ChangedRow("insert", 1, place, 7, time, ("1",)) for place, time in enumerate(times)]
    found = change_batch(rows, schema).to_pylist()
    assert [row["_commit_time"] is None for row in found] == [False, True, True, True]
