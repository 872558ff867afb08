"""The graph that a user built, and the one that runs: chains, the edges between them, which slot runs which subtask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import pyarrow as pa

from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA
from ftlayer.checkpoint.options import FailurePolicy, OnFailure
from ftlayer.common.checks import shown
from ftlayer.errors import ConfigError
from ftlayer.functions import steps
from ftlayer.functions.aggregates import KeyedAggregate
from ftlayer.functions.pickling import needing
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import MAIN
from ftlayer.functions.windows import IntervalJoin, WindowFunction
from ftlayer.records.partitioning import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashByKey,
    Partitioner,
    Rebalance,
    ReplayAnywhere,
    ReplayByRouting,
    ReplayEverywhere,
    ReplayGlobal,
    ReplayPartitioner,
    Shuffle,
)
from ftlayer.records.traced import KeySelector
from ftlayer.topology.operators import (
    AssignWatermarks,
    CoProcess,
    FunctionSink,
    IterableSource,
    IterationHead,
    IterationTail,
    Join,
    Operator,
    PushSource,
    QueueSource,
    ReaderSource,
    Replay,
    Sink,
    Source,
)
from ftlayer.vertex.calls import StreamOptions

LETTERS = "dead letters"
"""The tag of the edges that a chain's dead letters leave by in barrier mode; no side output can be called so."""


def inputs_of(operator: Operator) -> int:
    if isinstance(operator, Source | Replay):
        return 0
    return 2 if isinstance(operator, steps.TwoInputStep) else 1


def reads_again(operator: Operator) -> bool:
    """Whether it is a source whose rows are read again, where in acker mode those of others are stored."""
    return isinstance(operator, Source) and operator.replay == "source"


def side_outputs_of(operator: Operator) -> tuple[tuple[str, pa.Schema], ...]:
    return operator.side if isinstance(operator, steps.Process | CoProcess) else ()


def outputs_of(operator: Operator) -> dict[str, pa.Schema]:
    return {steps.MAIN: operator.schema, **dict(side_outputs_of(operator))}


def declared_inputs(operator: Operator) -> tuple[pa.Schema, ...]:
    """Return the schema of each input as far as the operator knows it itself, else ()."""
    if isinstance(operator, steps.TwoInputStep):
        return operator.inputs
    if isinstance(operator, KeyedAggregate):
        return (operator.plan.input,)
    if isinstance(operator, steps.Reduce) and operator.create is not None:
        return ()
    passing = steps.Filter | steps.Reduce | AssignWatermarks | IterationHead | IterationTail | Sink
    return (operator.schema,) if isinstance(operator, passing) else ()


def keys_of(operator: Operator) -> tuple[tuple[str, ...], ...]:
    """Return the key's columns in each input; () for an input without a key."""
    match operator:
        case steps.Reduce() | KeyedAggregate() | steps.Process():
            return (operator.keys,)
        case steps.TwoInputStep():
            return operator.keys
    return ((),) * inputs_of(operator)


def rules_of_operator(operator: Operator) -> RetryRules:
    """Return which failures of an operator are worth a retry; those that only pass records on have no rules."""
    return NO_RULES if isinstance(operator, IterationHead | IterationTail) else operator.rules


def rate_limit_of(operator: Operator) -> float | None:
    """Return how many records a second a subtask takes at most; None: there is no limit."""
    return operator.rate_limit if isinstance(operator, steps.Step) else None


def is_volatile(operator: Operator) -> bool:
    return isinstance(operator, steps.KeyedStep | KeyedAggregate) and operator.volatile_state


def keeps_state(operator: Operator) -> bool:
    """Whether it remembers records beyond their call: whatever has keys."""
    return any(keys_of(operator))


def has_timers(operator: Operator) -> bool:
    """Whether it may emit records that come from no input: such are new roots."""
    if not isinstance(operator, steps.Process | CoProcess):
        return False
    from ftlayer.functions.process import uses_timers

    return uses_timers(operator.function)


def emits_roots(operator: Operator) -> bool:
    """Whether what it emits is persisted first, and replayed to where it went."""
    return isinstance(operator, Source) or has_timers(operator)


