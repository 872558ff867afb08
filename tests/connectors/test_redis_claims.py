"""Entries of consumers that are gone are claimed, also where the one who claims dies of it."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import pytest

from ftlayer.errors import SourceChangedError
from ftlayer.sources import RedisSource
from ftlayer.topology.operators import Member

pytest.importorskip("redis")

COUNT = count()


@pytest.fixture
def stream(redis_server: Any) -> str:
    return f"claims-{os.getpid()}-{next(COUNT)}"


def put(server: Any, stream: str, first: int, end: int) -> None:
    with server.client() as client:
        for number in range(first, end):
            client.xadd(stream, {"n": str(number)})


def give(server: Any, stream: str, consumer: str, entries: int) -> None:
    """Have a consumer of others take entries, and be idle."""
    with server.client() as client:
        ((_, taken),) = client.xreadgroup("group", consumer, {stream: ">"}, count=entries)
        client.xclaim(stream, "group", consumer, 0, [name for name, _ in taken], idle=60_000, justid=True)


def read_all(reader: Any, wanted: int) -> list[Any]:
    found: list[Any] = []
    while sum(each.rows.num_rows for each in found) < wanted:
        if (fetched := reader.fetch(3, 0.05)) is not None:
            found.append(fetched)
    return found


def numbers(found: list[Any]) -> list[int]:
    return [int(number) for each in found for number in each.rows.column("n").to_pylist()]


def pending(server: Any, stream: str) -> int:
    with server.client() as client:
        return int(client.xpending(stream, "group")["pending"])


@pytest.fixture
def orphaned(redis_server: Any, stream: str) -> str:
    """A stream of 20 entries, of which two others hold the first 12."""
    with redis_server.client() as client:
        client.xgroup_create(stream, "group", "0", mkstream=True)
    put(redis_server, stream, 0, 20)
    give(redis_server, stream, "worker-7", 5)
    give(redis_server, stream, "another/job-0", 7)
    return stream


def test_entries_of_others_are_read_once_and_acknowledged(redis_server: Any, orphaned: str) -> None:
    source = RedisSource(redis_server.url, orphaned, "group", fields=["n"], claim_idle="10ms")
    reader = source.open(Member("job", 1, 2), {}, stored=True)
    found = read_all(reader, 20)
    assert sorted(numbers(found)) == list(range(20))
    assert all(Member("job", 1, 2).reads_for(each.of) for each in found)
    reader.acknowledge([each.receipt for each in found])
    assert pending(redis_server, orphaned) == 0
    reader.close()


def test_without_the_option_they_stay(redis_server: Any, orphaned: str) -> None:
    reader = RedisSource(redis_server.url, orphaned, "group", fields=["n"]).open(
        Member("job", 0, 1), {}, stored=True
    )
    assert sorted(numbers(read_all(reader, 8))) == list(range(12, 20))
    assert reader.fetch(3, 0.05) is None
    assert pending(redis_server, orphaned) == 20
    reader.close()


def test_what_was_claimed_by_one_who_died_is_read_behind_the_stored_positions(
    redis_server: Any, orphaned: str
) -> None:
    """It dies behind a fetch of claimed entries that is stored, and others that are not; more was claimed since."""
    source = RedisSource(redis_server.url, orphaned, "group", fields=["n"], claim_idle="10ms")
    first = source.open(Member("job", 0, 1), {}, stored=True)
    stored = first.fetch(4, 0.05)
    assert stored is not None
    assert numbers([stored]) == [0, 1, 2, 3]
    first.fetch(4, 0.05)
    first.close()
    put(redis_server, orphaned, 20, 23)
    give(redis_server, orphaned, "worker-8", 10)
    second = source.open(Member("job", 0, 1), {stored.of: stored.position}, stored=True)
    found = read_all(second, 19)
    assert sorted(numbers(found)) == list(range(4, 23))
    second.acknowledge([each.receipt for each in found])
    assert pending(redis_server, orphaned) == 0
    second.close()


def test_own_entries_that_wait_for_long_are_not_claimed(redis_server: Any, orphaned: str) -> None:
    source = RedisSource(redis_server.url, orphaned, "group", fields=["n"], claim_idle="10ms")
    slow = source.open(Member("job", 0, 2), {}, stored=True)
    held = read_all(slow, 20)
    other = source.open(Member("job", 1, 2), {}, stored=True)
    assert other.fetch(30, 0.05) is None
    slow.acknowledge([each.receipt for each in held])
    assert pending(redis_server, orphaned) == 0
    slow.close()
    other.close()


@pytest.mark.parametrize("entries", [0, 2])
def test_a_stream_that_ends_before_what_was_read_is_an_error(
    redis_server: Any, stream: str, entries: int
) -> None:
    source = RedisSource(redis_server.url, stream, "group", fields=["n"])
    put(redis_server, stream, 0, 20)
    reader = source.open(Member("job", 0, 1), {}, stored=True)
    position = read_all(reader, 20)[-1].position
    reader.close()
    with redis_server.client() as client:
        client.delete(stream)
        for number in range(1, entries + 1):
            client.xadd(stream, {"n": "0"}, id=f"{number}-0")
    with pytest.raises(SourceChangedError, match=rf"it ends at entry {entries}-0, and was read up to \d+-\d"):
        source.open(Member("job", 0, 1), {0: position}, stored=True).fetch(1, 0.0)
