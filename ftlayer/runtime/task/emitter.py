"""Output rows of a subtask become batches on its channels, with RecordIds of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.common.clock import Now
from ftlayer.common.rules.histogram import Histogram
from ftlayer.errors import CodecError
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import I32Array, I64Array, U64Array
from ftlayer.runtime.handler import Children, Handler, RecordIds, XorHandler
from ftlayer.runtime.protocol.messages import Batch, EndOfStream, Idle, LatencyMarker, Splits, Watermark
from ftlayer.runtime.task.actions import Acknowledge, Action, FailRoots, Send
from ftlayer.runtime.task.routes import OutEdge, Routes, StoredRouting, ask, asked, taken
from ftlayer.topology.job_graph import JobGraph, rules_of_operator
from ftlayer.topology.operators import Replay
from ftlayer.vertex.calls import EventIds, Failure


@fast_dataclass
class Emission:
    """The result of an `Emitter`.

    Attributes:
        sends: the batches.
        owed: uint64[m] aligned with the anchors' roots, the XOR of all copies' ids under each; empty when off.
        failures: records that are not in ``sends``, because a partitioner function raised.
    """

    sends: list[Send]
    owed: U64Array
    failures: tuple[RowFailure, ...] = ()


@fast_dataclass
class PairEmission:
    """As `Emission`, for the anchors of both sides. What both sides' roots have in common the left one owes."""

    sends: list[Send]
    owed_left: U64Array
    owed_right: U64Array


@fast_dataclass
class RootEmission:
    """The content of a `Persist`, and the batches to send once it is accepted.

    Attributes:
        sends: the batches.
        values: uint64[n], the XOR of all copies' ids of each row; None where each has one copy, with its root as id;
            empty when off.
        key_hashes: int32[n, k], what the replay twins of the edges need; None where none needs anything.
        ids: for a vertex with the exact tracker.
        failures: rows that are not in ``sends``, because a partitioner function raised: to be failed once they are
            accepted. Where a channel would be stored with them is `REFUSED`.
    """

    sends: list[Send]
    values: U64Array | None
    key_hashes: I32Array | None
    ids: EventIds | None
    failures: tuple[RowFailure, ...] = ()


