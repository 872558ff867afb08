"""What is particular to JetStream: consumers that a source finds, messages that stay with who has them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from nats_kit import NatsServer
from programs import find_program
from servers import is_open

from ftlayer.connectors.nats.client import NatsAwayError, nats_library
from ftlayer.connectors.nats.source import NatsReader, Pull
from ftlayer.errors import SinkError, SourceChangedError, SourceError
from ftlayer.sinks import NatsSink
from ftlayer.sources import NatsSource
from ftlayer.topology.operators import Fetched, Member, QueueReader

pytest.importorskip("nats")
nkeys = pytest.importorskip("nkeys")


def fetch_all(reader: QueueReader, count: int, rows: int = 7) -> list[Fetched]:
    found: list[Fetched] = []
    for _ in range(1_000):
        if (fetched := reader.fetch(rows, 0.1)) is not None:
            found.append(fetched)
        if sum(each.rows.num_rows for each in found) >= count:
            return found
    raise AssertionError(f"{count} messages were not fetched")


def numbers_of(kit: Any, found: list[Fetched]) -> list[int]:
    return [number for each in found for number in kit.numbers(each)]


def source_of(kit: Any, **options: Any) -> NatsSource:
    return NatsSource(kit.server.url, kit.name, "group", **options)


def opened(kit: Any, source: NatsSource, positions: dict[int, bytes] | None = None) -> Any:
    return source.open(kit.member(), positions or {}, stored=True)


def test_a_reader_that_died_without_a_word_is_replaced_at_once(nats: Any) -> None:
    """Nobody waits for ``ack_wait``: an hour. What comes again may come behind messages that are new."""
    source = source_of(nats, ack_wait="1h")
    nats.put(0, 20)
    dead = opened(nats, source)
    found = fetch_all(dead, 12, rows=4)
    dead._disconnect()
    alive = opened(nats, source, {0: found[1].position})
    assert sorted(numbers_of(nats, fetch_all(alive, 12))) == list(range(8, 20))
    alive.close()


def test_what_was_fetched_is_not_lost_with_the_acknowledgement_of_what_was_known(
    nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost while messages are acknowledged that came beside new ones."""
    nats.put(0, 4)
    first = opened(nats, source_of(nats))
    stored, _ = fetch_all(first, 4, rows=2)
    first.close()
    send, losses = Pull.send, [NatsAwayError("meant to be lost")]

    def losing(pull: Pull, replies: list[str], answer: bytes = b"") -> None:
        if losses:
            raise losses.pop()
        send(pull, replies, answer)

    monkeypatch.setattr(NatsReader, "_settle", lambda *_: None)
    monkeypatch.setattr(Pull, "send", losing)
    second = opened(nats, source_of(nats, ack_wait="1s"), {0: stored.position})
    assert numbers_of(nats, fetch_all(second, 2)) == [2, 3]
    while losses:
        second.fetch(1, 0.01)
    second.close()


def test_messages_stay_with_who_waits_longer_than_ack_wait(nats: Any, wait_until: Any) -> None:
    source = source_of(nats, ack_wait="1s")
    nats.put(0, 10)
    reader = opened(nats, source)
    found = fetch_all(reader, 10, rows=10)

    def seen() -> Any:
        return nats.server.ask(lambda client: client.jetstream().consumer_info(nats.name, "group"))

    begun = seen().delivered.last_active
    nats.put(10, 11)
    other = source.open(nats.member(1, 2), {}, stored=True)
    # The eleventh is given to the other one, which holds it meanwhile.
    late = fetch_all(other, 1)
    for _ in range(25):
        assert other.fetch(10, 0.1) is None
    assert seen().num_redelivered == 0
    assert numbers_of(nats, late) == [10]
    assert begun is not None
    reader.acknowledge([each.receipt for each in found])
    wait_until(lambda: nats.pending() == 1, "acknowledgements")
    reader.close()
    other.close()


def test_what_a_subtask_had_that_is_gone_comes_to_the_others(nats: Any) -> None:
    source = source_of(nats, ack_wait="1s")
    nats.put(0, 20)
    gone, other = (source.open(nats.member(subtask, 2), {}, stored=True) for subtask in range(2))
    fetch_all(gone, 5, rows=5)
    gone._disconnect()
    assert sorted(numbers_of(nats, fetch_all(other, 20))) == list(range(20))
    other.close()


