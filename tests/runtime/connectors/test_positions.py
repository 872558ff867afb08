from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.runtime.connectors.offset_reader import (
    PositionChain,
    SplitPosition,
    pack_rows,
    partition_key,
    progress_of,
    unpack_rows,
    unpack_split,
)
from ftlayer.runtime.protocol.messages import ReaderRange


@given(st.integers(0, 2**63))
def test_rows_round_trip(rows: int) -> None:
    assert unpack_rows("s", {"p0": pack_rows(rows)}, 0, 0) == rows


@given(
    st.builds(
        SplitPosition,
        range=st.builds(
            ReaderRange,
            number=st.integers(0, 2**40),
            start=st.text(),
            end=st.text(),
            splits=st.integers(1, 1000),
            digest=st.binary(max_size=32),
            places=st.binary(max_size=32),
        ),
        rows=st.integers(0, 2**60),
        done=st.booleans(),
    )
)
def test_split_positions_round_trip(position: SplitPosition) -> None:
    assert unpack_split("s", position.pack()) == position


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x93\x01", pack_rows(3), b"\xff"])
def test_a_position_of_another_kind_of_source_is_refused(packed: bytes) -> None:
    with pytest.raises(ConfigError, match=r"'clicks'.*uid of its own"):
        unpack_split("clicks", packed)


def test_a_readers_position_is_none_of_an_iterable() -> None:
    position = SplitPosition(ReaderRange(1, "0", "1", 1, b""), 0, True).pack()
    for packed in (position, b"\xc3", b"\xff", pack_rows(3) + b"x", pack_rows(-1), b"\x92\xc3\x01"):
        with pytest.raises(ConfigError, match="'clicks'"):
            unpack_rows("clicks", {"p0": packed}, 0, 0)


def test_nothing_was_ever_read() -> None:
    assert progress_of("s", {}) == ()


# A run of the model: ranges of splits of rows, each row of which is persisted alone. A crash keeps a prefix of
# each partition's calls (partitions are read by different slots); then the source goes on as `progress_of` says.


class Reading:
    """Reads the source's ranges from what the vertex has, one row a call."""

    def __init__(self, ranges: list[list[int]], positions: dict[str, bytes], digests: list[bytes]) -> None:
        self.ranges = ranges
        self.positions = dict(positions)
        self.digests = digests

    def calls(self) -> tuple[list[tuple[int, int, int]], list[list[tuple[Any, tuple[int, int, int] | None]]]]:
        """Return the rows that are read twice, and for each split the calls still to make in the open range."""
        ranges = progress_of("s", self.positions)
        progress = ranges[-1] if ranges else None
        again: list[tuple[int, int, int]] = []
        if progress is None:
            number, place, rows, done = 1, 0, None, None
        elif progress.complete:
            number, place, rows, done = progress.range.number + 1, int(progress.range.end), None, None
        else:
            before, rows, done = progress.range, progress.rows, progress.done
            number, place = before.number, int(before.start)
            if self.digests[place] != before.digest:
                number += 1
                again = [(place, split, row) for split, upto in enumerate(rows) for row in range(upto)]
                rows = done = None
        if place == len(self.ranges):
            return again, []
        chain = PositionChain(self.positions)
        sizes = self.ranges[place]
        lists = []
        for split, size in enumerate(sizes):
            if done is not None and done[split]:
                continue
            begin = 0 if rows is None else rows[split]
            calls: list[tuple[Any, tuple[int, int, int] | None]] = []
            for row in range(begin, size + 1):
                planned = ReaderRange(number, str(place), str(place + 1), len(sizes), self.digests[place])
                end = SplitPosition(planned, min(row + 1, size), row == size)
                record = (place, split, row) if row < size else None
                calls.append((chain.advance(partition_key(split), end.pack()), record))
            lists.append(calls)
        return again, lists


@given(st.data(), st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=4), st.booleans())
def test_every_row_is_accepted_once_whatever_is_lost(
    data: st.DataObject, ranges: list[list[int]], stable: bool
) -> None:
    positions: dict[str, bytes] = {}
    accepted: list[tuple[int, int, int]] = []
    repeated = 0
    for attempt in range(200):
        digests = [b"same" if stable or attempt > 4 else bytes([attempt]) for _ in ranges]
        again, lists = Reading(ranges, positions, digests).calls()
        if not lists:
            break
        crash = data.draw(st.booleans()) if attempt < 12 else False
        for calls in lists:
            kept = data.draw(st.integers(0, len(calls))) if crash else len(calls)
            if kept and again:
                repeated += len(again)
                again = []
            for position, record in calls[:kept]:
                assert positions.get(position.partition) == position.start
                positions[position.partition] = position.end
                if record is not None:
                    accepted.append(record)
    else:
        raise AssertionError("it does not come to an end")
    expected = [
        (r, s, row) for r, sizes in enumerate(ranges) for s, size in enumerate(sizes) for row in range(size)
    ]
    assert set(accepted) == set(expected)
    if stable:
        assert sorted(accepted) == expected
    else:
        assert len(accepted) <= len(expected) + repeated
