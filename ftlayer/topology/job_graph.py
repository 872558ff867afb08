"""The graph as it runs: chains of operators, the edges between them, and which slot runs which subtask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import pyarrow as pa

from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.common.checks import shown
from ftlayer.errors import ConfigError
from ftlayer.functions.aggregates import KeyedAggregate
from ftlayer.functions.failures import NO_RULES, RetryRules
from ftlayer.functions.interval_join import IntervalJoin
from ftlayer.functions.pickling import needing
from ftlayer.functions.steps import (
    MAIN,
    Filter,
    FlatMap,
    KeyedStep,
    MapAsync,
    MapBatches,
    Process,
    Reduce,
    Step,
    TwoInputStep,
)
from ftlayer.functions.windows import WindowFunction
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
    return 2 if isinstance(operator, TwoInputStep) else 1


def reads_again(operator: Operator) -> bool:
    """Whether it is a source whose rows are read again, where in acker mode those of others are stored."""
    return isinstance(operator, Source) and operator.replay == "source"


def side_outputs_of(operator: Operator) -> tuple[tuple[str, pa.Schema], ...]:
    return operator.side if isinstance(operator, Process | CoProcess) else ()


def outputs_of(operator: Operator) -> dict[str, pa.Schema]:
    """Return the schema of each output by its tag, `MAIN` first."""
    return {MAIN: operator.schema, **dict(side_outputs_of(operator))}


def declared_inputs(operator: Operator) -> tuple[pa.Schema, ...]:
    """Return the schema of each input as far as the operator knows it itself, else ()."""
    if isinstance(operator, TwoInputStep):
        return operator.inputs
    if isinstance(operator, KeyedAggregate):
        return (operator.plan.input,)
    if isinstance(operator, Reduce) and operator.create is not None:
        return ()
    passing = Filter | Reduce | AssignWatermarks | IterationHead | IterationTail | Sink
    return (operator.schema,) if isinstance(operator, passing) else ()


def keys_of(operator: Operator) -> tuple[tuple[str, ...], ...]:
    """Return the key's columns in each input; () for an input without a key."""
    match operator:
        case Reduce() | KeyedAggregate() | Process():
            return (operator.keys,)
        case TwoInputStep():
            return operator.keys
    return ((),) * inputs_of(operator)


def rules_of_operator(operator: Operator) -> RetryRules:
    """Return which failures of an operator are worth a retry; those that only pass records on have no rules."""
    return NO_RULES if isinstance(operator, IterationHead | IterationTail) else operator.rules


def rate_limit_of(operator: Operator) -> float | None:
    """Return how many records a second a subtask takes at most; None: there is no limit."""
    return operator.rate_limit if isinstance(operator, Step) else None


def is_volatile(operator: Operator) -> bool:
    return isinstance(operator, KeyedStep | KeyedAggregate) and operator.volatile_state


def keeps_state(operator: Operator) -> bool:
    """Whether it remembers records beyond their call: whatever has keys."""
    return any(keys_of(operator))


def has_timers(operator: Operator) -> bool:
    """Whether it may emit records that come from no input: such are new roots."""
    if not isinstance(operator, Process | CoProcess):
        return False
    from ftlayer.functions.process import uses_timers

    return uses_timers(operator.function)


def emits_roots(operator: Operator) -> bool:
    """Whether what it emits is persisted first, and replayed to where it went."""
    return isinstance(operator, Source) or has_timers(operator)


def needs_watermarks(operator: Operator) -> bool:
    """Whether it works on event time for certain. (Whether a user's function sets such timers cannot be known.)"""
    if isinstance(operator, Process | CoProcess):
        return bool(getattr(operator.function, "needs_event_time", False))
    return isinstance(operator, Join)


