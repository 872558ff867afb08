"""The state that each slot begins with when a checkpoint is restored, at any parallelism."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from ftlayer.checkpoint import snapshots
from ftlayer.checkpoint.options import may_leave
from ftlayer.checkpoint.storage.loading import utc_text
from ftlayer.common.printable import shown_url
from ftlayer.errors import CheckpointDamagedError, IncompatibleCheckpointError
from ftlayer.functions.keyed import plain_name
from ftlayer.records.partitioning import (
    Broadcast,
    Custom,
    Global,
    HashByKeyGroup,
    Partitioner,
    Rebalance,
    ReplayPartitioner,
    Shuffle,
    groups_of,
)
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.barrier_mode.task.failing.attempts import WAITING_TABLE
from ftlayer.runtime.connectors.offset_reader import partition_index
from ftlayer.runtime.task.routes import key_schemas
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex, inputs_of
from ftlayer.topology.operators import IterableSource, Source


def operator_infos(graph: JobGraph) -> tuple[snapshots.OperatorInfo, ...]:
    """Describe all operators, chain by chain, each in the order in which records pass through it."""
    return tuple(
        snapshots.OperatorInfo(
            uid=operator.uid,
            chain=vertex.uid,
            kind=type(operator).__name__,
            parallelism=vertex.parallelism,
            keys=tuple(str(field.type) for field in keys.get(operator.uid, ())),
        )
        for vertex in graph.vertices
        for keys in [key_schemas(vertex.operators, _inputs(graph, vertex))]
        for operator in vertex.operators
    )


def edge_infos(graph: JobGraph) -> tuple[snapshots.EdgeInfo, ...]:
    between = [(edge.source, edge.tag, edge.target, edge.input) for edge in graph.edges]
    return tuple(
        snapshots.EdgeInfo(between[:number].count(ends), partitioner_text(graph.edges[number].partitioner))
        for number, ends in enumerate(between)
    )


def partitioner_text(partitioner: Partitioner | ReplayPartitioner) -> str:
    """Say what decides about channels: equal texts, equal channels.

    A function of the user's is known by its name: another one of the same name goes unnoticed.
    """
    kind = type(partitioner).__name__.lower()
    match partitioner:
        case HashByKeyGroup(selector=KeySelector(columns)):
            return f"{kind}({', '.join(columns)})"
        case Custom(KeySelector(columns), function):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return f"{kind}({name}, {', '.join(columns)})"
        case _:
            return kind


def check_fits(checkpoint: snapshots.Checkpoint, graph: JobGraph) -> None:
    """Raise `IncompatibleCheckpointError` for other key groups, too many subtasks, or keys of other types."""
    name = named(checkpoint)
    if checkpoint.max_parallelism != graph.max_parallelism:
        raise IncompatibleCheckpointError(
            f"{name} has {checkpoint.max_parallelism} key groups, and the job has {graph.max_parallelism}; "
            f"set max_parallelism={checkpoint.max_parallelism}: it cannot change during a job's life"
        )
    for vertex in graph.vertices:
        if vertex.parallelism > checkpoint.max_parallelism:
            raise IncompatibleCheckpointError(
                f"{vertex.uid!r} has parallelism {vertex.parallelism}, and {name} has "
                f"{checkpoint.max_parallelism} key groups; lower the parallelism"
            )
    _check_keys(checkpoint, graph)


def unclaimed(checkpoint: snapshots.Checkpoint, graph: JobGraph) -> dict[str, tuple[str, str]]:
    """Return, as texts, what belongs to operators, partitions of sources, or heads of chains, that the graph lacks.

    One text for each kind of thing and operator, with the operator and the thing's name in it, if it has one.
    """
    known = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
    found = {text: (uid, name) for uid, name, text in _belongings(checkpoint) if uid not in known}
    retrying = {
        operator.uid
        for vertex in graph.vertices
        if vertex.failures is not None
        for operator in vertex.operators
    }
    for part in checkpoint.subtasks:
        for uid in sorted(_waited_at(part) & known - retrying):
            text = (
                f"records that wait for another attempt, and enter at {uid!r}, which has no failure policy any more "
                "(restore with the policy until none waits)"
            )
            found[text] = uid, WAITING_TABLE
        for partition in part.positions:
            if part.uid in known and not has_partition(graph.vertex(part.uid), partition):
                text = f"the position of partition {partition_index(partition)} of source {part.uid!r}"
                found[text] = part.uid, f"partition-{partition_index(partition)}"
    return found


def _waited_at(part: snapshots.SubtaskSnapshot) -> set[str]:
    tables = () if part.keyed is None else part.keyed.tables
    waits = {part.uid, *(table.operator for table in tables if table.name == WAITING_TABLE)}
    return waits if part.waiting else set()


def has_partition(vertex: JobVertex, partition: str) -> bool:
    """Whether a source still has a partition; those of a reader are the reader's to know."""
    source = vertex.operators[0]
    if not isinstance(source, Source) or not isinstance(source.connector, IterableSource):
        return True
    return partition_index(partition) < len(source.connector.partitions)


