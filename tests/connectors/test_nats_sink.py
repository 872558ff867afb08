"""A stream of JetStream holds each record exactly once, whatever is lost, repeated or killed."""

from __future__ import annotations

import os
import pickle
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer import RowsRejected
from ftlayer.connectors.nats import sink as rows_module
from ftlayer.connectors.nats import sink as sink_module
from ftlayer.connectors.nats import sink as streams_module
from ftlayer.connectors.nats.sink import NatsStreams
from ftlayer.errors import ConfigError, SinkError, UncommittableError
from ftlayer.sinks import FileMessage, NatsSink

pytest.importorskip("nats")

COUNT = count()


@pytest.fixture
def stream(nats_server: Any) -> str:
    name = f"sink-{os.getpid()}-{next(COUNT)}"
    nats_server.make(name)
    return name


@pytest.fixture
def sink(nats_server: Any, stream: str, monkeypatch: pytest.MonkeyPatch) -> NatsSink:
    monkeypatch.setattr(sink_module, "TRY_AGAIN_S", 0.01)
    return sink_of(nats_server, stream)


def sink_of(server: Any, stream: str, **options: Any) -> NatsSink:
    return NatsSink(server.url, stream, f"{stream}.out", value="n", **options)


def rows(*numbers: int) -> Any:
    return iter([pa.record_batch({"n": pa.array(map(str, numbers))})])


def numbers_in(server: Any, stream: str) -> list[int]:
    return [int(body) for _, body in server.read(stream)]


def staged_in(server: Any, stream: str) -> int:
    info = server.ask(lambda client: client.jetstream().stream_info(f"{stream}_ftlayer_rows"))
    return int(info.state.messages)


def test_rows_are_seen_when_they_are_committed(nats_server: Any, sink: NatsSink, stream: str) -> None:
    messages = [sink.write(rows(1, 2)), sink.write(rows(3)), sink.write(iter([]))]
    assert numbers_in(nats_server, stream) == []
    driver = pickle.loads(pickle.dumps(sink))
    driver.commit(pickle.loads(pickle.dumps(messages)), 7)
    assert numbers_in(nats_server, stream) == [1, 2, 3]
    assert staged_in(nats_server, stream) == 0


def test_rows_of_many_chunks_keep_their_order(
    nats_server: Any, sink: NatsSink, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "CHUNK_BYTES", 20)
    monkeypatch.setattr(streams_module, "UNANSWERED", 7)
    sink.commit([sink.write(iter([*rows(*range(30)), *rows(*range(30, 45))]))], 1)
    assert numbers_in(nats_server, stream) == list(range(45))


def test_a_commit_that_comes_again_changes_nothing(nats_server: Any, sink: NatsSink, stream: str) -> None:
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.commit([first, None], 1)
    sink.commit([first, second], 2)
    sink.commit([second, first], 3)
    assert numbers_in(nats_server, stream) == [1, 2]


def test_what_is_aborted_is_gone_and_what_is_committed_stays(
    nats_server: Any, sink: NatsSink, stream: str
) -> None:
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.abort([first, second, None], 2)
    assert numbers_in(nats_server, stream) == [1]
    with pytest.raises(UncommittableError, match="1 rows were staged and 0 are there"):
        sink.commit([second], 2)


def test_the_server_is_killed_between_write_and_commit(nats_server: Any, sink: NatsSink, stream: str) -> None:
    message = sink.write(rows(1, 2))
    nats_server.restart()
    sink.commit([message], 1)
    nats_server.restart()
    sink.commit([message], 1)
    assert numbers_in(nats_server, stream) == [1, 2]


class KilledError(BaseException):
    """Stands for the end of a process."""


