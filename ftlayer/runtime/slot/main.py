"""A slot from its start to its end: what the function of its Spark job calls."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import socket
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from ftlayer.errors import (
    FTLayerError,
    JobError,
    PeerUnreachableError,
    SourceError,
)
from ftlayer.functions.failures import raise_signalled
from ftlayer.printable import text_of
from ftlayer.records.ids import U64Array
from ftlayer.recovery import is_programs, lasting
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.readers import SourceReader, open_reader
from ftlayer.runtime.pandas_later import leave_pandas_to_others
from ftlayer.runtime.protocol.messages import (
    AskStack,
    Cancel,
    Deploy,
    Hello,
    SlotEnded,
    SlotFailed,
    StackTaken,
    ToSlot,
)
from ftlayer.runtime.slot.control_client import ControlClient
from ftlayer.runtime.slot.core import SlotCore
from ftlayer.runtime.slot.events import CoordinatorLost, CoordinatorSaid, Event, PartFailed, Wake
from ftlayer.runtime.slot.links import SlotLinks, receivers_of
from ftlayer.runtime.slot.listening import ListeningPlaces
from ftlayer.runtime.slot.loop import SlotLoop, roots_in_mail
from ftlayer.runtime.slot.mailbox import Mailbox
from ftlayer.runtime.slot.pulse import Pulse
from ftlayer.runtime.slot.roster import Roster
from ftlayer.runtime.slot.server import ChannelServer
from ftlayer.runtime.slot.shell import Order, SlotContext
from ftlayer.runtime.slot.sources import Reopening, Signal, Sources
from ftlayer.runtime.slot.stacks import stacks
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import Task, TaskKey
from ftlayer.runtime.task.mode import TaskMode
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.names import placed
from ftlayer.topology.operators import Source
from ftlayer.transport.polling import poll_in_place
from ftlayer.vertex.service.heap import keep_freed_memory

HARD_EXIT_S = 5.0
"""A slot that has lost its coordinator and does not come out of a user's function by then ends its process."""

ANY_CHECKPOINT = 2**63 - 1

YOUNG_OBJECTS = 50_000
"""Records live for a batch, and so does what they replace in state, where that may be undone. Most of what is looked at
earlier is still in use: at 10,000 that took 100 ns a record of a chain with a policy."""

SWITCH_S = 0.001
"""How long a thread that has a message waits for one that computes: Python's default is the age of a batch."""

_exit_without_a_word = os._exit
"""As it is now: a mode may note who calls ``os._exit`` while its tasks run, and that is about users' functions."""

logger = logging.getLogger(__name__)


def run_slot(order: Order) -> None:
    """Run the tasks of a slot until they end, the job is cancelled, or the coordinator is lost.

    What the slot fails with goes to the coordinator (`SlotFailed`) and is not raised: the coordinator decides
    whether the slot is started again. In barrier mode it begins again in this very process, as an instance of
    another name: when it is told to (`ResetTasks`), and when a task of it has failed. Must not be called in a
    process forked from one that has used gRPC.
    """
    leave_pandas_to_others()
    poll_in_place()
    if not order.mode.restarts_in_place:
        _run_instance(_Slot(order))
        return
    from pyspark import cloudpickle

    # Each instance has functions of its own: what one remembers beside its state is in no checkpoint.
    plan: bytes = cloudpickle.dumps(order)  # type: ignore[no-untyped-call]
    while _run_instance(_Slot(pickle.loads(plan))):
        # What the last instance held is gone before the next one restores as much again.
        gc.collect()


def _run_instance(slot: _Slot) -> bool:
    """Run one instance of a slot; whether another one is to follow in this process."""
    try:
        return slot.run()
    except BaseException as error:  # noqa: BLE001 - told to the coordinator, who judges it
        raise_signalled(error)
        slot.fail(error)
        return slot.outlives(error)
    finally:
        slot.close()


