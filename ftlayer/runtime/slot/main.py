"""A slot from its start to its end: what the function of its Spark job calls."""

from __future__ import annotations

import logging
import os
import socket
import threading
import traceback
import uuid
from typing import NoReturn

from ftlayer.config import split_address
from ftlayer.errors import FTLayerError, JobError, PeerUnreachableError, SourceError
from ftlayer.layer.calls import StreamOptions
from ftlayer.records.ids import U64Array
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.opening import open_reader
from ftlayer.runtime.coordinator.control_client import ControlClient
from ftlayer.runtime.messages import Cancel, Deploy, Hello, SlotEnded, SlotFailed
from ftlayer.runtime.order import SlotOrder
from ftlayer.runtime.slot.assembly import build_tasks
from ftlayer.runtime.slot.core import SlotCore
from ftlayer.runtime.slot.events import CoordinatorLost, CoordinatorSaid, Event, PartFailed, Wake
from ftlayer.runtime.slot.interpreter import tuned_interpreter
from ftlayer.runtime.slot.links import SlotLinks, receivers_of
from ftlayer.runtime.slot.loop import SlotLoop, roots_in_mail
from ftlayer.runtime.slot.mailbox import Mailbox
from ftlayer.runtime.slot.pandas_later import leave_pandas_to_others
from ftlayer.runtime.slot.pulse import Pulse
from ftlayer.runtime.slot.roster import Roster
from ftlayer.runtime.slot.server import ChannelServer
from ftlayer.runtime.slot.sources import Signal, Sources
from ftlayer.runtime.slot.vertex_port import OpenedStream, VertexPort
from ftlayer.stream.operators import Source

HARD_EXIT_S = 5.0
"""A slot that has lost its coordinator and does not come out of a user's function by then ends its process."""

logger = logging.getLogger(__name__)


def run_slot(order: SlotOrder) -> None:
    """Run the tasks of a slot until they end, the job is cancelled, or the coordinator is lost.

    What the slot fails with goes to the coordinator (`SlotFailed`) and is not raised: the coordinator decides
    whether the slot is started again. Must not be called in a process forked from one that has used gRPC.
    """
    leave_pandas_to_others()
    slot = _Slot(order)
    try:
        slot.run()
    except (Exception, MemoryError) as error:  # noqa: BLE001 - told to the coordinator, who judges it
        slot.fail(error)
    finally:
        slot.close()