@pytest.mark.parametrize("remembers", [True, False], ids=["within the window", "behind the window"])
@pytest.mark.parametrize("published", [0, 1, 60, 100])
def test_a_commit_that_was_interrupted_goes_on(
    nats_server: Any, sink: NatsSink, stream: str, published: int, remembers: bool, monkeypatch: Any
) -> None:
    """Also when the server has forgotten ids: it remembers them for two minutes, here a tenth of a second."""
    if not remembers:
        nats_server.ask(lambda client: forget_soon(client, stream))
    monkeypatch.setattr(streams_module, "UNANSWERED", 16)
    message = sink.write(rows(*range(100)))
    publish = NatsStreams.publish

    async def interrupted(self: NatsStreams, named: Any) -> None:
        await publish(self, list(named)[:published])
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(NatsStreams, "publish", interrupted)
        with pytest.raises(KilledError):
            sink.commit([message], 1)
    assert numbers_in(nats_server, stream) == list(range(published))
    nats_server.ask(lambda client: publish_others(client, stream, 100 if not remembers else 1))
    sink.commit([message], 1)
    sink.commit([message], 1)
    found = [number for number in numbers_in(nats_server, stream) if number >= 0]
    assert found == list(range(100))


async def forget_soon(client: Any, stream: str) -> None:
    jetstream = client.jetstream()
    config = (await jetstream.stream_info(stream)).config
    await jetstream.update_stream(config.evolve(duplicate_window=0.1))


async def publish_others(client: Any, stream: str, count: int) -> None:
    """Publish what others do; returns when the server has forgotten ids of 0.1 s ago."""
    jetstream = client.jetstream()
    known = (await jetstream.publish(f"{stream}.out", b"-1", headers={"Nats-Msg-Id": "probe"})).seq
    while (
        count > 1
        and (await jetstream.publish(f"{stream}.out", b"-1", headers={"Nats-Msg-Id": "probe"})).seq == known
    ):
        pass
    for _ in range(count):
        await jetstream.publish(f"{stream}.in", b"-1")