def gives_times(operator: Operator) -> bool:
    """Whether records have a time behind it, wherever they come from."""
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
        found = {uid}
        todo = [uid]
        while todo:
            here = todo.pop()
            edges = self.edges_into(here) if back else self.edges_from(here)
            for other in (edge.source if back else edge.target for edge in edges):
                if other not in found:
                    found.add(other)
                    todo.append(other)
        return found

    def sends_letters(self, uid: str) -> bool:
        """Whether a chain's dead letters are records of the topology: then it keeps none."""
        return any(edge.tag == LETTERS for edge in self.edges_from(uid))

    def sources(self) -> tuple[Source, ...]:
        return tuple(op for vertex in self.vertices for op in vertex.operators if isinstance(op, Source))

    def stream_of(self, uid: str, tag: str = "") -> str:
        """Return the name under which records of a source, or of an operator's timers, are persisted."""
        return stream_name(self.name, uid, tag)

    @cached_property
    def _by_uid(self) -> dict[str, JobVertex]:
        return {vertex.uid: vertex for vertex in self.vertices}

    @cached_property
    def replays(self) -> list[str]:
        """Return the uids of all chains of a `Replay`."""
        return [vertex.uid for vertex in self.vertices if isinstance(vertex.operators[0], Replay)]


def stream_name(topology: str, uid: str, tag: str = "") -> str:
    """Return the name under which an output's records are persisted."""
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


def kind_of(operator: Operator) -> str:
    """Return the word that automatic uids are made of."""
    match operator:
        case FlatMap():
            return "flat_map"
        case MapBatches():
            return "map_batches"
        case MapAsync():
            return "map_async"
        case AssignWatermarks():
            return "watermarks"
        case IterationHead():
            return "iteration"
        case Process(function=WindowFunction()):
            return "window"
        case CoProcess():
            return "co_process"
        case KeyedAggregate():
            return "aggregate"
        case Reduce() if operator.create is not None:
            return "aggregate"
    return type(operator).__name__.lower()


def display_name(operator: Operator) -> str:
    """Say in a few words what an operator does: ``map(parse)``, ``reduce(add by user)``."""
    match operator:
        case Source():
            return f"source({_source(operator)})"
        case Replay():
            return f"replay({operator.stream})"
        case Reduce():
            return f"{kind_of(operator)}({function_name(operator.function)} by {', '.join(operator.keys)})"
        case KeyedAggregate(plan=plan):
            return f"aggregate({', '.join(each.call.name for each in plan.aggregates)} by {', '.join(operator.keys)})"
        case Process(function=WindowFunction(kind=windows)):
            return f"window({windows} by {', '.join(operator.keys)})"
        case Process():
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
        case Step():
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
    found = next((display_name(operator) for operator in operators if operator.uid == uid), "")
    return f"{uid!r}{f' ({found})' if found else ''}: {reason}"


def operators_needing(missing: str, graph: JobGraph) -> str:
    """Return which operators of a graph refer to a module or name, by uid and by what they do; "" for none."""
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
    """Return the `Replay` that a chain consists of, None for any other chain."""
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
        case ReplayAnywhere():
            return "any channel"
        case ReplayEverywhere():
            return "every channel"
        case ReplayGlobal():
            return "channel 0"
        case Forward() | Rebalance() | Shuffle() | Broadcast() | Global() | HashByKey():
            return type(partitioner).__name__.removesuffix("ByKey").lower()
    return type(partitioner).__name__


def stored_name(partitioner: Partitioner | ReplayPartitioner) -> str:
    return "subtask" if isinstance(partitioner, Forward) else partitioner_name(partitioner)


def emitter_of(graph: JobGraph, replay: Replay) -> JobVertex:
    """Return the chain whose records ``replay`` sends again."""
    (chain,) = (vertex for vertex in graph.vertices if vertex.operators[-1].uid == replay.of)
    return chain


def persisted_name(graph: JobGraph, replay: Replay) -> str:
    """Say what is persisted on its way out of an operator: all that a source emits, of others what timers do."""
    of_source = isinstance(emitter_of(graph, replay).operators[-1], Source)
    return "records" if of_source else "timers' records"


def original_edges(graph: JobGraph, replay: Replay) -> list[JobEdge]:
    """Return the edges whose records ``replay`` sends again, in the order of its own."""
    return [edge for edge in graph.edges_from(emitter_of(graph, replay).uid) if edge.tag == replay.tag]
