"""Output rows of a subtask become batches on its channels, with RecordIds of their own."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from ftlayer.handler.handler import Handler
from ftlayer.handler.lineage import Lineage
from ftlayer.layer.calls import EventIds
from ftlayer.records.ids import I32Array, I64Array, U64Array
from ftlayer.runtime.actions import Send
from ftlayer.runtime.elements import Batch, EndOfStream, Idle, Watermark
from ftlayer.stream.job_graph import JobGraph


@dataclass(frozen=True, slots=True)
class Emission:
    """``owed``: uint64[m] aligned with the anchors' roots, the XOR of all copies' ids under each; empty when off."""

    sends: list[Send]
    owed: U64Array


@dataclass(frozen=True, slots=True)
class PairEmission:
    """As `Emission`, for the anchors of both sides. What both sides' roots have in common the left one owes."""

    sends: list[Send]
    owed_left: U64Array
    owed_right: U64Array


@dataclass(frozen=True, slots=True)
class RootEmission:
    """What goes into `Persist`, and the batches to send once it is accepted.

    Attributes:
        sends: the batches.
        values: uint64[n], the XOR of all copies' ids of each row; empty when off.
        key_hashes: int32[n, k], what the replay twins of the edges need; None where none needs anything.
        ids: for a vertex with the exact tracker.
    """

    sends: list[Send]
    values: U64Array
    key_hashes: I32Array | None
    ids: EventIds | None


class Emitter:
    """Emits what one subtask of a chain puts out.

    Nothing is kept of what was emitted but counts. Batches of no rows are not sent.
    """

    def __init__(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> None:
        """``uid`` is the emitting chain's; ``handler`` that of this subtask."""
        raise NotImplementedError

    def derived(
        self,
        tag: str,
        payload: pa.RecordBatch,
        anchors: Lineage | None,
        parents: I64Array,
        times: I64Array | None = None,
    ) -> Emission:
        """Emit rows that derive from records of one batch.

        Args:
            tag: the side output, "" for the main one; one without edges sends nothing.
            payload: k rows.
            anchors: of the batch being processed, None when off. Calls in a row with this very object are one
                invocation: pass the element's own lineage, not a copy of it.
            parents: int64[k], the record of ``anchors`` that each row derives from, in any order.
            times: int64[k], or None.

        Raises:
            ConfigError: a custom partitioner returned no channel of its edge.
        """
        raise NotImplementedError

    def pairs(
        self,
        payload: pa.RecordBatch,
        left: Lineage | None,
        left_rows: I64Array,
        right: Lineage | None,
        right_rows: I64Array,
        times: I64Array | None = None,
    ) -> PairEmission:
        """Emit rows that derive from two records each, neither of them acknowledged yet, to the main output.

        Row i comes from record ``left_rows[i]`` of ``left`` and ``right_rows[i]`` of ``right`` (int64[k]).
        Raises as `derived`.
        """
        raise NotImplementedError

    def roots(
        self, payload: pa.RecordBatch, roots: U64Array | None, times: I64Array | None = None, tag: str = ""
    ) -> RootEmission:
        """Make the batches of rows that are new roots (uint64[n], None when off). Raises as `derived`."""
        raise NotImplementedError

    def replayed(
        self, payload: pa.RecordBatch, anchors: Lineage | None, key_hashes: I32Array | None
    ) -> Emission:
        """Emit stored rows, each from the record of ``anchors`` beside it, where the replay twins say.

        ``key_hashes`` are int32[n] or int32[n, k], as they were stored. For a `Replay`'s edges alone.
        Raises `CodecError` if an edge's routing values were not stored.
        """
        raise NotImplementedError

    def mark(self, element: Watermark | Idle | EndOfStream) -> list[Send]:
        """Send a mark to all channels of all edges."""
        raise NotImplementedError
