"""What is told of a job while it runs and when it is over: its counters and rates, and what the vertex says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ftlayer.histogram import LATENCY_BOUNDS, Exemplar
from ftlayer.runtime.driver.driver_mode import DriverMode
from ftlayer.runtime.driver.job_core import JobCore
from ftlayer.runtime.driver.job_status import (
    JobStatus,
    away_of,
    chain_status,
    circuits_of,
    edges_of,
    lags_of,
    slot_status,
    subtasks_of,
)
from ftlayer.runtime.driver.meter import Meter
from ftlayer.runtime.driver.planners import Planners
from ftlayer.runtime.protocol.durations import END_TO_END, PERSIST, histograms_of
from ftlayer.topology.job_graph import JobGraph
from ftlayer.vertex.calls import HistogramDetails, StreamStatus


class JobReport:
    """One job's, from its start on. Methods are of the job's thread, save what says otherwise."""

    def __init__(
        self,
        run: str,
        graph: JobGraph,
        core: JobCore[Any],
        mode: DriverMode[Any],
        lock: threading.Lock,
        planners: Planners,
    ) -> None:
        """Ask the vertex for what there was before the job.

        ``run`` names the execution. ``lock`` is held where ``core`` gets events, and for `update`. ``planners`` are
        those of its readers.
        """
        self._run = run
        self._graph = graph
        self._core = core
        self._mode = mode
        self._lock = lock
        self._planners = planners
        self._asking = threading.Lock()
        self._meter = Meter()
        self._exemplars: dict[str, Exemplar] = {}
        self._is_over = False
        self._last_status: StreamStatus | None = None
        self._before = mode.vertex_status()
        if self._before is not None:
            self._meter.update_vertex(self._before, now_ms())
        self.started_ms, self._ended_ms = now_ms(), 0
        self._to_wall_ms = time.time_ns() // 1_000_000 - self.started_ms

    def update(self, instance: str, counters: dict[str, int], now_ms: int) -> None:
        """Take what an instance has counted so far."""
        self._meter.update(instance, counters, now_ms)

    def update_exemplars(self, exemplars: Mapping[str, Exemplar]) -> None:
        """Take an instance's exemplars; of those of one bucket the latest is kept."""
        for name, exemplar in exemplars.items():
            known = self._exemplars.get(name)
            if known is None or known.at_ms <= exemplar.at_ms:
                self._exemplars[name] = exemplar

    def ending(self) -> None:
        """The job has come to its final state: its time stands still."""
        self._ended_ms = now_ms()

    def over(self) -> None:
        """All parts of the job are closed: the vertex is asked once more, and nothing has a rate."""
        self._is_over = True

    def status(self) -> JobStatus:
        """Return what is known of the job now, with the vertex's answer if there is one; any thread."""
        # One at a time: an older answer behind a newer one would look like a vertex that counts from 0 again.
        with self._asking:
            vertex = self._vertex_status()
            moment_ms = now_ms()
            if vertex is not None:
                with self._lock:
                    self._meter.update_vertex(vertex, moment_ms)
        with self._lock:
            core = self._core
            rates = {} if self._is_over else self._meter.rates(moment_ms)
            totals = self._meter.totals
            savepoint = self._mode.stopped_with
            return JobStatus(
                name=self._graph.name,
                job=self._run,
                state=core.state,
                epoch=core.epoch,
                uptime_s=(self._ended_ms or moment_ms) / 1_000 - self.started_ms / 1_000,
                slots=tuple(slot_status(slot, moment_ms) for slot in core.slots),
                chains=tuple(
                    chain_status(v.uid, totals, rates, core.slots, savepoint) for v in self._graph.vertices
                ),
                counters={name: value for name, value in totals.items() if "/" not in name},
                rates={name: rate for name, rate in rates.items() if "/" not in name},
                histograms=dict(self._histograms(totals)),
                vertex=vertex,
                before=self._before,
                restarts=core.restarts,
                isolation=core.isolation,
                last_failure=core.last_failure,
                checkpoints=self._mode.checkpoint_counts,
                subtasks=() if self._is_over else tuple(subtasks_of(core.slots)),
                edges=() if self._is_over else tuple(edges_of(core.slots, self._graph)),
                incidents=core.incidents.at(self._to_wall_ms),
                savepoint="" if savepoint is None else savepoint.location,
                lags={} if self._is_over else {**self._planners.lags(), **lags_of(core.slots)},
                away={} if self._is_over else away_of(self._planners.away(), core.slots),
                breakers={} if self._is_over else circuits_of(core.slots),
            )

    def _histograms(self, totals: Mapping[str, int]) -> Iterator[tuple[str, HistogramDetails]]:
        for name in (PERSIST, END_TO_END):
            found = histograms_of(name, totals, LATENCY_BOUNDS, self._exemplars)
            for part, histogram in found.items():
                yield f"{name}|{part}", HistogramDetails.of(histogram)

    def _vertex_status(self) -> StreamStatus | None:
        if not self._is_over:
            return self._mode.vertex_status()
        if self._last_status is None:
            self._last_status = self._mode.vertex_status()
        return self._last_status


def now_ms() -> int:
    """Return the monotone clock, in ms."""
    return time.monotonic_ns() // 1_000_000