def test_a_batch_of_a_query_that_is_run_again_adds_nothing(
    nats_server: Any, sink: NatsSink, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query")
    sink.commit([sink.write(rows(1)), sink.write(rows(2))], 0)
    sink.commit([sink.write(rows(2, 1))], 0)
    sink.commit([sink.write(rows(3))], 1)
    assert numbers_in(nats_server, stream) == [1, 2, 3]
    assert staged_in(nats_server, stream) == 0


def test_a_batch_of_a_query_that_was_interrupted_has_the_rows_of_the_first_time(
    nats_server: Any, sink: NatsSink, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run may have the same rows in another order."""
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query")
    publish = NatsStreams.publish

    async def interrupted(self: NatsStreams, named: Any) -> None:
        await publish(self, list(named)[:2])
        raise KilledError

    message = sink.write(rows(1, 2, 3, 4))
    with monkeypatch.context() as patch:
        patch.setattr(NatsStreams, "publish", interrupted)
        with pytest.raises(KilledError):
            sink.commit([message], 0)
    sink.commit([sink.write(rows(4, 3, 2, 1))], 0)
    assert numbers_in(nats_server, stream) == [1, 2, 3, 4]
    assert staged_in(nats_server, stream) == 0


def test_what_dead_writers_left_is_removed(nats_server: Any, sink: NatsSink, stream: str) -> None:
    dead, kept = [sink_of(nats_server, stream).write(rows(number)) for number in (1, 2)]
    mine = sink.write(rows(3))
    assert sink.clean([kept]) == []
    assert sink.clean([kept], older_than=-60) == [dead.id]
    sink.commit([kept, mine], 1)
    assert numbers_in(nats_server, stream) == [2, 3]


def test_a_column_names_a_message_and_another_has_its_headers(nats_server: Any, stream: str) -> None:
    sink = sink_of(nats_server, stream, id_column="id", headers="headers")
    texts = pa.map_(pa.string(), pa.string())
    batch = pa.record_batch(
        {
            "n": pa.array([b"1", b"1", b"2"]),
            "id": pa.array(["a", "a", None]),
            "headers": pa.array([[("X", "é"), ("Nats-Rollup", "all")], [], None], texts),
        }
    )
    sink.commit([sink.write(iter([batch]))], 1)
    sink.commit([sink.write(iter([batch.slice(0, 1)]))], 2)
    (first, body), (second, _) = nats_server.read(stream)
    assert body == b"1"
    assert first == {"X": "é", "Nats-Msg-Id": "a"}
    assert len(second["Nats-Msg-Id"]) > 32, "a name of its own"


def test_rows_are_json_where_no_column_is_the_message(nats_server: Any, stream: str) -> None:
    sink = NatsSink(nats_server.url, stream, f"{stream}.out")
    sink.commit([sink.write(iter([pa.record_batch({"a": [1], "b": ["é"]})]))], 1)
    assert [body for _, body in nats_server.read(stream)] == [b'{"a": 1, "b": "\\u00e9"}']


def test_rows_that_the_server_would_refuse_are_refused_by_their_numbers(
    nats_server: Any, stream: str
) -> None:
    sink = sink_of(nats_server, stream, id_column="id")

    def batch(bodies: list[bytes], ids: list[str]) -> pa.RecordBatch:
        return pa.record_batch({"n": pa.array(bodies), "id": pa.array(ids)})

    with pytest.raises(RowsRejected) as refused:
        sink.write(
            iter([batch([b"1", b"2"], ["a", "b"]), batch([b"3", b"4" * 2_000_000], ["two\nlines", "c"])])
        )
    assert list(refused.value.errors) == [2, 3]
    assert staged_in(nats_server, stream) == 0
    whole = NatsSink(nats_server.url, stream, f"{stream}.out")
    with pytest.raises(RowsRejected) as refused:
        whole.write(iter([pa.record_batch({"x": [1.0]}), pa.record_batch({"x": [2.0, float("nan"), 3.0]})]))
    assert list(refused.value.errors) == [2]
    assert staged_in(nats_server, stream) == 0
    sink.commit([sink.write(iter([batch([b"5" * 1_000_000], ["d"])]))], 1)
    assert [len(body) for _, body in nats_server.read(stream)] == [1_000_000]


def test_streams_and_subjects_that_will_not_do_are_said(nats_server: Any, stream: str) -> None:
    with pytest.raises(SinkError, match="there is no stream 'missing'"):
        NatsSink(nats_server.url, "missing", "missing.out").write(rows(1))
    with pytest.raises(SinkError, match="and not 'elsewhere'"):
        NatsSink(nats_server.url, stream, "elsewhere").write(rows(1))
    with pytest.raises(ConfigError, match="value: rows have no column 'body'"):
        NatsSink(nats_server.url, stream, f"{stream}.out", value="body").write(rows(1))


def test_a_stream_that_is_gone_at_its_commit_is_told_at_once(
    nats_server: Any, sink: NatsSink, stream: str
) -> None:
    message = sink.write(rows(1, 2))
    nats_server.ask(lambda client: client.jetstream().delete_stream(stream))
    with pytest.raises(
        UncommittableError, match=rf"no stream '{stream}'.* 2 rows of checkpoint 7 are staged"
    ):
        sink.commit([message], 7)
    nats_server.make(stream)
    sink.commit([message], 7)
    assert numbers_in(nats_server, stream) == [1, 2]


@pytest.mark.parametrize(
    ("pattern", "subject", "takes"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a.b", True),
    ],
)
def test_which_subjects_a_stream_takes(pattern: str, subject: str, takes: bool) -> None:
    assert streams_module._takes(pattern, subject) is takes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stream": ""}, "stream: expected the name of a stream"),
        ({"url": "nowhere"}, "url: "),
        ({"subject": "a.*"}, "subject: expected a subject without wildcards"),
        ({"name": "a.b"}, "name: "),
        ({"value": 7}, "value: "),
        ({"id_column": ""}, "id_column: "),
        ({"headers": ""}, "headers: "),
        ({"remember": "long"}, "remember: "),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NatsSink(**{"url": "nats://localhost", "stream": "s", "subject": "s.out", **options})


def test_messages_of_another_sink_are_refused(sink: NatsSink) -> None:
    with pytest.raises(UncommittableError, match="expected messages of NatsSink, got a FileMessage"):
        sink.commit([FileMessage(None, 0, "")], 1)


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "commit", "again", "abort"]), st.integers(0, 5)), max_size=15
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(STEPS)
def test_what_is_committed_is_there_once(nats_server: Any, steps: list[tuple[str, int]]) -> None:
    stream = f"walk-{os.getpid()}-{next(COUNT)}"
    nats_server.make(stream)
    sink = sink_of(nats_server, stream)
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
    assert numbers_in(nats_server, stream) == expected
