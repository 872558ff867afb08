"""Slots in processes of their own, and a coordinator that does just enough for them."""

from __future__ import annotations

import multiprocessing
import os
import queue
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

from ftlayer.common.rules.histogram import LATENCY_BOUNDS, Histogram
from ftlayer.common.rules.restart import RestartStrategy
from ftlayer.common.rules.telemetry_settings import Tracing
from ftlayer.config import FTStatus, TopologyOptions, VertexOptions
from ftlayer.errors import ProtocolError
from ftlayer.runtime.acker_mode.slot.rules import AckerSlotFactory
from ftlayer.runtime.driver.control_server import ControlServer
from ftlayer.runtime.protocol.messages import (
    END_TO_END,
    Cancel,
    Deploy,
    DropPeers,
    EndReplays,
    Heartbeat,
    Hello,
    Peer,
    PeersDropped,
    PeersUp,
    Probe,
    ReplayNow,
    SlotEnded,
    SlotFailed,
    SlotOrder,
    StopSources,
    ToSlot,
    histograms_of,
)
from ftlayer.runtime.slot.rules.mode import UntrackedSlotFactory
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.transport.address import Address
from ftlayer.transport.flight_connection import Endpoint
from ftlayer.transport.tls import Certificate, make_certificate
from ftlayer.vertex.calls import ClaimJob, OpenStream, Recall, StreamOptions, StreamStatusCall
from ftlayer.vertex.service.embedded import EmbeddedVertex

WAIT_S = 600.0
JOB = "job-1"
RUN_SLOT = """
import sys
from pathlib import Path
from pyspark import cloudpickle
from ftlayer.runtime.slot.main import run_slot
run_slot(cloudpickle.loads(Path(order).read_bytes()))
loaded = [name for name in ("numba", "lmdb") if name in sys.modules]
assert not loaded, loaded
"""
# Forked with ftlayer imported, as slots in Spark's workers are: its imports are a second of CPU time.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ftlayer.runtime.slot.main"])


class SlotProcess:
    """A slot in a process of its own; ``order`` is the file with what it is to do."""

    def __init__(self, order: Path) -> None:
        self._process = FORKS.Process(target=exec, args=(RUN_SLOT, {"order": str(order)}))
        self._process.start()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; return its exit code."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"the slot has not ended within {timeout_s} s"
        return code