def named(checkpoint: snapshots.Checkpoint) -> str:
    where = f" at {shown_url(checkpoint.location)}" if checkpoint.location else ""
    return f"{checkpoint.kind} {checkpoint.checkpoint}{where}"


def _check_keys(checkpoint: snapshots.Checkpoint, graph: JobGraph) -> None:
    stateful = {
        table.operator
        for part in checkpoint.subtasks
        if part.keyed is not None
        for table in part.keyed.tables
    }
    before = {info.uid: info.keys for info in checkpoint.operators}
    for info in operator_infos(graph):
        keys = before.get(info.uid, info.keys)
        if info.uid in stateful and keys != info.keys:
            raise IncompatibleCheckpointError(
                f"operator {info.uid!r} has state by a key of ({', '.join(keys)}) in {named(checkpoint)}, and its key "
                f"is ({', '.join(info.keys) or 'none'}) now; state cannot move between keys: go back to the key it "
                "had, or give the operator another uid and allow_unclaimed_state=True"
            )


def _belongings(checkpoint: snapshots.Checkpoint) -> Iterator[tuple[str, str, str]]:
    """Yield (operator, name of a thing that has one, what it is)."""
    for part in checkpoint.subtasks:
        for table in () if part.keyed is None else part.keyed.tables:
            if table.name == WAITING_TABLE and not part.waiting:
                continue  # Nothing is in it.
            what = f"keyed state {table.name!r} of operator {table.operator!r}"
            yield table.operator, plain_name(table.name), what
        for state in part.operators:
            yield state.operator, state.name, f"operator state {state.name!r} of operator {state.operator!r}"
        if part.positions:
            yield part.uid, "", f"positions of source {part.uid!r}"
        for committable in part.committables:
            yield committable.sink, "", f"uncommitted rows of sink {committable.sink!r}"
        for channel in part.channels:
            # What is on its way belongs to who receives it.
            yield channel.target, "", f"records on their way to operator {channel.target!r}"


def _inputs(graph: JobGraph, vertex: JobVertex) -> list[pa.Schema]:
    schemas = {edge.input: edge.schema for edge in graph.edges_into(vertex.uid)}
    return [schemas[number] for number in range(inputs_of(vertex.operators[0]))]


KEEP_GROUPS = "groups"
"""`InFlight.keep` for rows of the task's key groups alone."""

COPIES = partitioner_text(Broadcast())


