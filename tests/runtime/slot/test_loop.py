from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.config import TopologyOptions
from ftlayer.errors import PeerLostError, PeerUnreachableError
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.protocol.channel_frames import ElementCodec, encode_grants
from ftlayer.runtime.protocol.messages import (
    Barrier,
    Cancel,
    Deploy,
    DropPeers,
    Heartbeat,
    Peer,
    PeersDropped,
    PeersUp,
    Probe,
    ResetTasks,
    SlotEnded,
    TriggerCheckpoint,
    Watermark,
)
from ftlayer.runtime.slot import main as loop
from ftlayer.runtime.slot.links import Roster
from ftlayer.runtime.slot.main import SlotLoop, bears_barrier
from ftlayer.runtime.slot.pulse import Pulse
from ftlayer.runtime.slot.rules.events import (
    CoordinatorLost,
    CoordinatorSaid,
    CreditCame,
    Event,
    FrameCame,
    LinkBroke,
    Mailbox,
    PartFailed,
)
from ftlayer.runtime.slot.sources import Signal, Sources
from ftlayer.runtime.task.actions import SourceRows
from ftlayer.topology.job_graph import Channel

WAIT_S = 600
ME, ONE, TWO = Peer(0, "zero", ""), Peer(1, "one", ""), Peer(1, "two", "")


class Reader:
    """A source that gives what the test puts in."""

    lag: int | None = None
    is_away = False

    def __init__(self) -> None:
        self.waiting: list[SourceRows] = []
        self.started = self.finished = False
        self.told: list[SourceRows] = []
        self.due_ms: int | None = None

    def start(self) -> None:
        self.started = True

    def assign(self, splits: Any) -> None:
        raise AssertionError

    def take(self, mono_ms: int) -> SourceRows | None:
        return self.waiting.pop(0) if self.waiting else None

    def accepted(self, rows: SourceRows) -> None:
        self.told.append(rows)

    @property
    def ended(self) -> bool:
        return self.finished and not self.waiting

    def finish(self) -> None:
        self.finished = True

    def stop(self) -> None:
        self.finish()


class Links:
    """As `SlotLinks`, over lists."""

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self.roster = Roster("job", "zero")
        self.reached: tuple[int, ...] = ()

    def deploy(self, deploy: Deploy) -> None:
        self.roster.deploy(deploy.epoch, deploy.peers)
        self.reached = tuple(peer.slot for peer in deploy.peers if peer.slot)

    def up(self, message: PeersUp) -> list[int]:
        self.roster.up(message.epoch, message.peers)
        return [peer.slot for peer in message.peers]

    def drop(self, epoch: int, slots: Any) -> None:
        self.roster.drop(epoch, slots)

    def counts(self, slot: int, instance: str) -> bool:
        return self.roster.is_current(slot, instance)

    def transmit(self, slot: int, frame: bytes) -> None:
        self._fake.frames.setdefault(slot, deque()).append(frame)

    def grant(self, slot: int, grants: bytes) -> None:
        self._fake.grants.setdefault(slot, deque()).append(grants)

    def address_of(self, slot: int) -> str:
        return "grpc://nowhere"