def needs_watermarks(operator: Operator) -> bool:
    if isinstance(operator, steps.Process | CoProcess):
        return bool(getattr(operator.function, "needs_event_time", False))
    return isinstance(operator, Join)


def gives_times(operator: Operator) -> bool:
    return isinstance(operator, AssignWatermarks)


@dataclass(frozen=True)
class JobVertex:
    """A chain: operators that hand records to each other within one subtask. ``uid`` is the first one's.

    ``failures``: what becomes of records that fail in it, in barrier mode; None: the first one fails the job.
    """

    uid: str
    operators: tuple[Operator, ...]
    parallelism: int
    failures: FailurePolicy | None = None

    @property
    def tells_its_end(self) -> bool:
        """Whether its subtasks say when their data has ended: the job's last checkpoint waits for them.

        Those of sources, of loops, and those in which records may wait for another attempt.
        """
        return isinstance(self.operators[0], Source | IterationHead) or self.failures is not None


@dataclass(frozen=True)
class JobEdge:
    """Records of one output of a chain on their way to one input of another.

    Attributes:
        number: position in `JobGraph.edges`; part of the ids of what travels on it.
        source, target: uids of the chains.
        input: which input of the target's first operator, 0 or 1.
        partitioner: decides from the payload; on an edge from a `Replay`, the twin that decides from the
            stored record.
        schema: of the records.
        tag: the side output of the source chain that it carries, "" for the main one, `LETTERS` for its dead letters.
        routing: for edges from a source, an operator with timers or a `Replay`, which column of the stored
            ``key_hash`` the partitioner's ``routing`` goes to and its twin reads; None where nothing is stored.
        feedback: it leads back to the head of an iteration, within each slot.
    """

    number: int
    source: str
    target: str
    input: int
    partitioner: Partitioner | ReplayPartitioner
    schema: pa.Schema
    tag: str = ""
    routing: int | None = None
    feedback: bool = False

    @property
    def is_forward(self) -> bool:
        return isinstance(self.partitioner, Forward)


class Channel(NamedTuple):
    """One subtask's records on their way to one other, by one edge."""

    edge: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class JobGraph:
    """The graph that runs. Subtask i of a chain runs in slot i; a `Replay` has one subtask (see `slot_of`).

    ``options`` has the retry options of each stream that records are persisted under. ``max_parallelism`` is the
    number of key groups in barrier mode (the graph is not tracked then), 0 without checkpoints.
    """

    name: str
    vertices: tuple[JobVertex, ...]
    edges: tuple[JobEdge, ...]
    tracked: bool
    options: tuple[tuple[str, StreamOptions], ...] = ()
    max_parallelism: int = 0

    @property
    def checkpointed(self) -> bool:
        return self.max_parallelism > 0

    @cached_property
    def slots(self) -> int:
        return max(vertex.parallelism for vertex in self.vertices)

    def vertex(self, uid: str) -> JobVertex:
        return self._by_uid[uid]

    def edges_from(self, uid: str) -> tuple[JobEdge, ...]:
        return tuple(edge for edge in self.edges if edge.source == uid)

    def edges_into(self, uid: str) -> tuple[JobEdge, ...]:
        return tuple(edge for edge in self.edges if edge.target == uid)

    def slot_of(self, uid: str, subtask: int) -> int:
        """Return the slot of a subtask. Replays are spread over the slots, the first one's in slot 0."""
        if isinstance(self.vertex(uid).operators[0], Replay):
            return self.replays.index(uid) % self.slots
        return subtask

    def subtasks_in(self, slot: int) -> tuple[tuple[str, int], ...]:
        return tuple(
            (vertex.uid, subtask)
            for vertex in self.vertices
            for subtask in range(vertex.parallelism)
            if self.slot_of(vertex.uid, subtask) == slot
        )

    def channels(self, edge: JobEdge) -> tuple[Channel, ...]:
        senders = range(self.vertex(edge.source).parallelism)
        receivers = range(self.vertex(edge.target).parallelism)
        return tuple(
            Channel(edge.number, sender, receiver)
            for sender in senders
            for receiver in receivers
            if not edge.is_forward or sender == receiver
        )

    def loop_of(self, head: str) -> set[str]:
        """Return the chains between the head of a loop and the tails that lead back to it, with both."""
        return self._reached(head, back=False) & self._reached(head, back=True)

    def _reached(self, uid: str, *, back: bool) -> set[str]:
        found: set[str] = set()
        todo = [uid]
        while todo:
            here = todo.pop()
            if here not in found:
                found.add(here)
                edges = self.edges_into(here) if back else self.edges_from(here)
                todo += [edge.source if back else edge.target for edge in edges]
        return found

    def sends_letters(self, uid: str) -> bool:
        """Whether a chain's dead letters are records of the topology: then it keeps none."""
        return any(edge.tag == LETTERS for edge in self.edges_from(uid))

    def sources(self) -> tuple[Source, ...]:
        return tuple(op for vertex in self.vertices for op in vertex.operators if isinstance(op, Source))

    def stream_of(self, uid: str, tag: str = "") -> str:
        return stream_name(self.name, uid, tag)

    @cached_property
    def _by_uid(self) -> dict[str, JobVertex]:
        return {vertex.uid: vertex for vertex in self.vertices}

    @cached_property
    def replays(self) -> list[str]:
        return [vertex.uid for vertex in self.vertices if isinstance(vertex.operators[0], Replay)]


