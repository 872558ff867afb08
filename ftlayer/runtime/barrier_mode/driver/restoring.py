"""The state that each slot begins with when a checkpoint is restored, at any parallelism."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ftlayer.checkpoint.migration import may_leave
from ftlayer.checkpoint.snapshots import (
    ChannelState,
    Checkpoint,
    InFlight,
    KeyedSnapshot,
    OperatorState,
    Redistribution,
    Restore,
    SubtaskRestore,
)
from ftlayer.checkpoint.storage.results import utc_text
from ftlayer.errors import CheckpointDamagedError, IncompatibleCheckpointError
from ftlayer.partitioning.key_groups import HashByKeyGroup, groups_of
from ftlayer.partitioning.partitioners import Broadcast, Global, Rebalance, Shuffle
from ftlayer.runtime.barrier_mode.driver.compatibility import (
    check_fits,
    has_partition,
    named,
    partitioner_text,
    unclaimed,
)
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex

KEEP_GROUPS = "groups"
"""`InFlight.keep` for rows of the task's key groups alone."""

COPIES = partitioner_text(Broadcast())


class InFlightDealer:
    """Deals them out. ``incoming[uid, subtask]`` and ``outgoing[uid, subtask]`` are in the order of each channel."""

    def __init__(self, checkpoint: Checkpoint, graph: JobGraph) -> None:
        """Raises `IncompatibleCheckpointError` naming the edge whose records cannot be dealt out.

        Records for operators that the graph has no more are left out.
        """
        self.incoming: dict[tuple[str, int], list[InFlight]] = defaultdict(list)
        self.outgoing: dict[tuple[str, int], list[InFlight]] = defaultdict(list)
        self._checkpoint = checkpoint
        self._graph = graph
        self._parallelism = {info.chain: info.parallelism for info in checkpoint.operators}
        # Records leave a chain from its last operator, to the first one of another.
        self._last_of = {info.chain: info.uid for info in checkpoint.operators}
        self._known = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
        for states in self._by_edge():
            self._deal(states)

    def _by_edge(self) -> Iterator[list[ChannelState]]:
        """Yield the states of each edge: on each channel what had left its sender first."""
        edges: dict[int, list[ChannelState]] = defaultdict(list)
        for part in self._checkpoint.subtasks:
            for state in part.channels:
                edges[state.edge].append(state)
        for states in edges.values():
            yield sorted(states, key=lambda state: (state.sender, state.receiver, state.outgoing))

    def _deal(self, states: Sequence[ChannelState]) -> None:
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

    def _anew(self, edge: JobEdge, states: Sequence[ChannelState], reason: str) -> None:
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

    def _as_they_were(self, edge: JobEdge, states: Sequence[ChannelState]) -> None:
        for state in states:
            part = InFlight(edge.number, state.sender, state)
            if state.outgoing:
                self.outgoing[edge.source, state.sender].append(part)
            else:
                self.incoming[edge.target, state.receiver].append(part)

    def _put(self, edge: JobEdge, state: ChannelState, receiver: int, keep: str = "") -> None:
        sender = state.sender % self._graph.vertex(edge.source).parallelism
        self.incoming[edge.target, receiver].append(InFlight(edge.number, sender, state, keep))

    def _edge_of(self, state: ChannelState) -> JobEdge:
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

    def _refusal(self, state: ChannelState, reason: str) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{named(self._checkpoint)} is unaligned, and holds records on their way from {state.source!r} to "
            f"{state.target!r}: {reason}. Restore the job as it was, take a savepoint (which is aligned, and holds no "
            "such records), and restore from that"
        )


@dataclass(frozen=True)
class Assignment:
    """The checkpoint that is restored.

    Attributes:
        by_slot: for every slot, with every subtask in it.
        dropped: what no operator claims, as texts; () unless that is allowed.
    """

    by_slot: dict[int, Restore]
    dropped: tuple[str, ...]


def restores(
    checkpoint: Checkpoint, graph: JobGraph, *, allow_unclaimed: bool | tuple[str, ...]
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
        (vertex.uid, subtask): SubtaskRestore(
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
        slot: Restore(
            checkpoint.checkpoint,
            checkpoint.location,
            tuple(subtasks[each] for each in graph.subtasks_in(slot)),
        )
        for slot in range(graph.slots)
    }
    return Assignment(by_slot, tuple(dropped))


def _keyed(
    checkpoint: Checkpoint, graph: JobGraph, vertex: JobVertex, subtask: int
) -> tuple[KeyedSnapshot, ...]:
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
    parts: dict[int, OperatorState] = field(default_factory=dict)


def _states_of(checkpoint: Checkpoint) -> dict[str, dict[str, _Whole]]:
    """Return operator state by operator and name."""
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
) -> tuple[OperatorState, ...]:
    """Return what the subtask gets of the operator state of its chain's operators."""
    shares = [
        _share(whole, subtask, vertex.parallelism)
        for operator in vertex.operators
        for _, whole in sorted(states.get(operator.uid, {}).items())
    ]
    return tuple(share for share in shares if share.items)


def _share(whole: _Whole, subtask: int, parallelism: int) -> OperatorState:
    in_order = [whole.parts[number] for number in sorted(whole.parts)]
    like = in_order[0]
    items: Sequence[bytes]
    if like.redistribution is Redistribution.BROADCAST:
        # All have the same.
        items = in_order[subtask % len(in_order)].items
    elif like.redistribution is Redistribution.UNION:
        items = [item for state in in_order for item in state.items]
    elif whole.parallelism == parallelism:
        items = whole.parts[subtask].items if subtask in whole.parts else ()
    else:
        items = [item for state in in_order for item in state.items][subtask::parallelism]
    declared = all(state.declared for state in in_order)
    return OperatorState(like.operator, like.name, like.redistribution, tuple(items), declared)


def _event_times(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the lowest watermark of each operator: a subtask that takes keys over from several ones drops nothing."""
    lowest: dict[str, int] = {}
    for part in checkpoint.subtasks:
        for uid, time_ms in part.event_times.items():
            lowest[uid] = min(time_ms, lowest.get(uid, time_ms))
    return lowest


def _split_times(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Return the highest time of each split, which several subtasks may have had records of."""
    highest: dict[str, dict[str, int]] = {}
    for part in checkpoint.subtasks:
        for uid, times in part.split_times.items():
            found = highest.setdefault(uid, {})
            found.update((split, max(time_ms, found.get(split, time_ms))) for split, time_ms in times.items())
    return highest


def _read_of(checkpoint: Checkpoint, uid: str) -> int | None:
    """Return how many records a source had read; None where that was not counted, and for what is no source."""
    counts = [part.read for part in checkpoint.subtasks if part.uid == uid]
    return sum(count for count in counts if count is not None) if None not in counts and counts else None


def goes_back(damage: str, newest: Checkpoint | None, older: Checkpoint) -> str:
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


def _positions(checkpoint: Checkpoint, vertex: JobVertex) -> dict[str, bytes]:
    """Return the positions of all partitions of a chain that is a source."""
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
