"""The parts of a checkpoint: values that travel from slots to the coordinator and lie in the metadata.

All of them are plain (`ftlayer.transport.codec.plain_codec` packs them). Keyed and operator state is filed
under the uid of its *operator*, so that it is found again when chains are cut otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ftlayer.checkpoint.letters import ChainLetter, LetterBatch


class Scope(StrEnum):
    """Who may refer to a piece: EXCLUSIVE one checkpoint alone, SHARED later ones too."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes, in a file or inline.

    Attributes:
        digest: keyed checksum (BLAKE2b, 32 bytes) of exactly these bytes.
        inline: the bytes themselves; None if they lie in a file, at ``offset``.
        path: the file, relative to the job's directory ("shared/…", "chk-7/…"), or to the savepoint's.
    """

    digest: bytes
    length: int
    inline: bytes | None = None
    path: str = ""
    offset: int = 0
    scope: Scope = Scope.EXCLUSIVE


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table of keyed state, or an operator's timers.

    Attributes:
        number: what its entries are marked with in the pieces of the same `KeyedSnapshot`.
        operator: uid.
        kind: ``"value"``, ``"list"``, ``"map"`` or ``"timers"``.
        serializer, version: what keys and values are written with.
        state_version: of the values' type, as the program counts it: `StateMigration`.
        declared: the program asks for it in `open`: `ftlayer.state.tables.declarations`.
        values: what the values are, in words, where the operator says it: built-in aggregates do.
    """

    number: int
    operator: str
    name: str
    kind: str
    serializer: str
    version: int
    state_version: int = 1
    declared: bool = False
    values: str = ""


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Entries of keyed state.

    ``format`` is ``"entries"`` (portable between backends) or ``"lmdb"`` (a copy of an environment). ``checkpoint``
    is the one that wrote it.
    """

    format: str
    piece: Piece
    entries: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class KeyedSnapshot:
    """Keyed state and timers of all operators of one subtask, for key groups first <= g < end.

    ``pieces`` are read in their order: what a later one says of a key replaces what earlier ones said.
    """

    first_group: int
    end_group: int
    tables: tuple[TableInfo, ...]
    pieces: tuple[StatePiece, ...]


class Redistribution(StrEnum):
    """Operator state at another parallelism: SPLIT deals items out, UNION and BROADCAST give all to all."""

    SPLIT = "split"
    UNION = "union"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class OperatorState:
    """A list (SPLIT, UNION) or a mapping (BROADCAST; items are packed pairs) of one operator in one subtask.

    ``declared``: the program asks for it in `open`, see `ftlayer.state.tables.declarations`.
    """

    operator: str
    name: str
    redistribution: Redistribution
    items: tuple[bytes, ...]
    declared: bool = False


@dataclass(frozen=True, slots=True)
class Committable:
    """Output that a sink has written for ``checkpoint`` and not committed. ``message`` is sealed."""

    sink: str
    message: bytes
    checkpoint: int


@dataclass(frozen=True, slots=True)
class SinkPart:
    """A sink's part in one subtask's snapshot, as the fields of the same names in `SubtaskSnapshot`."""

    committables: tuple[Committable, ...] = ()
    letters: tuple[ChainLetter, ...] = ()


@dataclass(frozen=True, slots=True)
class ChannelState:
    """Records that an unaligned barrier has overtaken on one channel, as frames of `ElementCodec`, in order.

    ``edge`` is its number in the graph that was snapshotted (`Checkpoint.edges`); the chains, the tag and the input
    are what stays the same over restarts. ``outgoing``: they had not left the sender yet; they come behind those that
    had.
    """

    source: str
    tag: str
    target: str
    input: int
    sender: int
    receiver: int
    outgoing: bool
    frames: Piece
    count: int
    edge: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotTimes:
    """Milliseconds, and bytes of records in flight, of one subtask's snapshot."""

    start_delay_ms: int = 0
    alignment_ms: int = 0
    sync_ms: float = 0.0
    async_ms: float = 0.0
    in_flight_bytes: int = 0
    unaligned: bool = False


