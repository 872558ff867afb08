"""The verdict on a micro-batch: what failed, what was delivered, handed on: from its pages' heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from ftlayer.spark.stages.known import TriedRoots
from ftlayer.spark.stages.pages import CARRIER_DTYPE, U64, PageHead, ipc_to_rows, read_carriers, to_roots
from ftlayer.vertex.calls import I32, Failure, SealedRows


@dataclass
class Verdict:
    """The sum of the heads of a batch's pages.

    Attributes:
        rows_in: source rows of the batch, delivered ones included.
        rows_out: rows of the last stage, those of failed roots included.
        failures: one for each failed root, by root.
        delivered: the offsets [start, end) of the rows the vertex delivered, None if there were none.
        delivered_roots, delivered_origins, delivered_tries: their roots, origins and tries.
        without_rows: failed roots, sorted, of which the pages so far have no row.
        carriers: the carriers of rows resumed from another query (`CARRIER_DTYPE`).
        emitted_roots: roots with rows to hand on; may repeat.
        emitted_values: for each, the XOR of the ids of its rows in one page.
        emitted_parents, emitted_ids: the root and the id of each row to hand on, if the vertex keeps every id.
    """

    rows_in: int = 0
    rows_out: int = 0
    failures: dict[int, Failure] = field(default_factory=dict)
    failed_rows: dict[int, pa.RecordBatch] = field(default_factory=dict)
    delivered: tuple[int, int] | None = None
    delivered_roots: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    delivered_origins: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    delivered_tries: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    without_rows: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    carriers: np.ndarray[tuple[int], np.dtype[np.void]] = field(
        default_factory=lambda: np.zeros(0, CARRIER_DTYPE)
    )
    emitted_roots: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    emitted_values: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    emitted_parents: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))
    emitted_ids: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def tried(self) -> TriedRoots:
        """What later stages may be asked of the rows that the vertex delivered."""
        return TriedRoots.of(self.delivered_roots, self.delivered_origins, self.delivered_tries)

    @property
    def failed_roots(self) -> U64:
        return np.array(sorted(self.failures), np.uint64)

    @property
    def dropped_roots(self) -> U64:
        """The failed roots, sorted, that the last pages may have rows of: to be left out when these are read.

        Where rows fail in the first stage alone there are none, and pages are read as they are: comparing the roots of
        two million rows with 10,000 takes 0.3 s.
        """
        return np.setdiff1d(self.failed_roots, self.without_rows, assume_unique=True)

    def fail(self, failure: Failure) -> None:
        """Note a failure; the first one of a root stands."""
        self.failures.setdefault(failure.root, failure)


def first_stage_verdict(heads: Iterable[PageHead]) -> Verdict:
    """Add up the heads of the first stage: everything but what goes out at the end."""
    verdict = Verdict()
    delivered_roots: list[U64] = []
    origins: list[U64] = []
    tries: list[U64] = []
    carried: list[bytes] = []
    for head in heads:
        verdict.rows_in += head.rows_in
        add_failures(verdict, head)
        if head.delivered is not None:
            start, end = head.delivered
            known = verdict.delivered or head.delivered
            verdict.delivered = (min(start, known[0]), max(end, known[1]))
        delivered_roots.append(to_roots(head.delivered_roots))
        origins.append(to_roots(head.delivered_origins))
        tries.append(to_roots(head.delivered_tries))
        carried.append(head.carried)
    verdict.delivered_roots = _join(delivered_roots)
    verdict.delivered_origins, verdict.delivered_tries = _join(origins), _join(tries)
    verdict.carriers = read_carriers(b"".join(carried))
    return verdict


def add_failures(verdict: Verdict, head: PageHead) -> None:
    """Add a page's failures, with the source rows that came along."""
    rows = list(ipc_to_rows(head.failed_rows))
    whole = pa.concat_batches(rows) if rows else None
    for failed in head.failures:
        verdict.fail(
            Failure(
                failed.root,
                failed.reason,
                failed.operator,
                head.tracebacks[failed.traceback],
                failed.fatal,
                failed.after_ms,
                failed.uses_attempt,
                head.place,
            )
        )
        if failed.row >= 0 and whole is not None:
            verdict.failed_rows[failed.root] = whole.slice(failed.row, 1)


def add_last_stage(verdict: Verdict, heads: Iterable[PageHead]) -> None:
    """Add what goes out at the end: counts and the ids handed on."""
    roots: list[U64] = []
    values: list[U64] = []
    parents: list[U64] = []
    ids: list[U64] = []
    for head in heads:
        verdict.rows_out += head.rows_out
        roots.append(to_roots(head.emitted_roots))
        values.append(to_roots(head.emitted_values))
        parents.append(to_roots(head.emitted_parents))
        ids.append(to_roots(head.emitted_ids))
    verdict.emitted_roots = _join(roots)
    verdict.emitted_values = _join(values)
    verdict.emitted_parents = _join(parents)
    verdict.emitted_ids = _join(ids)


def lost_roots(sent: Iterable[PageHead], seen: Iterable[PageHead]) -> U64:
    """Return the roots that one stage sent and the next never saw: lost in the transform between them."""
    before = np.unique(_join([to_roots(head.sent_roots) for head in sent]))
    after = np.unique(_join([to_roots(head.seen_roots) for head in seen]))
    return np.setdiff1d(before, after, assume_unique=True)


def sealed_rows(
    stream: str,
    rows: Sequence[tuple[int, pa.RecordBatch]],
    failures: dict[int, Failure],
    key_hashes: I32 | None,
) -> SealedRows:
    """Put single failed rows, each with its root, into the form that a seal takes."""
    payload = pa.concat_batches([row for _, row in rows])
    roots = np.array([root for root, _ in rows], np.uint64)
    return SealedRows(stream, payload, roots, tuple(failures[int(root)] for root in roots), key_hashes)


def _join(parts: list[U64]) -> U64:
    joined: U64 = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
    return joined