def test_no_more_than_max_pending_are_read(nats: Any, caplog: Any) -> None:
    reader = opened(nats, source_of(nats, max_pending=10))
    nats.put(0, 20)
    found = fetch_all(reader, 10)
    assert reader.fetch(10, 0.1) is None
    assert "which is max_pending" in caplog.text
    assert nats.pending() == 10
    reader.acknowledge([found[-1].receipt])
    assert numbers_of(nats, fetch_all(reader, 10)) == list(range(10, 20))
    reader.close()


def test_a_consumer_that_is_there_gets_the_options(nats: Any) -> None:
    opened(nats, source_of(nats)).fetch(1, 0.01)
    opened(nats, source_of(nats, max_pending=77, ack_wait="9s")).fetch(1, 0.01)
    config = nats.server.ask(lambda client: client.jetstream().consumer_info(nats.name, "group")).config
    assert (config.max_ack_pending, config.ack_wait) == (77, 9.0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"ack_policy": "all"}, "has the acknowledgement policy 'all'"),
        ({"ack_policy": "explicit", "deliver_subject": "there"}, "pushes its messages"),
        ({"ack_policy": "explicit", "max_deliver": 3}, "gives a message up after 3 deliveries"),
        ({"ack_policy": "explicit", "filter_subject": "other"}, "has the subject 'other'"),
    ],
)
def test_a_consumer_that_will_not_do_is_refused(nats: Any, config: dict[str, Any], said: str) -> None:
    from nats.js.api import ConsumerConfig

    config = {name: f"{nats.name}.other" if value == "other" else value for name, value in config.items()}
    made = ConsumerConfig(durable_name="group", **config)
    nats.server.ask(lambda client: client.jetstream().add_consumer(nats.name, made))
    with pytest.raises(SourceError, match=said.replace("'other'", f"'{nats.name}.other'")):
        opened(nats, source_of(nats, subject=f"{nats.name}.in")).fetch(1, 1.0)


def test_a_consumer_that_was_removed_goes_on_where_it_was(nats: Any) -> None:
    nats.put(0, 10)
    source = source_of(nats)
    reader = opened(nats, source)
    found = fetch_all(reader, 5, rows=5)
    reader.acknowledge([found[-1].receipt])
    nats.server.ask(lambda client: client.jetstream().delete_consumer(nats.name, "group"))
    nats.put(10, 15)
    assert sorted(numbers_of(nats, fetch_all(reader, 10))) == list(range(5, 15))
    reader.close()


def test_a_stream_that_is_shorter_than_what_was_read_is_an_error(nats: Any) -> None:
    source = source_of(nats)
    nats.put(0, 30)
    reader = opened(nats, source)
    position = fetch_all(reader, 30)[-1].position
    reader.close()
    nats.server.ask(lambda client: client.jetstream().delete_stream(nats.name))
    nats.server.make(nats.name)
    nats.put(0, 10)
    with pytest.raises(SourceChangedError, match="the stream ends at message 10, and it was read up to 30"):
        opened(nats, source, {0: position}).fetch(1, 0.0)


def test_a_stream_that_was_made_anew_is_read_from_its_beginning(nats: Any) -> None:
    nats.put(0, 10)
    source = source_of(nats)
    reader = opened(nats, source)
    (found,) = fetch_all(reader, 10, rows=10)
    reader.acknowledge([found.receipt])
    reader.close()
    nats.server.ask(lambda client: client.jetstream().delete_stream(nats.name))
    nats.server.make(nats.name)
    nats.put(50, 60)
    again = opened(nats, source, {0: found.position})
    assert numbers_of(nats, fetch_all(again, 10)) == list(range(50, 60))
    again.close()


def test_a_source_begins_with_what_comes_and_with_its_subject_alone(nats: Any) -> None:
    nats.put(0, 5)
    source = source_of(nats, start="latest", subject=f"{nats.name}.*.good")
    reader = opened(nats, source)
    assert reader.fetch(5, 0.01) is None

    async def publish(client: Any) -> None:
        for subject in ("in.bad", "in.good", "in.good.not", "out.good"):
            await client.jetstream().publish(f"{nats.name}.{subject}", b"7")

    nats.server.ask(publish)
    found = fetch_all(reader, 2)
    assert [row["subject"] for each in found for row in each.rows.to_pylist()] == [
        f"{nats.name}.in.good",
        f"{nats.name}.out.good",
    ]
    assert source.unpack(found[-1].position)[0].packed() == [7, 2], "the one between is no gap"
    reader.close()


