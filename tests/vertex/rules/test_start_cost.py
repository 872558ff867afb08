"""What a start reads of a store: an outage must not last the longer the more records wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from ftlayer.vertex.store import memory
from ftlayer.vertex.store.dead_index import FailedTable

STREAMS = ("shop/clicks", "shop/orders", "shop/returns")


class Reads(memory._Read):
    """A view that notes the tables whose values are read, and counts the keys that are."""

    tables: ClassVar[set[str]] = set()
    keys_read = 0

    def get(self, table: str, key: bytes) -> bytes | None:
        Reads.tables.add(table)
        return super().get(table, key)

    def _keys(self, *arguments: Any) -> Iterator[bytes]:
        for key in super()._keys(*arguments):
            Reads.keys_read += 1
            yield key


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> type[Reads]:
    Reads.tables, Reads.keys_read = set(), 0
    monkeypatch.setattr(memory, "_Read", Reads)
    return Reads


def fill(vertex: Any, stream: str, first: int, rows: int) -> None:
    """One half of the records waits, the other is dead."""
    roots = list(range(first, first + rows))
    vertex.open(stream, backoff_ms=(60_000,), max_pending=100_000)
    vertex.persist(roots, stream=stream)
    vertex.fail(*roots[::2])
    vertex.fail(*roots[1::2], fatal=True)
    vertex.advance(1_000, ticks=3)


def test_a_start_reads_no_record_that_waits_or_is_dead(vertex: Any, reads: type[Reads]) -> None:
    for number, stream in enumerate(STREAMS):
        fill(vertex, stream, 1 + 1_000 * number, 20 * (number + 1))
    reads.tables.clear()
    vertex.restart()
    assert not reads.tables & set(FailedTable)
    for number, stream in enumerate(STREAMS):
        assert len(vertex.list("waiting", stream)) == len(vertex.list("dead", stream)) == 10 * (number + 1)
    assert vertex.stats()["waiting"] == 60


def test_the_keys_of_one_stream_alone_are_not_even_counted(vertex: Any, reads: type[Reads]) -> None:
    counted = []
    for first in (1, 1_001):
        fill(vertex, "shop/orders", first, 200)
        reads.keys_read = 0
        vertex.restart()
        counted.append(reads.keys_read)
    assert counted[0] == counted[1] < 40