class InFlightDealer:
    """Deals them out. ``incoming[uid, subtask]`` and ``outgoing[uid, subtask]`` are in the order of each channel."""

    def __init__(self, checkpoint: snapshots.Checkpoint, graph: JobGraph) -> None:
        """Raises `IncompatibleCheckpointError` naming the edge whose records cannot be dealt out.

        Records for operators that the graph has no more are left out.
        """
        self.incoming: dict[tuple[str, int], list[snapshots.InFlight]] = defaultdict(list)
        self.outgoing: dict[tuple[str, int], list[snapshots.InFlight]] = defaultdict(list)
        self._checkpoint = checkpoint
        self._graph = graph
        self._parallelism = {info.chain: info.parallelism for info in checkpoint.operators}
        # Records leave a chain from its last operator, to the first one of another.
        self._last_of = {info.chain: info.uid for info in checkpoint.operators}
        self._known = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
        for states in self._by_edge():
            self._deal(states)

    def _by_edge(self) -> Iterator[list[snapshots.ChannelState]]:
        # On each channel what had left its sender comes first.
        edges: dict[int, list[snapshots.ChannelState]] = defaultdict(list)
        for part in self._checkpoint.subtasks:
            for state in part.channels:
                edges[state.edge].append(state)
        for states in edges.values():
            yield sorted(states, key=lambda state: (state.sender, state.receiver, state.outgoing))

    def _deal(self, states: Sequence[snapshots.ChannelState]) -> None:
        first = states[0]
        if first.target not in self._known:
            return
        edge = self._edge_of(first)
        before, now = self._checkpoint.edges[first.edge].partitioner, partitioner_text(edge.partitioner)
        receivers = self._graph.vertex(edge.target).parallelism
        same_receivers = self._parallelism[first.target] == receivers
        same_senders = self._parallelism[first.source] == self._graph.vertex(edge.source).parallelism
        if before == COPIES != now:
            raise self._refusal(first, f"each receiver had a copy, and they are partitioned by {now} now")
        if before != now:
            self._anew(edge, states, f"they were partitioned by {before}, and are by {now} now")
        elif same_receivers and same_senders:
            self._as_they_were(edge, states)
        elif same_receivers:
            # Who sends has changed, not who receives.
            for state in states:
                self._put(edge, state, state.receiver)
        else:
            were = self._parallelism[first.target]
            reason = f"their channels ({now}) mean nothing at parallelism {receivers} instead of {were}"
            self._anew(edge, states, reason)

    def _anew(self, edge: JobEdge, states: Sequence[snapshots.ChannelState], reason: str) -> None:
        """Deal them out by the edge's partitioner; ``reason`` is why they cannot go where they were going."""
        receivers = self._graph.vertex(edge.target).parallelism
        if isinstance(edge.partitioner, HashByKeyGroup):
            for state in states:
                for receiver in range(receivers):
                    self._put(edge, state, receiver, KEEP_GROUPS)
        elif isinstance(edge.partitioner, Global):
            for state in states:
                self._put(edge, state, 0)
        elif isinstance(edge.partitioner, Rebalance | Shuffle):
            channels = {(state.sender, state.receiver): None for state in states}
            turn = {channel: number for number, channel in enumerate(channels)}
            for state in states:
                self._put(edge, state, turn[state.sender, state.receiver] % receivers)
        else:
            raise self._refusal(states[0], reason)

    def _as_they_were(self, edge: JobEdge, states: Sequence[snapshots.ChannelState]) -> None:
        for state in states:
            part = snapshots.InFlight(edge.number, state.sender, state)
            if state.outgoing:
                self.outgoing[edge.source, state.sender].append(part)
            else:
                self.incoming[edge.target, state.receiver].append(part)

    def _put(self, edge: JobEdge, state: snapshots.ChannelState, receiver: int, keep: str = "") -> None:
        sender = state.sender % self._graph.vertex(edge.source).parallelism
        self.incoming[edge.target, receiver].append(snapshots.InFlight(edge.number, sender, state, keep))

    def _edge_of(self, state: snapshots.ChannelState) -> JobEdge:
        """Return the edge between the same operators, which may be in chains that are cut otherwise."""
        found = [
            edge
            for edge in self._graph.edges
            if (edge.tag, edge.target, edge.input) == (state.tag, state.target, state.input)
            and self._graph.vertex(edge.source).operators[-1].uid == self._last_of[state.source]
        ]
        if not found:
            raise self._refusal(state, "the job has no such stream between chains any more")
        # Several edges may lead from the same output to the same input.
        place = self._checkpoint.edges[state.edge].place
        if place >= len(found):
            raise self._refusal(
                state, f"there were {place + 1} such streams or more, and there are {len(found)} now"
            )
        return found[place]

    def _refusal(self, state: snapshots.ChannelState, reason: str) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{named(self._checkpoint)} is unaligned, and holds records on their way from {state.source!r} to "
            f"{state.target!r}: {reason}. Restore the job as it was, take a savepoint (which is aligned, and holds no "
            "such records), and restore from that"
        )