def stream_name(topology: str, uid: str, tag: str = "") -> str:
    return f"{topology}/{uid}:{tag}" if tag else f"{topology}/{uid}"


MAX_NAME_CHARS = 100
"""A stream's name in the vertex is made of three of them."""

INGEST = "ingest"
"""The vertex files ingested records under this name: no job may have it."""


def check_name(name: object, what: str) -> None:
    """Raise `ConfigError` unless ``name`` can be a uid, a tag or part of a stream's name in the vertex."""
    if (
        not isinstance(name, str)
        or not 1 <= len(name) <= MAX_NAME_CHARS
        or not all(char.isalnum() or char in "_-." for char in name)
    ):
        raise ConfigError(
            f"{what}: expected 1 to {MAX_NAME_CHARS} letters, digits, '_', '-', '.', got {shown(name)}"
        )


def check_job_name(name: object) -> None:
    check_name(name, "name of the topology")
    if name == INGEST:
        raise ConfigError(
            f"name of the topology: {INGEST!r} is what ingested records are filed under; choose another"
        )


_KINDS: dict[type, str] = {
    steps.FlatMap: "flat_map",
    steps.MapBatches: "map_batches",
    steps.MapAsync: "map_async",
    AssignWatermarks: "watermarks",
    IterationHead: "iteration",
    CoProcess: "co_process",
    KeyedAggregate: "aggregate",
}


def kind_of(operator: Operator) -> str:
    if isinstance(operator, steps.Process) and isinstance(operator.function, WindowFunction):
        return "window"
    if isinstance(operator, steps.Reduce) and operator.create is not None:
        return "aggregate"
    kind = type(operator)
    return _KINDS.get(kind, kind.__name__.lower())


def display_name(operator: Operator) -> str:
    """Say in a few words what an operator does: ``map(parse)``, ``reduce(add by user)``."""
    match operator:
        case Source():
            return f"source({_source(operator)})"
        case Replay():
            return f"replay({operator.stream})"
        case steps.Reduce():
            return f"{kind_of(operator)}({function_name(operator.function)} by {', '.join(operator.keys)})"
        case KeyedAggregate(plan=plan):
            return f"aggregate({', '.join(each.call.name for each in plan.aggregates)} by {', '.join(operator.keys)})"
        case steps.Process(function=WindowFunction(kind=windows)):
            return f"window({windows} by {', '.join(operator.keys)})"
        case steps.Process():
            by = f" by {', '.join(operator.keys)}" if operator.keys else ""
            return f"process({function_name(operator.function)}{by})"
        case AssignWatermarks():
            return f"watermarks({operator.column} - {operator.out_of_orderness_ms} ms)"
        case CoProcess(function=IntervalJoin() as join):
            return _joined(join, operator.keys)
        case CoProcess():
            by = f" by {_both(operator.keys)}" if operator.keys[0] else ""
            return f"co_process({function_name(operator.function)}{by})"
        case Join():
            return _joined(operator, operator.keys)
        case steps.Step():
            return f"{kind_of(operator)}({function_name(operator.function)})"
        case IterationHead():
            return f"iteration(ends after {operator.max_wait_ms} ms)"
        case IterationTail():
            return "feedback"
    connector = operator.connector
    if isinstance(connector, FunctionSink):
        return f"sink({function_name(connector.function)})"
    return f"sink({type(connector.writer).__name__})"


