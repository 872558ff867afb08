"""A Redis stream holds each record exactly once, whatever is lost, repeated or killed."""

from __future__ import annotations

import datetime
import os
import pickle
from decimal import Decimal
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer import RowsRejected
from ftlayer.connectors import redis as sink_module
from ftlayer.connectors import table_commits
from ftlayer.connectors.redis import MAX_FIELDS
from ftlayer.errors import ConfigError, SinkError, UncommittableError
from ftlayer.sinks import FileMessage, RedisSink

COUNT = count()


@pytest.fixture
def stream() -> str:
    return f"sink-{os.getpid()}-{next(COUNT)}"


@pytest.fixture
def sink(redis_server: Any, stream: str, monkeypatch: pytest.MonkeyPatch) -> RedisSink:
    monkeypatch.setattr(table_commits, "TRY_AGAIN_S", 0)
    return RedisSink(redis_server.url, stream)


def rows(*numbers: int) -> Any:
    return iter([pa.record_batch({"n": pa.array(numbers, pa.int64())})])


def entries_in(server: Any, stream: str) -> list[dict[str, str]]:
    with server.client() as client:
        return [fields for _, fields in client.xrange(stream)]


def numbers_in(server: Any, stream: str) -> list[int]:
    return [int(fields["n"]) for fields in entries_in(server, stream)]


def keys_beside(server: Any, stream: str) -> list[str]:
    with server.client() as client:
        return sorted(client.keys(f"{stream}:*"))


def test_rows_are_seen_when_they_are_committed(redis_server: Any, sink: RedisSink, stream: str) -> None:
    messages = [sink.write(rows(1, 2)), sink.write(rows(3)), sink.write(iter([]))]
    assert numbers_in(redis_server, stream) == []
    driver = pickle.loads(pickle.dumps(sink))
    driver.commit(pickle.loads(pickle.dumps(messages)), 7)
    assert numbers_in(redis_server, stream) == [1, 2, 3]
    assert keys_beside(redis_server, stream) == [f"{stream}:ftlayer:commits:{stream}"]


def test_more_rows_than_a_command_takes_keep_their_order(
    redis_server: Any, sink: RedisSink, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "PUSHED_ROWS", 3)
    sink.commit([sink.write(iter([*rows(*range(10)), *rows(*range(10, 15))]))], 1)
    assert numbers_in(redis_server, stream) == list(range(15))


def test_a_commit_that_comes_again_changes_nothing(redis_server: Any, sink: RedisSink, stream: str) -> None:
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.commit([first, None], 1)
    sink.commit([first, second], 2)
    sink.commit([second, first], 3)
    assert numbers_in(redis_server, stream) == [1, 2]


def test_what_is_aborted_is_gone_and_what_is_committed_stays(
    redis_server: Any, sink: RedisSink, stream: str
) -> None:
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.abort([first, second, None], 2)
    assert numbers_in(redis_server, stream) == [1]
    with pytest.raises(UncommittableError, match="1 rows were staged and 0 are there"):
        sink.commit([second], 2)


def test_the_server_is_killed_between_write_and_commit(
    redis_server: Any, sink: RedisSink, stream: str
) -> None:
    message = sink.write(rows(1, 2))
    redis_server.restart()
    sink.commit([message], 1)
    redis_server.restart()
    sink.commit([message], 1)
    assert numbers_in(redis_server, stream) == [1, 2]