@dataclass(frozen=True)
class Assignment:
    """The checkpoint that is restored: every subtask, slot by slot, and ``dropped`` what no operator claims."""

    by_slot: dict[int, snapshots.Restore]
    dropped: tuple[str, ...]


def restores(
    checkpoint: snapshots.Checkpoint, graph: JobGraph, *, allow_unclaimed: bool | tuple[str, ...]
) -> Assignment:
    """Deal a checkpoint out to the slots of a graph with checkpoints.

    Keyed state goes to the subtask that has its key group, by the uid of its operator; snapshots hold more, and are
    to be filtered by group and operator. Of operator state each subtask gets its own where the parallelism is the
    same; otherwise SPLIT items are dealt out round-robin, in their order. ``checkpoint.location`` has to be the
    directory that its pieces' paths are relative to (`ftlayer.checkpoint.storage.opening.pieces_directory`).

    Raises `IncompatibleCheckpointError`: see `check_fits` and `InFlightDealer`, and for state that no operator claims
    unless ``allow_unclaimed``. `CheckpointDamagedError` if two subtasks differ about a source's position.
    """
    check_fits(checkpoint, graph)
    dropped = unclaimed(checkpoint, graph)
    refused = {
        text: uid if not name else f"{uid}/{name}"
        for text, (uid, name) in dropped.items()
        if not may_leave(allow_unclaimed, uid, name)
    }
    if refused:
        raise IncompatibleCheckpointError(
            f"{named(checkpoint)} holds what no operator of the job claims: {', '.join(refused)}. Give the operators "
            "the uids they had and sources their partitions, or say what may be dropped: "
            f"allow_unclaimed_state={sorted(set(refused.values()))}, or allow_unclaimed_state=True for all of it"
        )
    in_flight = InFlightDealer(checkpoint, graph)
    states = _states_of(checkpoint)
    times, splits = _event_times(checkpoint), _split_times(checkpoint)
    positions = {vertex.uid: _positions(checkpoint, vertex) for vertex in graph.vertices}
    subtasks = {
        (vertex.uid, subtask): snapshots.SubtaskRestore(
            uid=vertex.uid,
            subtask=subtask,
            keyed=_keyed(checkpoint, graph, vertex, subtask),
            operators=_shares(states, vertex, subtask),
            positions=positions[vertex.uid],
            read=0 if subtask else _read_of(checkpoint, vertex.uid) or 0,
            event_times={each.uid: times[each.uid] for each in vertex.operators if each.uid in times},
            split_times={each.uid: splits[each.uid] for each in vertex.operators if each.uid in splits},
            in_flight=tuple(in_flight.incoming[vertex.uid, subtask]),
            outgoing=tuple(in_flight.outgoing[vertex.uid, subtask]),
        )
        for vertex in graph.vertices
        for subtask in range(vertex.parallelism)
    }
    by_slot = {
        slot: snapshots.Restore(
            checkpoint.checkpoint,
            checkpoint.location,
            tuple(subtasks[each] for each in graph.subtasks_in(slot)),
        )
        for slot in range(graph.slots)
    }
    return Assignment(by_slot, tuple(dropped))


def _keyed(
    checkpoint: snapshots.Checkpoint, graph: JobGraph, vertex: JobVertex, subtask: int
) -> tuple[snapshots.KeyedSnapshot, ...]:
    groups = groups_of(subtask, vertex.parallelism, graph.max_parallelism)
    uids = {operator.uid for operator in vertex.operators}
    return tuple(
        part.keyed
        for part in checkpoint.subtasks
        if part.keyed is not None
        and part.keyed.first_group < groups.stop
        and part.keyed.end_group > groups.start
        and any(table.operator in uids for table in part.keyed.tables)
    )


@dataclass(frozen=True)
class _Whole:
    """An operator's state of one name: what each of ``parallelism`` subtasks had."""

    parallelism: int
    parts: dict[int, snapshots.OperatorState] = field(default_factory=dict)