def placed(reason: str, uid: str, graph: JobGraph) -> str:
    """Return a reason with the operator that it is about, by uid and by what it does, unless it says so itself."""
    if not uid or repr(uid) in reason:
        return reason
    operators = (operator for vertex in graph.vertices for operator in vertex.operators)
    found = next((f" ({display_name(operator)})" for operator in operators if operator.uid == uid), "")
    return f"{uid!r}{found}: {reason}"


def operators_needing(missing: str, graph: JobGraph) -> str:
    operators = (operator for vertex in graph.vertices for operator in vertex.operators)
    return needing(missing, [(f"{op.uid!r} ({display_name(op)})", op) for op in operators])


def function_name(function: Callable[..., Any]) -> str:
    """Return what a reader knows a function by: its name, or its class for an object."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__name__)
    return str(name).rpartition("<locals>.")[2]


def _joined(join: Join | IntervalJoin, keys: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    bounds = f"{join.lower_ms} to {join.upper_ms} ms"
    return f"join({function_name(join.function)} by {_both(keys)}, {bounds})"


def _both(keys: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    return " = ".join(", ".join(columns) for columns in keys)


def _source(source: Source) -> str:
    match source.connector:
        case ReaderSource(reader):
            return type(reader).__name__
        case IterableSource(partitions):
            return "1 iterable" if len(partitions) == 1 else f"{len(partitions)} iterables"
        case PushSource(start):
            return f"push, {function_name(start)}"
        case QueueSource(queue):
            return type(queue).__name__


def replay_of(vertex: JobVertex) -> Replay | None:
    operator = vertex.operators[0]
    return operator if isinstance(operator, Replay) else None


def partitioner_name(partitioner: Partitioner | ReplayPartitioner, routing: int | None = None) -> str:
    """Say in a few words where an edge's records go: ``hash(user)``, ``rebalance``, ``by key_hash[0]``."""
    match partitioner:
        case HashByKey(KeySelector(columns)):
            return f"hash({', '.join(columns)})"
        case Custom(selector, function):
            return f"custom({function_name(function)}({', '.join(selector.columns)}))"
        case ReplayByRouting():
            return f"by key_hash[{routing}]"
        case Forward() | Rebalance() | Shuffle() | Broadcast() | Global() | HashByKey():
            return type(partitioner).__name__.removesuffix("ByKey").lower()
    words = {ReplayAnywhere: "any channel", ReplayEverywhere: "every channel", ReplayGlobal: "channel 0"}
    return words.get(type(partitioner), type(partitioner).__name__)


def stored_name(partitioner: Partitioner | ReplayPartitioner) -> str:
    return "subtask" if isinstance(partitioner, Forward) else partitioner_name(partitioner)


def emitter_of(graph: JobGraph, replay: Replay) -> JobVertex:
    (chain,) = (vertex for vertex in graph.vertices if vertex.operators[-1].uid == replay.of)
    return chain


def persisted_name(graph: JobGraph, replay: Replay) -> str:
    """Say what is persisted on its way out of an operator: all that a source emits, of others what timers do."""
    of_source = isinstance(emitter_of(graph, replay).operators[-1], Source)
    return "records" if of_source else "timers' records"


def original_edges(graph: JobGraph, replay: Replay) -> list[JobEdge]:
    return [edge for edge in graph.edges_from(emitter_of(graph, replay).uid) if edge.tag == replay.tag]


@dataclass(frozen=True)
class StreamNode:
    """An operator and the number of its subtasks.

    ``retry`` has the retry options of a source's records; None for those of the topology. ``on_failure``: what
    becomes of records that fail in it in barrier mode; None: as the topology's checkpointing says.
    """

    operator: Operator
    parallelism: int
    retry: StreamOptions | None = None
    on_failure: OnFailure | None = None

    @property
    def uid(self) -> str:
        return self.operator.uid

    @property
    def name(self) -> str:
        return display_name(self.operator)


