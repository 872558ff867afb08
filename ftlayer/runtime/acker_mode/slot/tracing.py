"""Spans of what a slot does with records that are followed: read, run through a chain, given out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ftlayer.handler.record_ids import RecordIds, origins_of
from ftlayer.records.ids import U64Array, ids_of, operator_key
from ftlayer.records.traced import Sampler, attempt_span, record_span, span_within, trace_of
from ftlayer.runtime.acker_mode.slot.instructions import FailCall, PersistCall
from ftlayer.runtime.slot.instructions import RunTask, SlotInstruction
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.task.events import Replayed, RowsPersisted
from ftlayer.telemetry.spans import EndedSpan, SpanError
from ftlayer.vertex.calls import Failure

MAX_A_RUN = 2_048
"""Of one batch no more records than these have spans: so many wait for the collector at most."""


class AckerTracer:
    """`ftlayer.runtime.slot.tracing.RunTracer` of acker mode, where records have roots. For the loop's thread."""

    def __init__(self, sampler: Sampler, topology: str, slot: int, send: Callable[[EndedSpan], None]) -> None:
        self._sampler = sampler
        self._topology = topology
        self._slot = slot
        self._send = send
        # When a task made roots, and which of them are followed, until the vertex has stored them.
        self._made: dict[tuple[TaskKey, int], tuple[int, list[int]]] = {}

    def ran(self, run: RunTask, decided: Sequence[SlotInstruction], start_ns: int, end_ns: int) -> None:
        event = run.event
        if run.lineage is not None:
            self._worked(run, run.lineage, decided, start_ns, end_ns)
        elif isinstance(event, Replayed):
            for records in event.records:
                self._replayed(run.key, records.roots, records.origins, records.attempts, start_ns, end_ns)
        elif isinstance(event, RowsPersisted):
            self._persisted(run.key, event.ticket, decided, end_ns)
        for each in decided:
            if isinstance(each, PersistCall):
                roots = ids_of(each.call.roots)
                followed = roots[self._sampler.mask(roots)][:MAX_A_RUN].tolist()
                if followed:
                    self._made[each.key, each.ticket] = start_ns, followed

    def _worked(
        self,
        run: RunTask,
        lineage: RecordIds,
        decided: Sequence[SlotInstruction],
        start_ns: int,
        end_ns: int,
    ) -> None:
        """A chain has taken a batch: each record in it that is followed has a span of that time."""
        origins = origins_of(lineage)
        followed = np.flatnonzero(self._sampler.mask(origins))[:MAX_A_RUN]
        if not len(followed):
            return
        failures = _failures(decided)
        of_root = dict(zip(lineage.roots[followed].tolist(), origins[followed].tolist(), strict=True))
        uid, subtask = run.key
        for root, origin in of_root.items():
            parent = attempt_span(root)
            self._emit(
                origin,
                span_within(parent, operator_key(uid), subtask, start_ns),
                parent,
                uid,
                (start_ns, end_ns),
                {**self._told(run.key, root), "ftlayer.batch.records": len(lineage)},
                failures.get(root),
            )

    def _replayed(
        self,
        key: TaskKey,
        roots: U64Array,
        origins: U64Array,
        attempts: np.ndarray[tuple[int], np.dtype[np.int32]],
        start_ns: int,
        end_ns: int,
    ) -> None:
        for place in np.flatnonzero(self._sampler.mask(origins))[:MAX_A_RUN].tolist():
            root, origin = int(roots[place]), int(origins[place])
            parent = attempt_span(root)
            told = {**self._told(key, root), "ftlayer.attempt": int(attempts[place])}
            span = span_within(parent, operator_key(key[0]))
            self._emit(origin, span, parent, f"replay {key[0]}", (start_ns, end_ns), told)

    def _persisted(self, key: TaskKey, ticket: int, decided: Sequence[SlotInstruction], end_ns: int) -> None:
        """The vertex has stored new roots: the first span of each trace, from their making to their leaving."""
        start_ns, followed = self._made.pop((key, ticket), (0, []))
        failures = _failures(decided) if followed else {}
        for root in followed:
            told, times = self._told(key, root), (start_ns, end_ns)
            self._emit(root, record_span(root), 0, key[0], times, told, failures.get(root))

    def _told(self, key: TaskKey, root: int) -> dict[str, str | int | bool]:
        return {
            "ftlayer.topology": self._topology,
            "ftlayer.operator": key[0],
            "ftlayer.subtask": key[1],
            "ftlayer.slot": self._slot,
            "ftlayer.root": f"{root:016x}",
        }

    def _emit(
        self,
        origin: int,
        span: int,
        parent: int,
        name: str,
        times: tuple[int, int],
        told: dict[str, str | int | bool],
        failure: Failure | None = None,
    ) -> None:
        error = None if failure is None else SpanError(failure.reason, failure.operator, failure.traceback)
        self._send(EndedSpan(trace_of(origin), span, parent, name, *times, told, error))


def _failures(decided: Sequence[SlotInstruction]) -> dict[int, Failure]:
    return {failure.root: failure for failure in _failed(decided)}


def _failed(decided: Sequence[SlotInstruction]) -> Iterator[Failure]:
    for each in decided:
        if isinstance(each, FailCall):
            yield from each.failures