class Running:
    """Slot 0 of two in a thread."""

    def __init__(self, tools: Any, peer_timeout_ms: int = 60_000) -> None:
        self.tools = tools
        graph = tools.graph_of(2)
        options = TopologyOptions(batch_rows=16, channel_bytes=1 << 10)
        self.slot = tools.slot.of(graph, 0, options)
        self.codec = ElementCodec(graph.edges)
        self.mailbox: Mailbox[Event] = Mailbox()
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.links = Links(self.slot.links)
        self.pulse = pulse = Pulse(
            self.sent.put, 60_000, on_error=lambda error: self.mailbox.put(PartFailed(error))
        )
        pulse.watch(self.slot.core.core)
        self.sources = Sources(self.slot.core.core, self.sent.put)
        self.reader = Reader()
        self.signal = Signal(lambda: self.mailbox.put(LinkBroke(9, "", "")))
        self.sources.add(("source", 0), self.reader, self.signal, BatchLimits(100, 5))
        self.loop = SlotLoop(
            self.slot.core.core,
            self.sources,
            self.mailbox,
            self.links,  # type: ignore[arg-type]
            pulse,
            self.sent.put,
            peer_timeout_ms,
            tools.not_wanted,
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run(Deploy(1, "run", (ME, ONE)))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def say(self, message: Any) -> None:
        self.mailbox.put(CoordinatorSaid(message))

    def read(self, first: int, n: int) -> None:
        self.reader.waiting.append(self.tools.source_rows(first, n))
        self.signal()

    def answer(self, kind: type) -> Any:
        while not isinstance(message := self.sent.get(timeout=WAIT_S), kind):
            continue
        return message

    def probe(self, number: int) -> Heartbeat:
        self.say(Probe(number))
        while (beat := self.answer(Heartbeat)).probe != number:
            continue
        return beat

    def end(self) -> BaseException | None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def running(tools: Any) -> Any:
    running = Running(tools)
    yield running
    running.mailbox.put(CoordinatorLost("the test is over"))
    running.end()


def until(condition: Any, running: Running) -> None:
    """Probe the loop until ``condition`` holds."""
    for number in range(1, 10_000):
        running.probe(number)
        if condition():
            return
    raise AssertionError("it never came")


def test_rows_flow_from_the_reader_to_the_sink_and_to_the_other_slot(running: Running) -> None:
    running.read(0, 10)
    until(lambda: running.slot.links.frames.get(1), running)
    assert running.reader.started
    assert [rows.first_ordinal for rows in running.reader.told] == [0]


def test_the_time_in_which_tasks_run_is_taken(running: Running) -> None:
    running.read(0, 10)
    until(lambda: running.slot.links.frames.get(1), running)
    totals = running.pulse.busy.totals(time.monotonic_ns())
    assert totals["source", 0] > 0
    assert totals["work", 0] > 0


def test_cancel_ends_the_slot(running: Running) -> None:
    running.say(Cancel("enough"))
    assert isinstance(running.answer(SlotEnded), SlotEnded)
    assert running.end() is None


def test_an_instance_that_is_to_begin_again_says_what_it_has_counted(running: Running) -> None:
    running.read(0, 10)
    until(lambda: running.slot.links.frames.get(1), running)
    running.say(ResetTasks(2, 1))
    assert running.end() is None
    last = [running.sent.get() for _ in range(running.sent.qsize())][-1]
    assert last.counters["records_in"] >= 10


def test_a_part_that_fails_fails_the_slot(running: Running) -> None:
    error = ValueError("broken")
    running.mailbox.put(PartFailed(error))
    assert running.end() is error


def test_what_comes_of_a_dropped_instance_is_not_looked_at(running: Running) -> None:
    running.say(DropPeers(2, (1,)))
    assert running.answer(PeersDropped) == PeersDropped(2)
    running.mailbox.put(FrameCame(1, "one", pa.py_buffer(b"nonsense")))
    running.mailbox.put(CreditCame(1, "one", b"nonsense"))
    assert running.probe(7).probe == 7
    running.read(0, 64)
    until(lambda: running.reader.told, running)
    assert not running.slot.links.frames
    running.say(PeersUp(2, (TWO,)))
    until(lambda: running.slot.links.frames.get(1), running)
    running.mailbox.put(FrameCame(1, "two", pa.py_buffer(b"nonsense")))
    assert "truncated" in str(running.end())


def test_a_peer_that_is_lost_and_not_replaced_fails_the_slot(tools: Any) -> None:
    running = Running(tools, peer_timeout_ms=50)
    running.mailbox.put(LinkBroke(1, "one", "reset by peer"))
    running.read(0, 10)
    error = running.end()
    assert isinstance(error, PeerLostError)
    assert "reset by peer" in str(error)


def test_a_peer_that_was_never_reached_fails_the_slot_soon(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "UNREACHED_MS", 50)
    running = Running(tools, peer_timeout_ms=600_000)
    running.mailbox.put(LinkBroke(1, "one", "connection refused", reached=False))
    running.read(0, 10)
    error = running.end()
    assert isinstance(error, PeerUnreachableError)
    assert "connection refused" in str(error)


def test_a_peer_that_is_lost_with_nothing_to_say_to_it_is_no_fault(tools: Any) -> None:
    running = Running(tools, peer_timeout_ms=1)
    running.mailbox.put(LinkBroke(1, "one", "it has ended"))
    running.mailbox.put(LinkBroke(1, "an earlier one", "who cares"))
    for number in range(1, 50):
        running.probe(number)
    running.mailbox.put(CoordinatorLost("the test is over"))
    assert running.end() is None


def test_quiet_is_told_at_once_and_a_probe_is_answered_with_it(running: Running) -> None:
    assert not running.probe(1).quiet
    running.read(0, 4)
    running.reader.finish()
    running.signal()
    until(lambda: len(running.slot.links.frames.get(1, ())) >= 2, running)
    assert not running.probe(0).quiet, "the other slot has not taken what was sent"
    for frame in list(running.slot.links.frames[1]):
        channel, _ = running.codec.decode(pa.py_buffer(frame))
        running.mailbox.put(CreditCame(1, "one", encode_grants({channel: len(frame)})))
    while not running.answer(Heartbeat).quiet:
        continue
    one, two = running.probe(20_001), running.probe(20_002)
    assert one.quiet
    assert two.quiet
    assert one.activity == two.activity


def test_what_bears_a_barrier() -> None:
    def came(frame: bytes) -> Event:
        return FrameCame(1, "one", pa.py_buffer(frame))

    codec, channel = ElementCodec([]), Channel(0, 0, 0)
    assert bears_barrier(came(codec.encode(channel, Barrier(1, 0))))
    assert bears_barrier(CoordinatorSaid(TriggerCheckpoint(Barrier(1, 0))))
    for other in (
        came(codec.encode(channel, Watermark(1))),
        came(b""),
        CreditCame(1, "one", b""),
        CoordinatorSaid(PeersUp(1, ())),
        CoordinatorLost("gone"),
    ):
        assert not bears_barrier(other)