def test_columns_say_what_came_with_a_message(nats: Any) -> None:
    nats.server.ask(
        lambda client: client.jetstream().publish(f"{nats.name}.in", b"\xff", headers={"a": "é", "b": "2"})
    )
    nats.put(1, 2)
    reader = opened(nats, source_of(nats))
    first, second = (row for each in fetch_all(reader, 2) for row in each.rows.to_pylist())
    assert first.pop("timestamp").year >= 2024
    assert first == {
        "value": b"\xff",
        "subject": f"{nats.name}.in",
        "sequence": 1,
        "headers": [("a", "é"), ("b", "2")],
        "redelivered": False,
    }
    assert second["headers"] == []
    reader.close()


def test_a_stream_that_is_not_there_is_said(nats: Any) -> None:
    with pytest.raises(SourceError, match="there is no such stream"):
        NatsSource(nats.server.url, "missing", "c").open(nats.member(), {}, stored=True).fetch(1, 1.0)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A server that wants credentials, which lie in ``user.creds``."""
    server = Guarded(find_program("nats-server"), tmp_path)
    server.configure()
    server.start()
    try:
        yield server
    finally:
        server.end()


class Guarded(NatsServer):
    """A server that knows its users by JWTs, which an operator has signed."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", str(self.directory / "config")]

    def is_ready(self) -> bool:
        return is_open(self.port)

    @property
    def credentials(self) -> str:
        return str(self.directory / "user.creds")

    def configure(self) -> None:
        kinds = (nkeys.PREFIX_BYTE_OPERATOR, *[nkeys.PREFIX_BYTE_ACCOUNT] * 2, nkeys.PREFIX_BYTE_USER)
        pairs = [nkeys.from_seed(nkeys.encode_seed(os.urandom(32), kind)) for kind in kinds]
        operator, system, account, user = pairs
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
        limits |= {"wildcards": True}
        stores = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
        accounts = {
            each.public_key.decode(): signed(operator, each, {"type": "account", "limits": own})
            for each, own in ((system, limits), (account, limits | stores))
        }
        (self.directory / "config").write_text(
            f"operator: {signed(operator, operator, {'type': 'operator'})}\n"
            f"system_account: {system.public_key.decode()}\n"
            f"resolver: MEMORY\nresolver_preload: {json.dumps(accounts)}\n"
        )
        claims = {"type": "user", **dict.fromkeys(("subs", "data", "payload"), -1)}
        (self.directory / "user.creds").write_text(
            f"-----BEGIN NATS USER JWT-----\n{signed(account, user, claims)}\n------END NATS USER JWT------\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )


def signed(issuer: Any, subject: Any, claims: dict[str, Any]) -> str:
    """Return a JWT as NATS has them."""
    name = subject.public_key.decode()
    parts = (
        {"typ": "JWT", "alg": "ed25519-nkey"},
        {"jti": name, "iat": 1, "iss": issuer.public_key.decode(), "name": name, "sub": name}
        | {"nats": {**claims, "version": 2}},
    )
    said = b".".join(in_url(json.dumps(part).encode()) for part in parts)
    return (said + b"." + in_url(issuer.sign(said))).decode()


def in_url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def test_credentials_are_shown_by_source_and_sink(guarded: Guarded) -> None:
    async def make() -> None:
        async with await nats_library().connect(guarded.url, user_credentials=guarded.credentials) as client:
            await client.jetstream().add_stream(name="s", subjects=["s.>"])

    asyncio.run(make())
    sink = NatsSink(guarded.url, "s", "s.out", value="n", credentials=guarded.credentials)
    sink.commit([sink.write(iter([pa.record_batch({"n": ["7"]})]))], 1)
    source = NatsSource(guarded.url, "s", "c", credentials=guarded.credentials)
    reader = source.open(Member("job/messages", 0, 1), {}, stored=True)
    assert fetch_all(reader, 1)[0].rows.column("value").to_pylist() == [b"7"]
    reader.close()


def test_a_user_who_is_refused_is_not_tried_again(guarded: Guarded) -> None:
    url = guarded.url.replace("nats://", "nats://user:wrong@")
    reader = NatsSource(url, "s", "c").open(Member("job/messages", 0, 1), {}, stored=True)
    with pytest.raises(SourceError, match="Authorization Violation"):
        reader.fetch(1, 1.0)
    with pytest.raises(SinkError, match="Authorization Violation"):
        NatsSink(url, "s", "s.out", value="n").write(iter([pa.record_batch({"n": ["7"]})]))