class Slots:
    """The slots of one job, and what they have said."""

    def __init__(
        self,
        graph: JobGraph,
        path: Path,
        options: TopologyOptions,
        vertex: EmbeddedVertex | None,
        certificate: Certificate | None = None,
        run: str = JOB,
        tracing: Tracing | None = None,
    ) -> None:
        self.run = run
        self.tracing = tracing
        self.graph, self.path, self.options, self.vertex = graph, path, options, vertex
        self.certificate = certificate
        self.said: list[tuple[int, Any]] = []
        self.peers: dict[int, Peer] = {}
        self.processes: dict[int, SlotProcess] = {}
        self.beats: dict[int, Heartbeat] = {}
        self.ended: dict[int, dict[str, int]] = {}
        self.failures: list[SlotFailed] = []
        self.lost: list[str] = []
        self.epoch = 1
        self._gone = False
        self._probe = 0
        self._events: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._key = secrets.token_bytes(32)
        token = secrets.token_urlsafe()
        self.server = ControlServer(
            listen=Address("127.0.0.1"),
            token=token,
            job=run,
            slots=graph.slots,
            certificate=None if certificate is None else (certificate.cert, certificate.key),
            on_message=self._heard,
            on_lost=lambda slot, instance, reason: self._events.put((slot, instance, reason)),
        )
        self.endpoint = Endpoint(
            str(self.server.address),
            token,
            None if certificate is None else certificate.cert,
            "" if certificate is None else "127.0.0.1",
            None if certificate is None else certificate.cert,
            None if certificate is None else certificate.key,
        )

    def _heard(self, slot: int, instance: str, message: Any) -> None:
        if self._gone:
            raise ProtocolError("this ends the stream")
        self._events.put((slot, instance, message))

    def lose_coordinator(self) -> None:
        """Break the control streams, from the next heartbeat on."""
        self._gone = True

    # ------------------------------------------------------------ starting

    def start(self) -> None:
        for slot in range(self.graph.slots):
            self.launch(slot)
        self.until(lambda: len(self.peers) == self.graph.slots)
        self._claim()
        self._recall()
        for slot in self.peers:
            self.send(slot, Deploy(self.epoch, "run-1", tuple(self.peers.values())))

    def launch(self, slot: int) -> None:
        certificate = self.certificate
        order = SlotOrder(
            self.run,
            slot,
            self.endpoint,
            self.graph,
            self.options,
            UntrackedSlotFactory() if self.vertex is None else AckerSlotFactory(self.vertex.client()),
            "127.0.0.1",
            None if certificate is None else certificate.cert,
            None if certificate is None else certificate.key,
            self._key,
            tracing=self.tracing,
        )
        written = self.path / f"order-{slot}-{secrets.token_hex(4)}"
        written.write_bytes(cloudpickle.dumps(order))
        self.processes[slot] = SlotProcess(written)

    def replace(self, slot: int) -> None:
        """Kill a slot's process and bring another one up, as the coordinator does."""
        self.processes[slot].kill()
        self.processes[slot].wait()
        del self.peers[slot]
        self.epoch += 1
        survivors = list(self.peers)
        for other in survivors:
            self.send(other, DropPeers(self.epoch, (slot,)))
        self.launch(slot)
        self.until(
            lambda: (
                slot in self.peers
                and all((other, PeersDropped(self.epoch)) in self.said for other in survivors)
            )
        )
        self._recall()
        for other in survivors:
            self.send(other, PeersUp(self.epoch, (self.peers[slot],)))
        self.send(slot, Deploy(self.epoch, "run-1", tuple(self.peers.values())))
        for other in self.peers:
            self.send(other, ReplayNow())

    def _claim(self) -> None:
        """Take the job over."""
        if self.vertex is not None:
            with self.vertex.client() as client:
                client.call(ClaimJob(self.graph.name, self.run))

    def _recall(self) -> None:
        """Have everything replayed that is pending: the slots that worked on it are gone."""
        if self.vertex is not None:
            with self.vertex.client() as client:
                opened: list[Any] = [
                    client.call(OpenStream(*stream, self.run)) for stream in self.graph.options
                ]
                names = tuple(name for name, _ in self.graph.options)
                client.call(Recall(names, opened[0].incarnation, self.run))

    # ------------------------------------------------------------ talking

    def send(self, slot: int, message: ToSlot) -> None:
        self.server.send(self.peers[slot].instance, message)

    def send_all(self, message: ToSlot) -> None:
        for slot in self.peers:
            self.send(slot, message)

    def until(self, condition: Callable[[], bool]) -> None:
        """Listen until ``condition``; fails when a slot does."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, (self.beats, self.said[-5:])
            self.listen()

    def listen(self, timeout_s: float = 0.02) -> None:
        try:
            slot, instance, message = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return
        self.said.append((slot, message))
        match message:
            case Hello():
                # With a certificate: as a slot of another machine.
                socket = "" if self.certificate else message.socket
                self.peers[slot] = Peer(slot, instance, message.address, socket)
            case Heartbeat():
                self.beats[slot] = message
            case SlotEnded():
                self.ended[slot] = message.counters
            case SlotFailed():
                self.failures.append(message)
            case str():
                self.lost.append(message)

    def total(self, name: str) -> int:
        return sum(counters.get(name, 0) for counters in self.ended.values())

    def transports(self) -> set[str]:
        """Return what has carried the channels between the slots."""
        return {how for beat in self.beats.values() for how in beat.transports.values()}

    def counted(self, name: str) -> int:
        return sum(beat.counters.get(name, 0) for beat in self.beats.values())

    def latencies(self) -> dict[str, Histogram]:
        """How old records were at sinks, of all slots together, with exemplars."""
        counters, exemplars = Counter[str](), {}
        for slot, ended in self.ended.items():
            counters.update(ended)
            exemplars |= self.beats[slot].exemplars
        return histograms_of(END_TO_END, counters, LATENCY_BOUNDS, exemplars)

    # ------------------------------------------------------------ ending

    def drain(self) -> None:
        """Wait until a bounded job has ended."""
        if self.vertex is not None:
            with self.vertex.client() as client:
                names = tuple(name for name, _ in self.graph.options)
                while True:
                    before = self._ask()
                    status: Any = client.call(StreamStatusCall(names))
                    if before == self._ask() and status.drained and all(quiet for quiet, _ in before):
                        break
            self.send_all(EndReplays())
        self.until(lambda: len(self.ended) == self.graph.slots)
        for process in self.processes.values():
            assert process.wait(WAIT_S) == 0

    def _ask(self) -> list[tuple[bool, int]]:
        """Return (quiet, activity) of every slot."""
        self._probe += 1
        self.send_all(Probe(self._probe))
        answers: dict[int, Heartbeat] = {}

        def answered() -> bool:
            answers.update({slot: its for slot, its in self.said if getattr(its, "probe", 0) == self._probe})
            return len(answers) == len(self.peers)

        self.until(answered)
        return [(answers[slot].quiet, answers[slot].activity) for slot in sorted(answers)]

    def close(self) -> None:
        self.server.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


class Jobs:
    """Makes graphs, and runs them in slots."""

    drop_peers, stop_sources, cancel = DropPeers, StopSources, Cancel

    def __init__(self, path: Path) -> None:
        self.path = path
        self.out = path / "out"
        self.out.mkdir()
        self._opened: list[Slots] = []
        self.vertex: EmbeddedVertex | None = None

    def graph(
        self,
        parts: list[Callable[[], Any]],
        function: Callable[[Any], Any],
        *,
        tracked: bool = True,
        retry: StreamOptions | None = None,
        restart: RestartStrategy | None = None,
    ) -> JobGraph:
        """source → rebalance → ``function`` (a flat_map) → by key → file: two slots."""
        out = str(self.out)
        status = FTStatus.ON if tracked else FTStatus.OFF

        def write(batch: Any) -> None:
            with open(f"{out}/{os.getpid()}", "a") as file:
                file.write("".join(f"{number}\n" for number in batch.column(0).to_pylist()))

        builder = GraphBuilder("job", parallelism=2, status=status, restart=restart)
        stream = builder.source(partitions(*parts), "n bigint", uid="source").rebalance()
        stream = (
            stream.flat_map(function, "n bigint", uid="work")
            .key_by("n")
            .map(lambda n: n, "n bigint", uid="last")
        )
        stream.sink(write, uid="sink")
        return job_graph(builder.build(), status, retry)

    def written(self) -> list[int]:
        """Return what has reached the sinks whole, in no order."""
        return [
            int(line)
            for path in self.out.iterdir()
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def slots(
        self,
        graph: JobGraph,
        *,
        certificate: Certificate | None = None,
        run: str = JOB,
        tracing: Tracing | None = None,
        **options: Any,
    ) -> Slots:
        """Start the graph's slots, and a vertex if it is tracked."""
        if graph.tracked and self.vertex is None:
            self.vertex = EmbeddedVertex(VertexOptions(self.path / "vertex"))
            self.vertex.start()
        slots = Slots(graph, self.path, TopologyOptions(**options), self.vertex, certificate, run, tracing)
        self._opened.append(slots)
        slots.start()
        return slots

    @staticmethod
    def certificate() -> Certificate:
        return make_certificate(["127.0.0.1"])

    def close(self) -> None:
        for slots in self._opened:
            slots.close()
        if self.vertex is not None:
            self.vertex.stop()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.close()