class Emitter:
    """Emits what one subtask of a chain puts out.

    Nothing is kept of what was emitted but counts. Batches of no rows are not sent.

    Attributes:
        asks: whether a user's function says where rows go.
    """

    def __init__(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> None:
        """``uid`` is the emitting chain's; ``handler`` that of this subtask."""
        self._handler = handler
        self._edges = tuple(OutEdge(graph, edge, subtask) for edge in graph.edges_from(uid))
        self._by_tag: dict[str, tuple[OutEdge, ...]] = {}
        for out in self._edges:
            self._by_tag[out.edge.tag] = (*self._by_tag.get(out.edge.tag, ()), out)
        # The outputs with one copy of each row: an edge to several channels selects one of them, or copies.
        self._once = {tag for tag, outs in self._by_tag.items() if len(outs) == 1 and outs[0].copies_once}
        self.asks = any(asked(outs) for outs in self._by_tag.values())
        self._asked = {tag: edges for tag, outs in self._by_tag.items() if (edges := asked(outs))}
        last = graph.vertex(uid).operators[-1]
        self._operator = last.uid
        self._rules = rules_of_operator(last)
        self._stored_routing = StoredRouting(graph, last) if isinstance(last, Replay) else None
        self._markers = 0

    def ask(self, tag: str, payload: pa.RecordBatch) -> Routes | None:
        """Ask the user's partitioner functions where rows of an output go; None if there is none to be asked.

        `derived` and `pairs` take the answer, without the rows that fail. They ask by themselves without it, and raise
        what a function raises.
        """
        edges = self._asked.get(tag)
        return (
            None
            if edges is None or not payload.num_rows
            else ask(edges, self._operator, payload, self._rules)
        )

    def derived(
        self,
        tag: str,
        payload: pa.RecordBatch,
        anchors: RecordIds | None,
        parents: I64Array,
        times: I64Array | None = None,
        routes: Routes | None = None,
        *,
        only: bool = False,
    ) -> Emission:
        """Emit rows that derive from records of one batch.

        Args:
            tag: the side output, "" for the main one; one without edges sends nothing.
            payload: k rows.
            anchors: of the batch being processed, None when off. Calls in a row with this very object are one
                invocation: pass the element's own lineage, not a copy of it.
            parents: int64[k], the record of ``anchors`` that each row derives from, in any order.
            times: int64[k], or None.
            routes: what `ask` has given for them.
            only: nothing else is emitted from records of ``anchors``, before or after.

        Raises:
            ConfigError: a custom partitioner returned no channel of its edge.
        """
        children = self._handler.anchor.derive(anchors, parents, tag, once=only and tag in self._once)
        return Emission(self._send(tag, payload, children, times, routes), children.owed)

    def pairs(
        self,
        payload: pa.RecordBatch,
        left: RecordIds | None,
        left_rows: I64Array,
        right: RecordIds | None,
        right_rows: I64Array,
        times: I64Array | None = None,
        routes: Routes | None = None,
    ) -> PairEmission:
        """Emit rows that derive from two records each, neither of them acknowledged yet, to the main output.

        Row i comes from record ``left_rows[i]`` of ``left`` and ``right_rows[i]`` of ``right`` (int64[k]).
        Raises as `derived`.
        """
        children = self._handler.anchor.pair(left, left_rows, right, right_rows)
        sends = self._send("", payload, children, times, routes)
        return PairEmission(sends, children.owed_left, children.owed_right)

    def roots(
        self,
        payload: pa.RecordBatch,
        roots: U64Array | None,
        times: I64Array | None = None,
        tag: str = "",
        split: int | None = None,
        routes: Routes | None = None,
    ) -> RootEmission:
        """Make the batches of rows that are new roots (uint64[n], None when off), of this ``split`` of a source.

        ``routes`` is what `ask` has given for them. With fault tolerance off: raises `JobError` for what a partitioner
        function raises.
        """
        anchor = self._handler.anchor
        routes = self.ask(tag, payload) if routes is None and self.asks else routes
        failures = () if routes is None else routes.failures
        if failures and roots is None:
            self._handler.xor.fail(None, failures)
        children = anchor.of_roots(roots, payload.num_rows, once=tag in self._once)
        columns: dict[int, I32Array] = {}
        sends: list[Send] = []
        for out in self._by_tag.get(tag, ()):
            column = out.edge.routing
            if column is None:
                selection = out.select(payload, children)
            else:
                if column not in columns:
                    chosen = None if routes is None else routes.selections.get(out.edge.number)
                    columns[column] = out.routing(payload, children) if chosen is None else chosen
                # By the twin: the original goes where its replay will, and the key is hashed once.
                selection = out.select_stored(children, columns[column])
            if payload.num_rows:
                made = out.send(payload, children, times, selection)
                sends.extend(_of_split(made, split) if out.is_timed and split is not None else made)
        key_hashes = np.stack([columns[column] for column in sorted(columns)], axis=1) if columns else None
        if failures and roots is not None:
            # They owe copies like all others, which are never to be acknowledged.
            sends = _without(sends, roots[[failure.row for failure in failures]])
        values = None if children.owed is roots and roots is not None else children.owed
        return RootEmission(sends, values, key_hashes, anchor.event_ids(roots), failures)

    def unsent(self, roots: U64Array) -> RootEmission:
        """Make no batches of new roots: each owes a copy that is never acknowledged."""
        self._handler.anchor.of_roots(roots, len(roots), once=True)
        return RootEmission([], None, None, self._handler.anchor.event_ids(roots))

    def replayed(
        self,
        payload: pa.RecordBatch,
        anchors: RecordIds | None,
        key_hashes: I32Array | None,
        *,
        edited: bool = False,
    ) -> Emission:
        """Emit stored rows, each from the record of ``anchors`` beside it, where the replay twins say.

        ``key_hashes`` are int32[n] or int32[n, k], as they were stored. For a `Replay`'s edges alone. A partitioner
        function that raised when a record came from its source is asked again; ``edited`` records, whose payload is
        not the one that was stored first, go where their keys belong now.
        Raises `CodecError` if an edge's routing values were not stored.
        """
        failures: tuple[RowFailure, ...] = ()
        if self._stored_routing is not None:
            key_hashes, failures = self._stored_routing.now(payload, key_hashes, edited=edited)
        rows = np.arange(payload.num_rows, dtype=np.int64)
        once = len(self._edges) == 1 and self._edges[0].copies_once
        children = self._handler.anchor.derive(anchors, rows, once=once)
        sends: list[Send] = []
        for out in self._edges:
            column = out.edge.routing
            routing = None if column is None else _column(key_hashes, column)
            selection = out.select_stored(children, routing)
            if payload.num_rows:
                sends.extend(out.send(payload, children, None, selection))
        if failures and anchors is not None:
            sends = _without(sends, anchors.roots[[failure.row for failure in failures]])
        return Emission(sends, children.owed, failures)

    def reads(self, tag: str) -> bool:
        return tag in self._by_tag

    def mark(self, element: Watermark | Idle | EndOfStream) -> list[Send]:
        return [Send(channel, element) for out in self._edges for channel in out.channels]

    def splits(self, splits: Splits) -> list[Send]:
        """Say which splits a source reads, where watermarks are made of its records."""
        return [Send(channel, splits) for out in self._edges if out.is_timed for channel in out.channels]

    def marker(self, marker: LatencyMarker) -> list[Send]:
        """Send a latency marker by one channel of each edge, in turn; none goes round a loop."""
        self._markers += 1
        onward = (out.channels for out in self._edges if not out.edge.feedback)
        return [Send(channels[self._markers % len(channels)], marker) for channels in onward]

    def _send(
        self,
        tag: str,
        payload: pa.RecordBatch,
        children: Children,
        times: I64Array | None,
        routes: Routes | None,
    ) -> list[Send]:
        if not payload.num_rows:
            return []
        sends: list[Send] = []
        for out in self._by_tag.get(tag, ()):
            chosen = None if routes is None else routes.selections.get(out.edge.number)
            selection = out.select(payload, children) if chosen is None else chosen
            sends.extend(out.send(payload, children, times, selection))
        return sends


def _without(sends: list[Send], roots: U64Array) -> list[Send]:
    """Leave out the rows of some roots. Rows of one root each, that is."""
    kept: list[Send] = []
    for send in sends:
        batch = send.element
        assert isinstance(batch, Batch)
        assert batch.lineage is not None
        rows = np.flatnonzero(~np.isin(batch.lineage.roots, roots))
        if len(rows):
            kept.append(send if len(rows) == batch.num_rows else Send(send.channel, taken(batch, rows)))
    return kept


def _of_split(sends: Iterable[Send], split: int) -> Iterator[Send]:
    for send in sends:
        assert isinstance(send.element, Batch)
        yield Send(send.channel, replace(send.element, split=split))


def columns_of(key_hashes: I32Array) -> int:
    """Return how many numbers were stored with each record: int32[n] has one, int32[n, k] has k."""
    return 1 if key_hashes.ndim == 1 else int(key_hashes.shape[1])


def _column(key_hashes: I32Array | None, column: int) -> I32Array | None:
    if key_hashes is None:
        return None
    if column >= columns_of(key_hashes):
        raise CodecError(
            f"an edge is replayed by number {column} of those stored with a record, which has "
            f"{columns_of(key_hashes)}"
        )
    return key_hashes if key_hashes.ndim == 1 else np.ascontiguousarray(key_hashes[:, column])


# End-to-end latency: sources send markers behind their batches, and sinks see how long these took.
#
# A marker goes where records go and waits where they wait, so its age at a sink is that of the records before it. It is
# one frame a second for each source's subtask, whatever the rate of records; no record and no batch carries a time.


def reports(xor: XorHandler) -> list[Action]:
    """Take what failed and what was settled since the last call; failures first, so that no root of theirs is open."""
    actions: list[Action] = []
    failures = xor.failures()
    if failures:
        actions.append(FailRoots(failures))
    events = xor.events()
    if events is not None:
        actions.append(Acknowledge(events.roots, events.values, events.ids))
    return actions


def failures_of(roots: U64Array, failures: Iterable[RowFailure]) -> tuple[Failure, ...]:
    """Return failures of new roots; ``row`` counts in ``roots``."""
    return tuple(Failure.of(int(roots[failure.row]), failure) for failure in failures)


EVERY_MS = 1_000
"""A subtask of a source sends one marker in so long, at most."""


class SourceMarkers:
    """Says when a source's subtask sends a marker: behind a batch alone, so that what rests goes on resting."""

    def __init__(self, emitter: Emitter, uid: str) -> None:
        """``uid`` is the source's; ``emitter`` is that of its subtask."""
        self._emitter = emitter
        self._uid = uid
        self._next_ms: int | None = None

    def behind(self, rows: int, now: Now, root: int = 0) -> list[Send]:
        """Return what is to be sent behind the batches of so many rows that were read now; ``root`` is one of them."""
        if not rows or (self._next_ms is not None and now.mono_ms < self._next_ms):
            return []
        self._next_ms = now.mono_ms + EVERY_MS
        return self._emitter.marker(LatencyMarker(self._uid, now.wall_ms, root))


class SinkLatencies:
    """How old the records of each source are when a sink is done with them.

    Attributes:
        histograms: by source. Another thread may look.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self._waiting: deque[tuple[int, LatencyMarker]] = (
            deque()
        )  # with how many rows have to be settled first

    def came(self, marker: LatencyMarker, now: Now, *, given: int = 0, settled: int = 0) -> None:
        """Take a marker; the sink was given so many rows before it, and has settled some of them."""
        if given > settled:
            self._waiting.append((given, marker))
        else:
            self._observe(marker, now)

    def look(self, settled: int, now: Now) -> None:
        """Observe markers all of whose rows the sink has settled before ``now``."""
        while self._waiting and self._waiting[0][0] <= settled:
            self._observe(self._waiting.popleft()[1], now)

    def is_due(self, settled: int) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= settled

    def _observe(self, marker: LatencyMarker, now: Now) -> None:
        # A new dict: another thread may go through the old one.
        if marker.source not in self.histograms:
            self.histograms = {**self.histograms, marker.source: Histogram()}
        seconds = (now.wall_ms - marker.wall_ms) / 1_000
        self.histograms[marker.source].observe(seconds, root=marker.root, at_ms=now.wall_ms)