@dataclass(frozen=True, slots=True)
class SubtaskSnapshot:
    """One subtask's part of a checkpoint.

    Attributes:
        uid, subtask: of the chain.
        keyed: None without keyed state.
        operators: list, union list and broadcast state.
        positions: of a source, by partition: `ftlayer.runtime.connectors.offset_reader`.
        read: records that a source's subtasks have read since the job began, over restores; their sum means something.
            None for what is no source.
        committables: everything that the subtask's sink has not been told to be committed.
        letters: the records that it has given up and was not told to be complete.
        waiting: how many records wait in it for another attempt.
        readmitted: names of letters that came back, wait for another attempt, and were not told to be complete.
        condemned: digests of records that end processes, which it has given up unseen and was not told to be complete.
        event_times: the watermark of each operator, by uid, before the end of its inputs.
        split_times: by uid of an `assign_watermarks`, the highest event time of each split of a source.
        written_bytes: new bytes in the storage; ``state_bytes`` are all that it refers to.
    """

    uid: str
    subtask: int
    keyed: KeyedSnapshot | None = None
    operators: tuple[OperatorState, ...] = ()
    positions: dict[str, bytes] = field(default_factory=dict)
    read: int | None = None
    committables: tuple[Committable, ...] = ()
    letters: tuple[ChainLetter, ...] = ()
    waiting: int = 0
    readmitted: tuple[bytes, ...] = ()
    condemned: tuple[bytes, ...] = ()
    channels: tuple[ChannelState, ...] = ()
    event_times: dict[str, int] = field(default_factory=dict)
    split_times: dict[str, dict[str, int]] = field(default_factory=dict)
    times: SnapshotTimes = field(default_factory=SnapshotTimes)
    written_bytes: int = 0
    state_bytes: int = 0

    def pieces(self) -> list[Piece]:
        keyed = () if self.keyed is None else self.keyed.pieces
        return [part.piece for part in keyed] + [channel.frames for channel in self.channels]


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """An operator of the graph that was snapshotted: enough to say what does not fit another graph.

    ``keys`` are the key columns' types as text, in order; ``keyed`` edges of the chain matter for `max_parallelism`.
    """

    uid: str
    chain: str
    kind: str
    parallelism: int
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EdgeInfo:
    """An edge of the graph that was snapshotted.

    Attributes:
        place: how many edges before it lead from the same output to the same input.
        partitioner: says what decides about channels: edges of which it is equal send a record to the same receiver.
    """

    place: int
    partitioner: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A completed checkpoint or savepoint: what its metadata file holds.

    Attributes:
        checkpoint: id.
        job: name of the topology.
        run: unique name of the execution that took it: ``directory``'s owner.
        kind: see `SnapshotKind`.
        started_ms, completed_ms: wall clock.
        max_parallelism: number of key groups.
        operators, edges: of the graph, edges by their numbers.
        readmitted: names of letters that earlier checkpoints hold again, and the vertex has yet to be told of.
        letters: those of earlier checkpoints that no file holds yet.
        sources: by source uid, what the driver's planner has to know of its open ranges (sealed).
        unaligned: whether records in flight are in it.
        written_by: version of ftlayer; "" where it does not lie in a file. It makes no difference.
        location: URL of the directory it lies in; "" in the driver's memory. Not written: it is where it is.
    """

    checkpoint: int
    job: str
    run: str
    kind: str
    started_ms: int
    completed_ms: int
    max_parallelism: int
    operators: tuple[OperatorInfo, ...]
    subtasks: tuple[SubtaskSnapshot, ...]
    sources: dict[str, bytes] = field(default_factory=dict)
    unaligned: bool = False
    edges: tuple[EdgeInfo, ...] = ()
    readmitted: tuple[bytes, ...] = ()
    letters: tuple[LetterBatch, ...] = ()
    written_by: str = field(default="", compare=False)
    location: str = ""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Records to be worked off first, on an input channel of the new task: edge number, sender, and what was there.

    ``keep``: "" for all rows, ``"groups"`` for those in the task's key groups alone (by the edge's key).
    """

    edge: int
    sender: int
    state: ChannelState
    keep: str = ""


@dataclass(frozen=True, slots=True)
class SubtaskRestore:
    """The state that one subtask of a new deployment begins with.

    Attributes:
        keyed: snapshots that hold some of the subtask's key groups; entries of other groups and of operators that
            are not in its chain are to be skipped.
        operators: operator state, redistributed.
        positions, split_times: as in `SubtaskSnapshot`, of all subtasks.
        read: where its count of records that were read begins: one subtask has that of all.
        event_times: the lowest watermark that a subtask had, by uid of the operator.
        in_flight: in the order in which they have to come on each channel.
        outgoing: records that had not left this subtask, to be sent first (same parallelism on both sides).
    """

    uid: str
    subtask: int
    keyed: tuple[KeyedSnapshot, ...] = ()
    operators: tuple[OperatorState, ...] = ()
    positions: dict[str, bytes] = field(default_factory=dict)
    read: int = 0
    event_times: dict[str, int] = field(default_factory=dict)
    split_times: dict[str, dict[str, int]] = field(default_factory=dict)
    in_flight: tuple[InFlight, ...] = ()
    outgoing: tuple[InFlight, ...] = ()


@dataclass(frozen=True, slots=True)
class Restore:
    """The state that a slot restores. ``location``: the directory that pieces' paths are relative to; "" none."""

    checkpoint: int
    location: str
    subtasks: tuple[SubtaskRestore, ...]
