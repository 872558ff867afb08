"""Partitioners and their replay twins. What the emitter makes of them: `tests/runtime/task/test_emitter.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import CodecError, ConfigError, InvalidTopologyError, UnsupportedError
from ftlayer.records.ids import I32Array, root_ids
from ftlayer.records.keyhash import spark_hash
from ftlayer.records.partitioning import (
    ALL_CHANNELS,
    Broadcast,
    Custom,
    Forward,
    Global,
    HashByKey,
    OutgoingRows,
    Partitioner,
    Rebalance,
    Shuffle,
    StoredRows,
    replay_twin,
    spread,
)
from ftlayer.records.traced import KeySelector


def kind(partitioner: Any) -> str:
    """Name a case the same in every process: a function's text has its address."""
    return type(partitioner).__name__


def by_length(key: str | None, channels: int) -> int:
    return len(key or "") % channels


def by_pair(key: tuple[Any, ...], channels: int) -> int:
    return (len(key[0] or "") + (key[1] or 0)) % channels


WORD = KeySelector(("word",))
DETERMINED: list[Partitioner] = [
    Forward(),
    HashByKey(WORD),
    HashByKey(KeySelector(("number", "word"))),
    Broadcast(),
    Global(),
    Custom(WORD, by_length),
    Custom(KeySelector(("word", "number")), by_pair),
]
FREE: list[Partitioner] = [Rebalance(), Rebalance(start=5), Shuffle(), Shuffle(seed=2**64 - 1)]


def payload(words: list[str | None]) -> pa.RecordBatch:
    numbers = [i if i % 3 else None for i in range(len(words))]
    return pa.record_batch([pa.array(words, pa.string()), pa.array(numbers, pa.int64())], ["word", "number"])


def outgoing(words: list[str | None], subtask: int = 0, first_ordinal: int = 0) -> OutgoingRows:
    roots = root_ids(b"0123456789abcdef", first_ordinal, len(words))
    return OutgoingRows(payload(words), roots, subtask, first_ordinal)


def replayed(rows: OutgoingRows, routing: I32Array | None) -> StoredRows:
    """The vertex gives replays new roots, and has of the rows what was stored with them."""
    return StoredRows(root_ids(b"fedcba9876543210", 0, len(rows.record_ids)), routing)


words = st.lists(st.none() | st.text(max_size=6), max_size=20)
channel_counts = st.integers(1, 12)


@given(words, channel_counts, st.sampled_from(DETERMINED), st.data())
def test_a_twin_takes_the_channel_the_original_took(
    values: list[str | None], channels: int, partitioner: Partitioner, data: st.DataObject
) -> None:
    rows = outgoing(values, subtask=data.draw(st.integers(0, channels - 1)))
    first = partitioner.select(rows, channels)
    stored = replayed(rows, partitioner.routing(rows, channels))
    again = replay_twin(partitioner).select(stored, channels)
    assert (again.dtype, again.tolist()) == (np.int32, first.tolist())


@given(words, channel_counts, st.sampled_from(FREE), st.integers(0, 20))
def test_a_twin_of_the_others_takes_a_channel_that_exists(
    values: list[str | None], channels: int, partitioner: Partitioner, subtask: int
) -> None:
    rows = outgoing(values, subtask)
    assert partitioner.routing(rows, channels) is None
    twin, stored = replay_twin(partitioner), replayed(rows, None)
    selected = twin.select(stored, channels)
    assert (selected.dtype, selected.shape) == (np.int32, (len(values),))
    assert all(0 <= channel < channels for channel in selected)
    assert twin.select(stored, channels).tolist() == selected.tolist()


@given(words, channel_counts, channel_counts, st.sampled_from([*DETERMINED, *FREE]))
def test_a_twin_copes_with_another_parallelism(
    values: list[str | None], before: int, after: int, partitioner: Partitioner
) -> None:
    rows = outgoing(values)
    stored = replayed(rows, partitioner.routing(rows, before))
    selected = replay_twin(partitioner).select(stored, after)
    assert all(channel == ALL_CHANNELS or 0 <= channel < after for channel in selected)
    if isinstance(partitioner, HashByKey):
        assert selected.tolist() == partitioner.select(rows, after).tolist()