def test_a_batch_of_a_query_that_is_run_again_adds_nothing(
    redis_server: Any, sink: RedisSink, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query")
    sink.commit([sink.write(rows(1)), sink.write(rows(2))], 0)
    sink.commit([sink.write(rows(1, 2))], 0)
    sink.commit([sink.write(rows(3))], 1)
    assert sorted(numbers_in(redis_server, stream)) == [1, 2, 3]
    assert keys_beside(redis_server, stream) == [f"{stream}:ftlayer:commits:{stream}"]


def test_a_stream_is_trimmed(redis_server: Any, stream: str) -> None:
    sink = RedisSink(redis_server.url, stream, max_length=100)
    sink.commit([sink.write(rows(*range(1_000)))], 1)
    found = numbers_in(redis_server, stream)
    assert 100 <= len(found) < 500
    assert found[-1] == 999


def test_a_commit_that_was_forgotten_is_said_and_not_repeated(redis_server: Any, stream: str) -> None:
    sink = RedisSink(redis_server.url, stream, remember="1ms")
    message = sink.write(rows(1))
    sink.commit([message], 1)
    while keys_beside(redis_server, stream):
        sink.commit([sink.write(rows(2))], 2)
        with redis_server.client() as client:
            if client.zscore(f"{stream}:ftlayer:commits:{stream}", message.id) is None:
                break
    with pytest.raises(UncommittableError, match="longer ago than remember says"):
        sink.commit([message], 1)
    assert numbers_in(redis_server, stream).count(1) == 1


def test_what_dead_writers_left_is_removed(redis_server: Any, sink: RedisSink, stream: str) -> None:
    dead, kept = [RedisSink(redis_server.url, stream).write(rows(number)) for number in (1, 2)]
    mine = sink.write(rows(3))
    assert sink.clean([kept]) == []
    assert sink.clean([kept], older_than=-60) == [dead.id]
    sink.commit([kept, mine], 1)
    assert numbers_in(redis_server, stream) == [2, 3]


def test_each_type_is_a_text(redis_server: Any, sink: RedisSink, stream: str) -> None:
    at = datetime.datetime(2026, 11, 23, 12, 30, tzinfo=datetime.UTC)
    batch = pa.record_batch(
        {
            "text": pa.array(["é", None]),
            "raw": pa.array([b"raw", b""]),
            "price": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
            "yes": pa.array([True, False]),
            "at": pa.array([at, None], pa.timestamp("us", "UTC")),
            "word": pa.array(["a", "b"]).dictionary_encode(),
            "more": pa.array([[("x", b"1"), ("y", b"2")], None], pa.map_(pa.string(), pa.binary())),
        }
    )
    sink.commit([sink.write(iter([batch]))], 1)
    first, second = entries_in(redis_server, stream)
    assert first == {
        "text": "é",
        "raw": "raw",
        "price": "1.50",
        "yes": "true",
        "at": "2026-11-23 12:30:00.000000Z",
        "word": "a",
        "x": "1",
        "y": "2",
    }
    assert second == {"raw": "", "yes": "false", "word": "b"}


def test_rows_without_a_field_are_refused_by_their_numbers(
    redis_server: Any, sink: RedisSink, stream: str
) -> None:
    batches = [pa.record_batch({"n": pa.array(numbers, pa.int64())}) for numbers in ([1, 2], [3, None, None])]
    with pytest.raises(RowsRejected) as refused:
        sink.write(iter(batches))
    assert list(refused.value.errors) == [3, 4]
    no_text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    values = pa.concat_arrays([pa.array(["a"]), no_text])
    batch = pa.record_batch(
        {"m": pa.array([[("k", "v")]] * 2, pa.map_(pa.string(), pa.string())), "v": values}
    )
    maps = pa.MapArray.from_arrays([0, 1, 2], pa.array(["k", "l"]), values)
    with pytest.raises(RowsRejected) as refused:
        sink.write(iter([batch, pa.record_batch({"m": maps, "v": pa.array(["b", "c"])})]))
    assert list(refused.value.errors) == [3]
    assert keys_beside(redis_server, stream) == []


def test_an_entry_has_as_many_fields_as_a_script_can_hand_on(
    redis_server: Any, sink: RedisSink, stream: str
) -> None:
    def wide(fields: int) -> Any:
        pairs = [(f"f{number}", "x") for number in range(fields)]
        return iter([pa.record_batch({"fields": pa.array([pairs], pa.map_(pa.string(), pa.string()))})])

    sink.commit([sink.write(wide(MAX_FIELDS))], 1)
    assert len(entries_in(redis_server, stream)[0]) == MAX_FIELDS
    with pytest.raises(RowsRejected, match="1001 fields"):
        sink.write(wide(MAX_FIELDS + 1))


def test_a_column_without_a_text_is_named(sink: RedisSink) -> None:
    with pytest.raises(SinkError, match="column 'parts' is list"):
        sink.write(iter([pa.record_batch({"parts": pa.array([[1]])})]))


def test_a_stream_that_is_something_else_is_said(redis_server: Any, sink: RedisSink, stream: str) -> None:
    with redis_server.client() as client:
        client.set(stream, "a text")
    message = sink.write(rows(1))
    with pytest.raises(
        UncommittableError, match=r"rows cannot be committed: .*WRONGTYPE.* 1 rows of checkpoint 7 are staged"
    ):
        sink.commit([message], 7)
    with redis_server.client() as client:
        client.delete(stream)
    sink.commit([message], 7)
    assert numbers_in(redis_server, stream) == [1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stream": ""}, "stream: expected the key of a stream"),
        ({"url": "nowhere"}, "url: "),
        ({"name": 7}, "name: "),
        ({"max_length": 0}, "max_length: "),
        ({"remember": "long"}, "remember: "),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=said):
        RedisSink(**{"url": "redis://localhost", "stream": "s", **options})


def test_messages_of_another_sink_are_refused(sink: RedisSink) -> None:
    with pytest.raises(UncommittableError, match="expected messages of RedisSink, got a FileMessage"):
        sink.commit([FileMessage(None, 0, "")], 1)


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "commit", "again", "abort"]), st.integers(0, 5)), max_size=25
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(STEPS)
def test_what_is_committed_is_there_once(redis_server: Any, steps: list[tuple[str, int]]) -> None:
    stream = f"walk-{os.getpid()}-{next(COUNT)}"
    sink = RedisSink(redis_server.url, stream)
    staged: list[Any] = []
    committed: list[Any] = []
    expected: list[int] = []
    written = 0
    for step, size in steps:
        if step == "write":
            message = sink.write(rows(*range(written, written + size)))
            staged.append((message, list(range(written, written + size))))
            written += size
        elif step == "abort":
            sink.abort([message for message, _ in [*staged, *committed]], 0)
            staged = []
        elif step == "commit":
            sink.commit([message for message, _ in staged[:size]], len(expected))
            expected += [number for _, numbers in staged[:size] for number in numbers]
            committed, staged = committed + staged[:size], staged[size:]
        else:
            sink.commit([message for message, _ in committed[-size:]], len(expected))
        assert numbers_in(redis_server, stream) == expected
