"""How much of a store a page of records reads: pages are taken between calls of the data path, which wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from ftlayer.vertex import calls
from ftlayer.vertex.store import streams as segments


@dataclass
class Reads:
    """What was read of segments: whole payloads, and rows that were taken out of them."""

    payloads: int = 0
    rows: list[int] = field(default_factory=list)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    counted = Reads()
    take_rows = segments.take_rows

    def counting(payload: Any, rows: Any) -> Any:
        counted.payloads += 1
        counted.rows.append(len(rows))
        return take_rows(payload, rows)

    monkeypatch.setattr(segments, "take_rows", counting)
    return counted


def page(vertex: Any, reads: Reads, state: str, after: bytes = b"", limit: int = 10) -> Any:
    """Return a page, with nothing counted but what it has read."""
    reads.payloads, reads.rows = 0, []
    return vertex.call(calls.ListRecords(state, "", limit, after))


def test_a_page_of_pending_records_takes_its_own_rows_alone(vertex: Any, reads: Reads) -> None:
    vertex.open(max_pending=100_000)
    vertex.persist(list(range(1, 5_001)))
    vertex.persist(list(range(5_001, 5_006)))
    after, seen = b"", []
    for _ in range(3):
        found = page(vertex, reads, "pending", after)
        seen += [record.root for record in found.records]
        assert reads.rows == [11]
        after = found.more
    assert seen == list(range(1, 31))


def test_pages_of_any_size_are_the_whole_listing(vertex: Any, reads: Reads) -> None:
    vertex.open()
    for first in (1, 8, 15):
        vertex.persist(list(range(first, first + 7)))
    vertex.xor((3, 3), (9, 9), (15, 15))
    left = [root for root in range(1, 22) if root not in (3, 9, 15)]
    for limit in range(1, 20):
        after, seen = b"", []
        while not seen or after:
            found = page(vertex, reads, "pending", after, limit)
            assert max(reads.rows) <= limit + 1
            seen += [record.root for record in found.records]
            after = found.more
        assert seen == left


def test_a_page_is_bounded_whatever_is_asked_for(vertex: Any, reads: Reads) -> None:
    vertex.open(max_pending=100_000)
    vertex.persist(list(range(1, 5_001)))
    after, sizes = b"", []
    while not sizes or after:
        found = page(vertex, reads, "pending", after, calls.MAX_PAGE)
        assert max(reads.rows) <= calls.MAX_EXAMINED + 1
        sizes.append(len(found.records))
        after = found.more
    assert sizes == [calls.MAX_EXAMINED, calls.MAX_EXAMINED, 1_000]


def test_segments_with_nothing_in_that_state_are_not_read(vertex: Any, reads: Reads) -> None:
    vertex.open()
    for first in range(1, 41, 4):
        vertex.persist(list(range(first, first + 4)))
    assert page(vertex, reads, "waiting").records == ()
    assert reads.payloads == 0
    vertex.restart()
    # All of it is due now, and nothing of it pending.
    assert page(vertex, reads, "pending").records == ()
    assert reads.payloads == 0
    found = page(vertex, reads, "waiting")
    assert [record.root for record in found.records] == list(range(1, 11))
    assert reads.payloads == 3
    behind = page(vertex, reads, "waiting", found.more)
    assert [record.root for record in behind.records] == list(range(11, 21))
    assert reads.payloads == 3


def test_a_page_of_the_delivery_log_takes_its_own_rows_alone(vertex: Any, reads: Reads, kit: Any) -> None:
    vertex.call(calls.OpenQuery("q", "run", ("ingest/clicks",)))
    for first in (0, 500):
        vertex.call(calls.Ingest("ingest/clicks", kit.payload([f"row {first + row}" for row in range(500)])))
    after, seen = b"", []
    while not seen or after:
        found = page(vertex, reads, "delivery", after, 300)
        assert max(reads.rows) <= 301
        seen += [record.payload.column(0)[0].as_py() for record in found.records]
        after = found.more
    assert seen == [f"row {row}" for row in range(1_000)]
