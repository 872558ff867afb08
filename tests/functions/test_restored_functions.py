"""Windows and joins that go on from a snapshot, which is written while they go on: as if nothing had happened."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Piece, Scope, SubtaskRestore
from ftlayer.functions.chains.topology import MAIN, TopologyChain
from ftlayer.functions.process import LAST_WATERMARK_MS
from ftlayer.functions.steps import Process
from ftlayer.functions.windows import (
    Aggregated,
    Collected,
    Content,
    Fixed,
    Reduced,
    Session,
    Window,
    WindowKind,
    window_function,
)
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import LayeredBackend, open_backend
from ftlayer.topology.job_graph_generator import as_co_process
from ftlayer.topology.operators import Join

RECORD = pa.schema([("k", pa.string()), ("t", pa.int64()), ("n", pa.int64())])
RESULT = pa.schema([("k", pa.string()), ("start", pa.int64()), ("value", pa.list_(pa.int64()))])
MIN_MS = -(2**63)

Operator = Any
Round = tuple[int, list[tuple[str, int]], int]
"""Input, keys and times of records, how far the watermark goes on after them."""


class Pieces:
    """Pieces of snapshots in a dict: what backends need of a storage and its writers."""

    location = ""

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}

    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE) -> Piece:
        data = b"".join(chunks)
        path = str(len(self.written))
        self.written[path] = data
        return Piece(hashlib.blake2b(data).digest(), len(data), None, path, 0, scope)

    def wasteful(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        return set()

    def sync(self) -> None:
        pass

    def open(self, location: str, piece: Piece) -> io.BytesIO:
        return io.BytesIO(self.written[piece.path])

    def fetch(self, location: str, piece: Piece, path: Path) -> None:
        path.write_bytes(self.written[piece.path])


class Run:
    """A chain of one operator with state that is taken into snapshots."""

    def __init__(
        self,
        operator: Operator,
        inputs: list[pa.Schema],
        pieces: Any,
        backend: Literal["heap", "lmdb"],
        restore: SubtaskRestore | None = None,
    ) -> None:
        keys = {operator.uid: pa.schema([RECORD.field("k")])}
        self.backend: LayeredBackend = open_backend(
            CheckpointConfig(backend=backend), BackendSpec(0, 8, 8, keys), restore, pieces, ""
        )
        self.chain = TopologyChain([operator], inputs, self.backend)
        self.chain.open()
        self.watermark_ms = MIN_MS

    def go(self, rounds: list[Round], first: int, *, end: bool = True) -> list[Any]:
        """Run rounds; return all that comes out, with times. ``first`` numbers the records."""
        out: list[Any] = []
        for side, records, step in rounds:
            keys = [key for key, _ in records]
            times = [time_ms for _, time_ms in records]
            columns = [keys, times, list(range(first, first + len(records)))]
            first += len(records)
            arrays = [pa.array(values, f.type) for values, f in zip(columns, RECORD, strict=True)]
            batch = pa.record_batch(arrays, schema=RECORD)
            ran = self.chain.run(batch, np.array(times, np.int64), self.watermark_ms, 0, input=side)
            assert not ran.failures
            out += [(row, int(time)) for row, time in self._rows(ran.outputs[MAIN], times)]
            out += self._fire()
            self.watermark_ms = max(self.watermark_ms, -50) + step
            out += self._fire()
        if end:
            self.watermark_ms = LAST_WATERMARK_MS
            out += self._fire()
        return out

    def _rows(self, output: Any, times: list[int]) -> list[Any]:
        mine = [times[parent] for parent in output.parents] if output.times is None else output.times
        return list(zip(map(str, output.batch.to_pylist()), mine, strict=True))

    def _fire(self) -> list[Any]:
        fired = self.chain.fire_event_timers(self.watermark_ms, 0).get(MAIN)
        if fired is None:
            return []
        return [
            (str(row), time) for row, time in zip(fired.batch.to_pylist(), fired.times.tolist(), strict=True)
        ]


def check(
    operator: Operator,
    inputs: list[pa.Schema],
    before: list[Round],
    meanwhile: list[Round],
    backend: Literal["heap", "lmdb"],
) -> tuple[list[Any], list[Any]]:
    """Return what comes out meanwhile, and what of a restored one whose watermark begins anew, as it does."""
    pieces: Any = Pieces()
    count = sum(len(records) for _, records, _ in before)
    run = Run(operator, inputs, pieces, backend)
    try:
        run.go(before, 0, end=False)
        watermark_ms = run.watermark_ms
        frozen = run.backend.freeze(Barrier(1, 0))
        undisturbed = run.go(meanwhile, count)
        written = frozen.write(pieces, lambda: False)
        frozen.release()
    finally:
        run.backend.close()
    assert written.keyed is not None
    restore = SubtaskRestore(operator.uid, 0, (written.keyed,))
    outs = []
    for begin_ms in (watermark_ms, MIN_MS):
        again = Run(operator, inputs, pieces, backend, restore)
        try:
            again.watermark_ms = begin_ms
            outs.append(again.go(meanwhile, count))
            assert again.backend.timers(operator.uid).event.count == 0
        finally:
            again.backend.close()
    assert outs[0] == undisturbed
    return undisturbed, outs[1]


def result(key: str, window: Window, content: Any) -> Any:
    return key, window.start_ms, content


CONTENTS: dict[str, Content] = {
    "reduced": Reduced(
        lambda one, other: (one[0], one[1], one[2] + other[2]),
        lambda key, window, row: result(key, window, [row[2]]),
    ),
    "aggregated in place": Aggregated(
        list, lambda numbers, row: numbers.append(row[2]) or numbers, lambda one, other: one + other, result
    ),
    "collected": Collected(lambda key, window, rows: [result(key, window, [row[2] for row in rows])]),
}
KINDS: dict[str, WindowKind] = {"tumbling": Fixed(10, 10), "sliding": Fixed(10, 4, 1), "session": Session(6)}

BACKENDS: list[Literal["heap", "lmdb"]] = ["heap", "lmdb"]


def rounds(inputs: int) -> st.SearchStrategy[list[Round]]:
    records = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-40, 20)), max_size=5)
    return st.lists(st.tuples(st.integers(0, inputs - 1), records, st.integers(0, 12)), max_size=5)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(
    rounds(1), rounds(1), st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(CONTENTS)), st.integers(0, 9)
)
def test_windows(
    backend: Literal["heap", "lmdb"],
    before: list[Round],
    meanwhile: list[Round],
    kind: str,
    content: str,
    lateness: int,
) -> None:
    function = window_function(KINDS[kind], CONTENTS[content], lateness)
    check(Process("w", function, RESULT, ("k",)), [RECORD], before, meanwhile, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(rounds(2), rounds(2), st.integers(-8, 8), st.integers(0, 12))
def test_joins(
    backend: Literal["heap", "lmdb"], before: list[Round], meanwhile: list[Round], lower: int, width: int
) -> None:
    schema = pa.schema([("left", pa.int64()), ("right", pa.int64())])
    join = Join(
        "j",
        lambda left, right: (left[2], right[2]),
        schema,
        (("k",), ("k",)),
        (RECORD, RECORD),
        lower,
        lower + width,
    )
    undisturbed, anew = check(as_co_process(join), [RECORD, RECORD], before, meanwhile, backend)
    # What was too late may be in time; nothing that was in time is missing.
    assert set(undisturbed) <= set(anew)