def _states_of(checkpoint: snapshots.Checkpoint) -> dict[str, dict[str, _Whole]]:
    parallelism = {info.uid: info.parallelism for info in checkpoint.operators}
    found: dict[str, dict[str, _Whole]] = {}
    for part in checkpoint.subtasks:
        for state in part.operators:
            whole = _Whole(parallelism.get(state.operator, 0))
            names = found.setdefault(state.operator, {})
            names.setdefault(state.name, whole).parts[part.subtask] = state
    return found


def _shares(
    states: dict[str, dict[str, _Whole]], vertex: JobVertex, subtask: int
) -> tuple[snapshots.OperatorState, ...]:
    shares = [
        _share(whole, subtask, vertex.parallelism)
        for operator in vertex.operators
        for _, whole in sorted(states.get(operator.uid, {}).items())
    ]
    return tuple(share for share in shares if share.items)


def _share(whole: _Whole, subtask: int, parallelism: int) -> snapshots.OperatorState:
    in_order = [whole.parts[number] for number in sorted(whole.parts)]
    like = in_order[0]
    items: Sequence[bytes]
    if like.redistribution is snapshots.Redistribution.BROADCAST:
        # All have the same.
        items = in_order[subtask % len(in_order)].items
    elif like.redistribution is snapshots.Redistribution.UNION:
        items = [item for state in in_order for item in state.items]
    elif whole.parallelism == parallelism:
        items = whole.parts[subtask].items if subtask in whole.parts else ()
    else:
        items = [item for state in in_order for item in state.items][subtask::parallelism]
    declared = all(state.declared for state in in_order)
    return snapshots.OperatorState(like.operator, like.name, like.redistribution, tuple(items), declared)


def _event_times(checkpoint: snapshots.Checkpoint) -> dict[str, int]:
    """Return the lowest watermark of each operator: a subtask that takes keys over from several ones drops nothing."""
    lowest: dict[str, int] = {}
    for part in checkpoint.subtasks:
        for uid, time_ms in part.event_times.items():
            lowest[uid] = min(time_ms, lowest.get(uid, time_ms))
    return lowest


def _split_times(checkpoint: snapshots.Checkpoint) -> dict[str, dict[str, int]]:
    """Return the highest time of each split, which several subtasks may have had records of."""
    highest: dict[str, dict[str, int]] = {}
    for part in checkpoint.subtasks:
        for uid, times in part.split_times.items():
            found = highest.setdefault(uid, {})
            found.update((split, max(time_ms, found.get(split, time_ms))) for split, time_ms in times.items())
    return highest


def _read_of(checkpoint: snapshots.Checkpoint, uid: str) -> int | None:
    """Return how many records a source had read; None for what is no source."""
    counts = [part.read for part in checkpoint.subtasks if part.uid == uid and part.read is not None]
    return sum(counts) if counts else None


def goes_back(damage: str, newest: snapshots.Checkpoint | None, older: snapshots.Checkpoint) -> str:
    """Return what to say when a checkpoint is damaged and one before it is restored.

    ``newest`` is what is left of it, perhaps damaged itself; None: its metadata makes no sense.
    """
    said = []
    if newest is not None:
        for uid in sorted({each.uid for each in newest.subtasks if each.positions or each.read is not None}):
            newer, before = _read_of(newest, uid), _read_of(older, uid)
            count = "all records that were read since, it is not known how many,"
            if newer is not None and before is not None and newer >= before:
                count = f"{newer - before:,} records"
            said.append(f"{count} of source {uid!r}")
    return (
        f"{damage}: the job goes back to checkpoint {older.checkpoint} of {utc_text(older.completed_ms)}, and rows "
        "that sinks have committed since are committed again: "
        + (", ".join(said) or "of all records that were read since; what is left does not tell how many")
    )


def _positions(checkpoint: snapshots.Checkpoint, vertex: JobVertex) -> dict[str, bytes]:
    merged: dict[str, bytes] = {}
    for part in checkpoint.subtasks:
        if part.uid != vertex.uid:
            continue
        for partition, position in part.positions.items():
            if not has_partition(vertex, partition):
                continue
            if merged.setdefault(partition, position) != position:
                raise CheckpointDamagedError(
                    f"{named(checkpoint)}: two subtasks of source {vertex.uid!r} say otherwise of where partition "
                    f"{partition!r} is"
                )
    return merged