@dataclass(frozen=True)
class StreamEdge:
    """Records of one output of an operator on their way to one input of another.

    ``source`` and ``target`` are uids, ``tag`` is the output ("" for the main one, `LETTERS` for dead letters). Without
    a ``partitioner`` it is `Forward` where both have the same parallelism, else `Rebalance`. ``feedback``: it leads
    from the end of an iteration back to its head.
    """

    source: str
    target: str
    input: int = 0
    partitioner: Partitioner | None = None
    tag: str = MAIN
    feedback: bool = False


@dataclass(frozen=True)
class StreamGraph:
    """Operators and edges in the order in which they were made. `ftlayer.topology.checks.check_graph` checks one."""

    name: str
    nodes: tuple[StreamNode, ...]
    edges: tuple[StreamEdge, ...]

    def node(self, uid: str) -> StreamNode:
        return self._by_uid[uid]

    def edges_from(self, uid: str) -> tuple[StreamEdge, ...]:
        return self._outgoing.get(uid, ())

    def edges_into(self, uid: str) -> tuple[StreamEdge, ...]:
        return self._incoming.get(uid, ())

    def partitioner_of(self, edge: StreamEdge) -> Partitioner:
        """Return the edge's partitioner, the automatic one where none was chosen."""
        if edge.partitioner is not None:
            return edge.partitioner
        same = self.node(edge.source).parallelism == self.node(edge.target).parallelism
        return Forward() if same else Rebalance()

    def schema_of(self, edge: StreamEdge) -> pa.Schema:
        if edge.tag == LETTERS:
            return LETTER_SCHEMA
        return outputs_of(self.node(edge.source).operator)[edge.tag]

    @cached_property
    def in_order(self) -> tuple[StreamNode, ...]:
        """The nodes, each behind all that it gets records from for the first time: feedback edges do not count.

        Those in and behind another circle are left out.
        """
        # Kahn, "Topological sorting of large networks", 1962; as made where free.
        waits_for = {
            node.uid: sum(not edge.feedback for edge in self.edges_into(node.uid)) for node in self.nodes
        }
        ready = [node for node in self.nodes if not waits_for[node.uid]]
        place = {node.uid: number for number, node in enumerate(self.nodes)}
        ordered: list[StreamNode] = []
        while ready:
            ordered.append(node := ready.pop(0))
            for edge in self.edges_from(node.uid):
                waits_for[edge.target] -= not edge.feedback
                if not waits_for[edge.target] and not edge.feedback:
                    ready.append(self.node(edge.target))
            ready.sort(key=lambda one: place[one.uid])
        return tuple(ordered)

    def circle(self) -> tuple[str, ...]:
        """Return the uids of one circle in the direction of the records, () if there is none.

        Those that feedback edges close do not count.
        """
        done = {node.uid for node in self.in_order}
        rest = [node.uid for node in self.nodes if node.uid not in done]
        if not rest:
            return ()
        # Each of the rest waits for another of the rest: going back from one has to come round.
        path: list[str] = []
        here = rest[0]
        while here not in path:
            path.append(here)
            into = [edge.source for edge in self.edges_into(here) if not edge.feedback]
            here = next(uid for uid in into if uid not in done)
        return tuple(reversed(path[path.index(here) :]))

    def behind(self, uid: str) -> frozenset[str]:
        """Return the uids of all operators that records of this one may reach."""
        found: set[str] = set()
        todo = [uid]
        while todo:
            new = {edge.target for edge in self.edges_from(todo.pop())} - found
            found |= new
            todo += new
        return frozenset(found)

    @cached_property
    def _by_uid(self) -> dict[str, StreamNode]:
        return {node.uid: node for node in self.nodes}

    @cached_property
    def _outgoing(self) -> dict[str, tuple[StreamEdge, ...]]:
        return {uid: tuple(edge for edge in self.edges if edge.source == uid) for uid in self._by_uid}

    @cached_property
    def _incoming(self) -> dict[str, tuple[StreamEdge, ...]]:
        return {uid: tuple(edge for edge in self.edges if edge.target == uid) for uid in self._by_uid}