class _Slot:
    """What one instance of a slot consists of."""

    def __init__(self, order: SlotOrder) -> None:
        self._order = order
        self._instance = uuid.uuid4().hex
        self._mailbox: Mailbox[Event] = Mailbox()
        self._roster = Roster(order.job, self._instance)
        self._control = ControlClient(
            order.coordinator, job=order.job, slot=order.slot, instance=self._instance
        )
        self._server: ChannelServer | None = None
        self._links: SlotLinks | None = None
        self._port: VertexPort | None = None
        self._sources: Sources | None = None
        self._core: SlotCore | None = None
        self._pulse: Pulse | None = None
        self._closed = threading.Event()

    def run(self) -> None:
        """Register, wait to be deployed, and run the tasks."""
        order = self._order
        # First: what fails from here on has to be told.
        self._control.start(lambda message: self._mailbox.put(CoordinatorSaid(message)), self._lost)
        server, host = self._listen()
        self._links = SlotLinks(
            order.job,
            order.slot,
            self._instance,
            order.coordinator,
            server,
            self._roster,
            receivers_of(order.graph, order.slot),
            self._mailbox.put,
        )
        self._pulse = self._make_pulse()
        scheme = "grpc" if order.tls_cert is None else "grpc+tls"
        address = f"{scheme}://{_bracketed(host)}:{server.port}"
        self._control.send(Hello(order.slot, self._instance, address, socket.gethostname(), os.getpid()))
        self._pulse.start()
        deploy = self._wait_for_deploy()
        if deploy is not None:
            self._run_tasks(deploy, self._pulse, self._links)

    def fail(self, error: BaseException) -> None:
        """Tell the coordinator why this slot ends."""
        logger.error("slot %s fails", self._order.slot, exc_info=error)
        reason = str(error) if isinstance(error, FTLayerError) else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        lasting = isinstance(error, PeerUnreachableError)
        self._control.send(SlotFailed(reason, self._blamed(error), trace, lasting))

    def _blamed(self, error: BaseException) -> str:
        """Return the uid of the chain that was at work, "" for none."""
        if isinstance(error, SourceError) and self._sources is not None:
            return self._sources.asked
        working = None if self._core is None else self._core.working
        return "" if working is None else working.uid

    def close(self) -> None:
        """End all threads and streams of this instance."""
        if self._sources is not None:
            self._sources.stop()
        if self._pulse is not None:
            self._pulse.stop()
        if self._links is not None:
            self._links.close()
        self._control.close()
        if self._server is not None:
            self._server.close()
        if self._port is not None:
            self._port.close()
        self._closed.set()

    # ------------------------------------------------------------ before it is deployed

    def _listen(self) -> tuple[ChannelServer, str]:
        order = self._order
        host = order.listen_on or _address_towards(order.coordinator.address)
        certificate = None
        if order.tls_cert is not None and order.tls_key is not None:
            certificate = order.tls_cert, order.tls_key
        self._server = ChannelServer(
            host,
            token=order.coordinator.token,
            roster=self._roster,
            admit_timeout_s=order.options.start_timeout_ms / 1_000,
            post=self._mailbox.put,
            certificate=certificate,
        )
        return self._server, host

    def _wait_for_deploy(self) -> Deploy | None:
        """Return the coordinator's plan; None if the slot is to end before it begins."""
        while True:
            event = self._mailbox.take()
            match event:
                case None:
                    self._mailbox.wait(None)
                case CoordinatorSaid(Deploy() as deploy):
                    return deploy
                case CoordinatorSaid(Cancel()):
                    self._control.send(SlotEnded())
                    return None
                case CoordinatorLost(reason):
                    logger.warning("this slot ends: %s", reason)
                    return None
                case _:
                    raise JobError(f"the coordinator began with {event} where Deploy was expected")

    # ------------------------------------------------------------ deployed

    def _run_tasks(self, deploy: Deploy, pulse: Pulse, links: SlotLinks) -> None:
        order = self._order
        opened: dict[str, OpenedStream] = {}
        if order.vertex is not None:
            self._port = VertexPort(order.vertex, order.graph.options, self._mailbox.put)
            opened = self._port.open()
        tasks = build_tasks(order, f"{deploy.run}/{self._instance}", opened)
        core = SlotCore(order.graph, order.slot, tasks, order.options, links, self._port)
        self._core = core
        self._sources = self._open_sources(core, opened)
        pulse.watch(core)
        loop = SlotLoop(
            core,
            self._sources,
            self._mailbox,
            links,
            pulse,
            self._control.send,
            order.options.heartbeat_timeout_ms,
        )
        with tuned_interpreter():
            loop.run(deploy)

    def _open_sources(self, core: SlotCore, opened: dict[str, OpenedStream]) -> Sources:
        order, graph = self._order, self._order.graph
        options = dict(graph.options)
        sources = Sources(core, self._control.send)
        for uid, subtask in graph.subtasks_in(order.slot):
            source = graph.vertex(uid).operators[0]
            if not isinstance(source, Source):
                continue
            stream = graph.stream_of(uid)
            max_pending = options.get(stream, StreamOptions()).max_pending
            limits = BatchLimits(min(order.options.batch_rows, max_pending), order.options.batch_age_ms)
            signal = Signal(lambda: self._mailbox.put(Wake()))
            reader = open_reader(
                source,
                subtask,
                graph.vertex(uid).parallelism,
                positions=opened[stream].positions if stream in opened else {},
                limits=limits,
                key=order.key,
                wake=signal,
            )
            sources.add((uid, subtask), reader, signal)
        return sources

    def _make_pulse(self) -> Pulse:
        order = self._order
        timeouts = [options.timeout_ms for _, options in order.graph.options]
        return Pulse(
            self._control.send,
            order.options.heartbeat_ms,
            timeout_ms=min(timeouts) if timeouts and order.vertex is not None else None,
            touch=None if order.vertex is None else self._touch,
            held=self._held_outside,
            on_error=lambda error: self._mailbox.put(PartFailed(error)),
        )

    def _touch(self, roots: list[U64Array]) -> None:
        if self._port is not None and roots:
            self._port.touch(roots)

    def _held_outside(self) -> list[U64Array]:
        assert self._links is not None
        return [*roots_in_mail(self._mailbox), *self._links.roots()]

    def _lost(self, reason: str) -> None:
        """Called by the control client's thread: end, whether the loop is stuck in a user's function or not."""
        self._mailbox.put(CoordinatorLost(reason))
        threading.Thread(target=self._exit_late, name="ftlayer-exit", daemon=True).start()

    def _exit_late(self) -> None:
        if not self._closed.wait(HARD_EXIT_S):
            _exit_now()


def _exit_now() -> NoReturn:
    os._exit(75)


def _address_towards(address: str) -> str:
    """Return the address of this machine by which it reaches another; sends nothing."""
    host, port = split_address(address.partition("://")[2], "coordinator")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own: str = probe.getsockname()[0]
        return own


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