class _Slot:
    """The parts of one instance of a slot."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._instance = uuid.uuid4().hex
        self._mailbox: Mailbox[Event] = Mailbox()
        self._roster = Roster(order.job, self._instance)
        self._control = ControlClient(
            order.coordinator, job=order.job, slot=order.slot, instance=self._instance
        )
        self._mode = order.mode.instance(
            SlotContext(order, self._instance, self._mailbox.put, self._control.send)
        )
        self._places: ListeningPlaces | None = None
        self._server: ChannelServer | None = None
        self._links: SlotLinks | None = None
        self._sources: Sources | None = None
        self._core: SlotCore | None = None
        self._pulse: Pulse | None = None
        # The checkpoint that stands, once the coordinator has said: till then any that was acknowledged may be it.
        self._stands = ANY_CHECKPOINT
        self._is_over = False
        self._closed = threading.Event()
        self._loop_thread = 0

    def run(self) -> bool:
        """Register, wait to be deployed, and run the tasks; return whether to begin again."""
        order = self._order
        # First: what fails from here on has to be told.
        self._loop_thread = threading.get_ident()
        self._control.start(self._heard, self._lost)
        server = self._listen()
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
        address, host, deaths = str(server.address), socket.gethostname(), self._mode.deaths()
        self._control.send(
            Hello(order.slot, self._instance, address, host, os.getpid(), deaths, server.socket)
        )
        self._pulse.start()
        deploy = self._wait_for_deploy()
        if deploy is None:
            return False
        loop = self._deploy(deploy, self._pulse, self._links)
        with tuned_interpreter():
            loop.run(deploy)
        if loop.reset is not None:
            self._stands = loop.reset.stands
        self._is_over = loop.reset is None
        return loop.reset is not None

    def outlives(self, error: BaseException) -> bool:
        """Whether the process is good for another instance after this error: where only a task has failed."""
        return (
            self._order.mode.restarts_in_place
            and self._core is not None
            and not isinstance(error, MemoryError | PeerUnreachableError)
        )

    def fail(self, error: BaseException) -> None:
        """Tell the coordinator why this slot ends."""
        logger.error("slot %s fails", self._order.slot, exc_info=error)
        final = lasting(error)
        said = error if final is None else final
        reason = str(said) if isinstance(said, FTLayerError) else f"{type(said).__name__}: {text_of(said)}"
        trace = "".join(traceback.format_exception(error))
        damaged = self._mode.damaged(error)
        code = "" if final is None else final.code
        blamed = self._blamed(said)
        if final is not None:
            reason = placed(reason, blamed, self._order.graph)
        counters = {} if self._core is None else self._core.counters()
        # With checkpoints the driver knows what has succeeded; without them that is what the slot has taken.
        works = not self._order.mode.restarts_in_place and any(
            count for name, count in counters.items() if name.startswith("records_in/")
        )
        from_the_start = isinstance(error, PeerUnreachableError) or (is_programs(error) and not works)
        self._control.send(SlotFailed(reason, blamed, trace, from_the_start, damaged, code, counters))

    def _blamed(self, error: BaseException) -> str:
        """Return the uid of the operator that an error comes from, or of the chain that was at work; "" for none."""
        if isinstance(error, FTLayerError) and error.operator:
            return error.operator
        if isinstance(error, SourceError) and self._sources is not None:
            return self._sources.asked
        working = None if self._core is None else self._core.working
        return "" if working is None else working.uid

    def close(self) -> None:
        """End all threads and streams of this instance."""
        if self._sources is not None:
            self._sources.stop()
        self._mode.end(over=self._is_over, stands=self._stands)
        if self._pulse is not None:
            self._pulse.stop()
        if self._links is not None:
            self._links.close()
        self._control.close()
        if self._server is not None:
            self._server.close()
        if self._places is not None:
            self._places.close()
        self._mode.close()
        self._closed.set()

    # ------------------------------------------------------------ before it is deployed

    def _listen(self) -> ChannelServer:
        order = self._order
        certificate = None
        if order.tls_cert is not None and order.tls_key is not None:
            certificate = order.tls_cert, order.tls_key
        self._places = places = ListeningPlaces(order, self._instance)
        self._server = ChannelServer(
            places.address,
            token=order.coordinator.token,
            roster=self._roster,
            admit_timeout_s=order.options.start_timeout_ms / 1_000,
            post=self._mailbox.put,
            certificate=certificate,
            socket=places.socket,
        )
        return self._server

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

    def _deploy(self, deploy: Deploy, pulse: Pulse, links: SlotLinks) -> SlotLoop:
        """Make the tasks, and what runs them."""
        order = self._order
        tasks = build_tasks(order.graph, order.slot, self._mode.open(deploy))
        core = SlotCore(order.graph, order.slot, tasks, order.options, self._mode.rules)
        self._core = core
        self._sources = self._open_sources(core)
        pulse.watch(core)
        return SlotLoop(
            core,
            self._sources,
            self._mailbox,
            links,
            pulse,
            self._control.send,
            order.options.heartbeat_timeout_ms,
            self._mode.carry_out,
            self._mode.tracer,
        )

    def _open_sources(self, core: SlotCore) -> Sources:
        order, graph = self._order, self._order.graph
        sources = Sources(core, self._control.send)
        for uid, subtask in graph.subtasks_in(order.slot):
            source = graph.vertex(uid).operators[0]
            if not isinstance(source, Source):
                continue
            limits = BatchLimits(
                core.rows_wanted((uid, subtask)),
                order.options.batch_age_ms,
                keeps_misfits=self._mode.keeps_misfits and source.replay == "store",
            )
            signal = Signal(lambda: self._mailbox.put(Wake()))
            positions = self._mode.positions((uid, subtask))
            open_from = self._opener(source, subtask, limits, signal)
            reopening = Reopening(partial(open_from, again=True), positions, copy.deepcopy(source.restart))
            sources.add((uid, subtask), open_from(positions), signal, limits, reopening)
        return sources

    def _opener(
        self, source: Source, subtask: int, limits: BatchLimits, wake: Signal
    ) -> Callable[..., SourceReader]:
        order = self._order
        parallelism = order.graph.vertex(source.uid).parallelism

        def open_from(positions: Mapping[str, bytes], *, again: bool = False) -> SourceReader:
            return open_reader(
                source,
                subtask,
                parallelism,
                positions=positions,
                limits=limits,
                key=order.key,
                wake=wake,
                job=order.graph.name,
                again=again,
            )

        return open_from

    def _make_pulse(self) -> Pulse:
        return Pulse(
            self._control.send,
            self._order.options.heartbeat_ms,
            timeout_ms=self._mode.touch_timeout_ms,
            touch=self._mode.touch,
            held=self._held_outside,
            of_sources=self._counters_of_sources,
            transports=lambda: {} if self._links is None else self._links.transports(),
            on_error=lambda error: self._mailbox.put(PartFailed(error)),
        )

    def _held_outside(self) -> list[U64Array]:
        assert self._links is not None
        return [*roots_in_mail(self._mailbox), *self._links.roots()]

    def _counters_of_sources(self, mono_ms: int) -> dict[str, int]:
        return {} if self._sources is None else self._sources.counters(mono_ms)

    def _heard(self, message: ToSlot) -> None:
        """Called by the control client's thread, which answers by itself what must not wait for the loop."""
        if isinstance(message, AskStack):
            self._control.send(StackTaken(message.number, stacks(self._loop_thread)))
        else:
            self._mailbox.put(CoordinatorSaid(message))

    def _lost(self, reason: str) -> None:
        """Called by the control client's thread: end, whether the loop is stuck in a user's function or not."""
        self._mailbox.put(CoordinatorLost(reason))
        threading.Thread(target=self._exit_late, name="ftlayer-exit", daemon=True).start()

    def _exit_late(self) -> None:
        if not self._closed.wait(HARD_EXIT_S):
            _exit_now()


def build_tasks(graph: JobGraph, slot: int, mode: TaskMode) -> dict[TaskKey, Task]:
    """Make all tasks of a slot; raises what `build_task` raises."""
    return {(uid, subtask): build_task(graph, uid, subtask, mode) for uid, subtask in graph.subtasks_in(slot)}


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Collect garbage more rarely, and never look at what is there already; hand over to other threads sooner.

    At Python's defaults the cyclic collector takes a third of a slot's time.
    """
    keep_freed_memory()
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        # The process goes on to other Spark tasks.
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _exit_now() -> NoReturn:
    _exit_without_a_word(75)