@given(words, st.integers(0, 20), channel_counts, st.sampled_from([*DETERMINED, *FREE]))
def test_a_selection_does_not_depend_on_how_rows_are_batched(
    values: list[str | None], cut: int, channels: int, partitioner: Partitioner
) -> None:
    """A re-executed task may cut its batches elsewhere."""
    rows = outgoing(values)
    whole = partitioner.select(rows, channels).tolist()
    parts: list[int] = []
    for start, stop in ((0, cut), (cut, len(values))):
        part = OutgoingRows(
            rows.payload.slice(min(start, len(values)), max(stop - start, 0)),
            rows.record_ids[start:stop],
            first_ordinal=start,
        )
        parts += partitioner.select(part, channels).tolist()
    assert parts == whole


@given(words, channel_counts)
def test_hash_by_key_is_the_remainder_of_sparks_hash(values: list[str | None], channels: int) -> None:
    hashes = spark_hash([pa.array(values, pa.string())])
    selected = HashByKey(WORD).select(outgoing(values), channels)
    assert selected.tolist() == [h % channels for h in hashes.tolist()]


@given(st.integers(0, 30), channel_counts, st.integers(0, 100), st.integers(0, 9), st.integers(0, 9))
def test_rebalance_takes_turns(n: int, channels: int, first: int, subtask: int, start: int) -> None:
    rows = outgoing(["w"] * n, subtask, first)
    expected = [(start + subtask + first + i) % channels for i in range(n)]
    assert Rebalance(start).select(rows, channels).tolist() == expected


@pytest.mark.parametrize("channels", [2, 7, 64])
def test_shuffle_spreads_evenly_and_seeds_differ(channels: int) -> None:
    record_ids = root_ids(b"0123456789abcdef", 0, 100_000)
    for seed in (0, 1, 2**63):
        counts = np.bincount(spread(record_ids, channels, seed), minlength=channels)
        deviation = np.abs(counts / (100_000 / channels) - 1).max()
        assert deviation < 0.15
    assert (spread(record_ids, channels, 0) != spread(record_ids, channels, 1)).mean() > 0.3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("partitioner", [*DETERMINED, *FREE], ids=kind)
def test_an_edge_without_channels_is_refused(partitioner: Partitioner) -> None:
    with pytest.raises(ConfigError, match="at least one channel"):
        partitioner.select(outgoing(["w"]), 0)
    with pytest.raises(ConfigError, match="at least one channel"):
        replay_twin(partitioner).select(StoredRows(outgoing(["w"]).record_ids), 0)


@pytest.mark.parametrize("channels", [1, 2])
def test_forward_needs_a_channel_for_each_sender(channels: int) -> None:
    with pytest.raises(InvalidTopologyError, match="subtask 2 cannot forward"):
        Forward().select(outgoing(["w"], subtask=2), channels)


@pytest.mark.parametrize("answer", [-1, 3, 1.5, None, "0"])
def test_what_a_custom_function_must_not_return(answer: Any) -> None:
    def function(key: str, channels: int) -> Any:
        return answer if key == "b" else 0

    with pytest.raises(ConfigError, match=r"returned .* for key 'b'; it must return an int in 0\.\.2"):
        Custom(WORD, function).select(outgoing(["a", "b"]), 3)


def test_a_custom_function_may_fail_in_its_own_way() -> None:
    def broken(key: Any, channels: int) -> int:
        raise LookupError(key)

    with pytest.raises(LookupError):
        Custom(WORD, broken).select(outgoing(["a"]), 3)


@pytest.mark.parametrize("partitioner", [Forward(), HashByKey(WORD), Custom(WORD, by_length)], ids=kind)
def test_records_stored_without_their_routing_are_refused(partitioner: Partitioner) -> None:
    with pytest.raises(CodecError, match="stored without"):
        replay_twin(partitioner).select(StoredRows(outgoing(["w"]).record_ids), 2)


def test_unknown_partitioners_and_impossible_seeds_are_refused() -> None:
    class Mine(Partitioner):
        pass

    with pytest.raises(UnsupportedError, match="Mine has no replay twin"):
        replay_twin(Mine())
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match="seed"):
            Shuffle(seed)
