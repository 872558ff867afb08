"""Acker mode's half in a slot's process: the streams to the vertex."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ftlayer import __version__
from ftlayer.functions.failures import this_process
from ftlayer.handler.handler import FTHandler
from ftlayer.records.ids import U64Array
from ftlayer.records.traced import Sampler
from ftlayer.runtime.acker_mode.slot.instructions import (
    FailCall,
    PersistCall,
    RangesCall,
    TakeReplaysCall,
    XorCall,
)
from ftlayer.runtime.acker_mode.slot.rules import AckerSlot
from ftlayer.runtime.acker_mode.slot.tracing import AckerTracer
from ftlayer.runtime.acker_mode.slot.vertex_port import OpenedStream, VertexPort
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode, Holding
from ftlayer.runtime.connectors.positions import partition_index
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol.deaths import Death
from ftlayer.runtime.protocol.messages import Deploy
from ftlayer.runtime.slot.instructions import ModeInstruction
from ftlayer.runtime.slot.mode import SlotParts, misplaced
from ftlayer.runtime.slot.shell import SlotContext
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.telemetry.settings import Tracing
from ftlayer.telemetry.spans import SpanExport, open_spans
from ftlayer.vertex.client.client import VertexClient


@dataclass(frozen=True)
class AckerSlotFactory:
    """`ftlayer.runtime.slot.shell.SlotModeFactory`. ``client`` is what the vertex is talked to with."""

    client: VertexClient
    restarts_in_place = False

    def instance(self, slot: SlotContext) -> AckerSlotShell:
        return AckerSlotShell(self.client, slot)


class AckerSlotShell:
    """`ftlayer.runtime.slot.shell.SlotModeShell` of a job whose records the vertex follows."""

    keeps_misfits = True

    def __init__(self, client: VertexClient, slot: SlotContext) -> None:
        self._client = client
        self._slot = slot
        self._graph = slot.order.graph
        self._place = this_process(f"slot {slot.order.slot}")
        self._port: VertexPort | None = None
        self._opened: dict[str, OpenedStream] = {}
        self._spans: SpanExport | None = None
        self._tracer: AckerTracer | None = None

    @property
    def touch_timeout_ms(self) -> int | None:
        return min((options.timeout_ms for _, options in self._graph.options), default=None)

    def open(self, deploy: Deploy) -> AckerTaskMode:
        """Declare the job's streams. Raises what `VertexClient.call` raises."""
        order = self._slot.order
        self._open_tracer(order.tracing)
        self._port = VertexPort(self._client, self._graph.options, self._slot.post, order.job)
        self._opened = self._port.open()
        # Streams of one job are on one shard.
        told = next(iter(self._opened.values()))
        run = self._slot.run_of(deploy)
        handler = partial(
            FTHandler, job=self._graph.name, run=run, shard=told.shard, shards=told.shards, exact=told.exact
        )
        holding = Holding(run, self._known_partitions)
        return AckerTaskMode(handler, order.options, partial(open_sink, run=run), holding)

    def _known_partitions(self, uid: str, subtask: int) -> list[str]:
        """Return which partitions that were taken over before are a subtask's."""
        parallelism = self._graph.vertex(uid).parallelism
        held = self._opened[self._graph.stream_of(uid)].held
        return [name for name in held if partition_index(name) % parallelism == subtask]

    def _open_tracer(self, tracing: Tracing | None) -> None:
        if tracing is not None:
            self._spans = open_spans(tracing, "ftlayer-slot", __version__)
        if tracing is not None and self._spans is not None:
            slot = self._slot.order.slot
            self._tracer = AckerTracer(Sampler(tracing.ratio), self._graph.name, slot, self._spans.send)

    @property
    def tracer(self) -> AckerTracer | None:
        return self._tracer

    def rules(self, parts: SlotParts) -> AckerSlot:
        assert self._port is not None
        return AckerSlot(self._port, parts)

    def positions(self, key: TaskKey) -> Mapping[str, bytes]:
        return self._opened[self._graph.stream_of(key[0])].positions

    def carry_out(self, instruction: ModeInstruction) -> None:
        assert self._port is not None
        match instruction:
            case PersistCall(key, ticket, call):
                self._port.persist(key, ticket, call)
            case RangesCall(key, number, call):
                self._port.call_ranges(key, number, call)
            case XorCall(event):
                self._port.xor(event)
            case FailCall(failures):
                self._port.fail(tuple(replace(failure, place=self._place) for failure in failures))
            case TakeReplaysCall(key, ask):
                self._port.take_replays(key, ask)
            case _:
                raise misplaced(instruction)

    def touch(self, roots: list[U64Array]) -> None:
        if self._port is not None and roots:
            self._port.touch(roots)

    def deaths(self) -> tuple[Death, ...]:
        return ()

    def damaged(self, error: BaseException) -> int:
        return 0

    def end(self, *, over: bool, stands: int) -> None:
        """See `SlotModeShell.end`."""

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
        if self._spans is not None:
            self._spans.close()
