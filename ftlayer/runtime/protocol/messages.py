"""What slots and their driver say to each other: elements of channels, and messages. Plain values.

Messages travel as msgpack on one stream for each slot. When the stream breaks, the slot is lost to the coordinator
and the coordinator to the slot. ``instance`` names one process that runs a slot; ``epoch`` counts the changes
of the set of instances: it begins at 1 with the first `Deploy` and grows with each `DropPeers`.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier as Barrier
from ftlayer.checkpoint.barrier import CancelMarker as CancelMarker
from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.options import CheckpointConfig, CheckpointingMode
from ftlayer.checkpoint.snapshots import Restore, SubtaskSnapshot
from ftlayer.common.checks import fast_dataclass
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.common.rules.histogram import Exemplar, Histogram
from ftlayer.common.rules.telemetry_settings import Tracing
from ftlayer.config import TopologyOptions
from ftlayer.errors import UnauthorizedError
from ftlayer.records.ids import I64Array
from ftlayer.runtime.handler import RecordIds as RecordIds
from ftlayer.topology.job_graph import JobGraph
from ftlayer.transport.flight_connection import Endpoint
from ftlayer.vertex.calls.jobs import EdgeDetails, SubtaskDetails


def may_overtake(graph: JobGraph, config: CheckpointConfig) -> bool:
    """Whether barriers may overtake records: where the options say so, or where a chain may hold its input for long.

    Not where one checkpoint may begin before another is over, nor, unless it is forced, round a loop.
    """
    if config.unaligned:
        return True
    holds = any(vertex.failures is not None for vertex in graph.vertices)
    loops = any(edge.feedback for edge in graph.edges)
    exact = config.mode is CheckpointingMode.EXACTLY_ONCE
    return holds and exact and config.max_concurrent == 1 and (config.force_unaligned or not loops)


@dataclass(frozen=True)
class CheckpointPlan:
    """A slot's settings for checkpoints: as the user gave them, and for this execution (``run``).

    ``key``: what pieces are signed with, and what is pickled in them is trusted by.
    """

    config: CheckpointConfig
    run: str
    key: bytes = field(repr=False)


Mode = TypeVar("Mode")


@dataclass(frozen=True)
class SlotOrder(Generic[Mode]):
    """What a slot needs to know.

    Attributes:
        job: unique id of this execution.
        slot: which one it is.
        coordinator: where it registers; the other slots are reached in the same way. The certificate of a job off
            loopback is the one that all its processes have, and show to each other in both directions.
        graph: what runs.
        options: batching, credits, heartbeats.
        mode: a `ftlayer.runtime.slot.rules.mode.SlotModeFactory`: the mode that the job runs in.
        listen_on: host that its channels listen on: ``127.0.0.1``, or "" for the address by which the slot
            reaches the coordinator.
        tls_cert, tls_key: PEM for its channels' server off loopback, else None.
        key: a secret of this run, in memory alone, which sealed payloads are checked by.
        sockets: directory of the job's Unix sockets, where its channels listen; "": they listen on ``listen_on``.
        tracing: which records are traced, as the driver's variables say; None: none.
    """

    job: str
    slot: int
    coordinator: Endpoint
    graph: JobGraph
    options: TopologyOptions
    mode: Mode
    listen_on: str
    tls_cert: bytes | None
    tls_key: bytes | None = field(repr=False)
    key: bytes = field(repr=False)
    sockets: str = ""
    tracing: Tracing | None = None


MIN_TIME_MS = -(2**63)
"""The watermark before the first one."""

MAX_TIME_MS = 2**63 - 1
"""The watermark behind the last record."""


@fast_dataclass
class Batch:
    """n records: the user's columns, their RecordIds (None with FTStatus.OFF), their times (None: none yet).

    ``times`` is int64[n], milliseconds since 1970. ``split``: the number of the split that a source has read them from,
    where a watermark is made of them; None: they are of none, or of several.
    """

    payload: pa.RecordBatch
    lineage: RecordIds | None = None
    times: I64Array | None = None
    split: int | None = None

    @property
    def num_rows(self) -> int:
        return int(self.payload.num_rows)


@fast_dataclass
class Watermark:
    """No record older than this comes on this channel any more (replays may)."""

    time_ms: int


@fast_dataclass
class Idle:
    """This channel holds no watermark back until its next `Watermark` (batches may come that are replays alone)."""


@fast_dataclass
class Splits:
    """The splits that a subtask of a source reads now, by number, of which each holds event time back.

    ``open`` are those that have more records, as far as is known, also if none was read yet, and ``done`` those of
    which some were read, as far as they go. ``quiet`` have no records now, and hold it where they are known.
    ``endless``: whether there is more of the open ones shows when it comes. It is part of no checkpoint.
    """

    open: tuple[int, ...]
    done: tuple[int, ...] = ()
    quiet: tuple[int, ...] = ()
    endless: bool = True


NAMED_SPLIT = 1 << 62
"""Numbers of splits from here on are those of names: they stay what they are from range to range."""


@fast_dataclass
class EndOfStream:
    """Nothing comes on this channel any more. Implies `MAX_TIME_MS`."""


@fast_dataclass
class LatencyMarker:
    """Records that ``source`` had read at ``wall_ms`` (Unix) are on their way before it; ``root`` is one of them, or 0.

    It says nothing of time or end, is part of no checkpoint, and may be lost with what carries it.
    """

    source: str
    wall_ms: int
    root: int = 0


Mark = Watermark | Idle | Splits | EndOfStream | Barrier | CancelMarker | LatencyMarker
Element = Batch | Mark


KEY_BYTES = 32
_MAC_BYTES = 32


def seal(value: Any, key: bytes) -> bytes:
    """Pickle ``value`` as Spark pickles functions (by value where need be) behind a keyed checksum."""
    from pyspark import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return _mac(pickled, key) + pickled


def unseal(sealed: bytes, key: bytes) -> Any:
    """Return what was sealed; `UnauthorizedError`, before anything is unpickled, if the key is not the same."""
    mac, pickled = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(pickled, key)):
        raise UnauthorizedError("a message between driver and slot was not sealed by this job's key")
    return pickle.loads(pickled)


def reseal(sealed: bytes, old: bytes, new: bytes) -> bytes:
    """Return what was sealed with ``old`` as sealed with ``new``; `UnauthorizedError` if it was not."""
    mac, pickled = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(pickled, old)):
        raise UnauthorizedError("a message of a checkpoint was not sealed by the key of its job")
    return _mac(pickled, new) + pickled


def _mac(pickled: bytes, key: bytes) -> bytes:
    return hmac.new(key, pickled, hashlib.sha256).digest()


@dataclass(frozen=True, slots=True)
class Death:
    """An instance of a slot whose process has ended itself: by a fatal signal that it got, or by an exit.

    Attributes:
        instance: its name; one death has one report that counts.
        chain, digest: the record that it had in hand, as `Conviction`; both empty where that was not noted.
        stack: of the Python functions that ran, the innermost first; "" if unknown.
    """

    instance: str
    slot: int
    cause: str
    chain: str = ""
    digest: bytes = b""
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Conviction:
    """A record that has ended the processes that worked on it: its chain makes it a dead letter unseen.

    ``digest`` is of its values (`row_digests` of `ChainSuspects`): equal records share it. The rest is of its last try.
    """

    chain: str
    digest: bytes
    reason: str
    traceback: str
    place: str


# Durations as counters: slots count them by bucket, and the driver's meter adds up counters of all instances.
#
# A histogram's counters are ``<name>/<part>/<bucket>`` and ``<name>/<part>/us``, its sum in microseconds.


END_TO_END = "end_to_end"
"""From the moment at which a source had read records until a sink was done with them, by ``"<source>|<sink>"``."""

PERSIST = "persist"
"""From a slot's call that stores records to the vertex's answer, by the uid of the source's chain."""

_SUM = "us"


def counters_of(name: str, histograms: Mapping[str, Histogram]) -> dict[str, int]:
    """Return histograms, by part, as counters. What has no observation is left out."""
    counters: dict[str, int] = {}
    for part, histogram in histograms.items():
        counters[f"{name}/{part}/{_SUM}"] = round(histogram.total * 1e6)
        for bucket, count in enumerate(histogram.counts):
            if count:
                counters[f"{name}/{part}/{bucket}"] = count
    return counters


def exemplars_of(name: str, histograms: Mapping[str, Histogram]) -> dict[str, Exemplar]:
    """As `counters_of`: exemplars by the name of their bucket's counter."""
    return {
        f"{name}/{part}/{bucket}": exemplar
        for part, histogram in histograms.items()
        for bucket, exemplar in enumerate(histogram.exemplars)
        if exemplar is not None
    }


def histograms_of(
    name: str,
    counters: Mapping[str, int],
    bounds: Sequence[float],
    exemplars: Mapping[str, Exemplar] = MappingProxyType({}),
) -> dict[str, Histogram]:
    """Return the histograms of a name, by part, out of counters that were added up, and exemplars."""
    found: dict[str, Histogram] = {}
    for key, value in counters.items():
        if not key.startswith(f"{name}/"):
            continue
        part, _, bucket = key.removeprefix(f"{name}/").rpartition("/")
        histogram = found.setdefault(part, Histogram(bounds))
        if bucket == _SUM:
            histogram.total = value / 1e6
        else:
            histogram.counts[int(bucket)] = value
            histogram.exemplars[int(bucket)] = exemplars.get(key)
    return found


# ---------------------------------------------------------------- from a slot


@dataclass(frozen=True, slots=True)
class Hello:
    """A process is ready to run ``slot``; others reach its channels at ``address`` (``grpc://…``), and ``socket``.

    ``socket`` is a path on its own machine, "" for none. ``deaths``: how earlier processes of the job on its host have
    ended themselves, as far as nobody has said so yet.
    """

    slot: int
    instance: str
    address: str
    host: str
    pid: int
    deaths: tuple[Death, ...] = ()
    socket: str = ""


@dataclass(frozen=True, slots=True)
class TasksStarted:
    """Answer to `Deploy`: all tasks of the slot are open, hold what they are restored with, and run."""


SETTLED = "settled"
"""The counter of acker mode's slots: records that they have done, or that have failed there."""


def has_worked(counters: Mapping[str, int]) -> bool:
    """Whether these counters tell of the end of a record, or, where no mode knows that, of one that was taken."""
    if SETTLED in counters:
        return counters[SETTLED] > 0
    return any(count for name, count in counters.items() if name.startswith("records_in/"))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent every second, at once when ``quiet`` becomes true, and as the answer to `Probe`.

    Attributes:
        probe: number of the `Probe` this answers, 0 otherwise.
        activity: grows with everything the slot's loop does; equal numbers mean that nothing happened between.
        quiet: all sources of this slot have ended, every element was processed, nothing waits for the vertex
            or for credit. (Records that an operator holds back on purpose are in the vertex's count.)
        counters: totals of this instance by name: ``records_in``, ``records_out``, ``persisted``, ``failed``, …,
            and ``records_in/<uid>``, ``records_out/<uid>`` by chain.
        busy: uid of the chain that runs now, "" for none, and for how long it has (ms).
        function: of the user's that it has called, if it has run for a second: name, file, line, and the record.
        subtasks: what each subtask did in the last second; none before the first one is over.
        edges: what waits for them now.
        exemplars: of durations, by the counter of their bucket.
        circuits: circuit breakers of chains, by operator.
        transports: what carries its stream to each other slot: ``unix`` or ``flight``.
    """

    probe: int
    activity: int
    quiet: bool
    counters: dict[str, int] = field(default_factory=dict)
    busy: str = ""
    busy_ms: int = 0
    function: str = ""
    subtasks: tuple[SubtaskDetails, ...] = ()
    edges: tuple[EdgeDetails, ...] = ()
    exemplars: dict[str, Exemplar] = field(default_factory=dict)
    circuits: dict[str, CircuitStatus] = field(default_factory=dict)
    transports: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeersDropped:
    """Answer to `DropPeers`: nothing of those slots is accepted any more, nothing is sent to them."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SplitDone:
    """All rows of a split are persisted (or, with FTStatus.OFF, emitted)."""

    source: str
    range: int
    split: int


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A source's subtask has failed, and is started again after a pause; the slot goes on."""

    source: str
    subtask: int
    reason: str
    pause_ms: int


@dataclass(frozen=True, slots=True)
class SlotFailed:
    """The slot ends because of something that cannot be pinned on a record.

    ``lasting``: it lies in how the machines are set up, or in the program; if nothing has succeeded yet, it stays so.
    ``damaged``: the checkpoint that it could not read, 0 for none.
    ``code``: of the error by which the whole job is to end, "" where the slot may be started again.
    ``counters``: as in the last `Heartbeat`.
    """

    reason: str
    operator: str = ""
    traceback: str = ""
    lasting: bool = False
    damaged: int = 0
    code: str = ""
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotEnded:
    """All tasks have ended and everything is sent; the process ends well."""

    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplaysOut:
    """Answer to `AllowReplays`: so many ``rows`` were taken, and there are no more where they are below the limit.

    With a limit of 1 a replay is kept until `LetOut`, and ``root`` and ``origin`` say which it is. Others are on their
    way, and both are 0.
    """

    uid: str
    group: int
    rows: int
    root: int = 0
    origin: int = 0


@dataclass(frozen=True, slots=True)
class SubtaskAcked:
    """Barrier mode: a subtask's part of a checkpoint is written, and durable."""

    checkpoint: int
    snapshot: SubtaskSnapshot


@dataclass(frozen=True, slots=True)
class SubtaskDeclined:
    """Barrier mode: a subtask cannot take its part of a checkpoint.

    ``counts`` toward ``tolerable_failures``: false for what a `GiveUp` says, since nothing has gone wrong here.
    ``code``: of an error that no restart mends, "" for others. ``lasting``: as of `SlotFailed`.
    """

    checkpoint: int
    uid: str
    subtask: int
    reason: str
    counts: bool = True
    code: str = ""
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class DataEnded:
    """Barrier mode: a source's subtask has emitted its last record; of a head: nothing comes back any more."""

    uid: str
    subtask: int


@dataclass(frozen=True, slots=True)
class StackTaken:
    """Answer to `AskStack` with this number: what the process's threads do, the one of the tasks first."""

    number: int
    text: str


FromSlot = (
    Hello
    | TasksStarted
    | Heartbeat
    | PeersDropped
    | SplitDone
    | SourceFailed
    | SlotFailed
    | SlotEnded
    | ReplaysOut
    | SubtaskAcked
    | SubtaskDeclined
    | DataEnded
    | StackTaken
)

# ---------------------------------------------------------------- from the coordinator


@dataclass(frozen=True, slots=True)
class Peer:
    """Where an instance of a slot is reached: its Flight server, and its Unix socket ("" for none)."""

    slot: int
    instance: str
    address: str
    socket: str = ""


@dataclass(frozen=True, slots=True)
class Deploy:
    """Start the tasks; ``peers`` are all slots, this one included. ``run`` names this run of the job.

    ``paused``: as after `PauseIntake`. ``restore``: in barrier mode, what the tasks begin with; None: with nothing.
    ``armed``: note which record is in hand, since one may have ended a process. ``convictions``: records that have.
    """

    epoch: int
    run: str
    peers: tuple[Peer, ...]
    paused: bool = False
    restore: Restore | None = None
    armed: bool = False
    convictions: tuple[Conviction, ...] = ()


@dataclass(frozen=True, slots=True)
class DropPeers:
    """These slots are lost: forget what was to be sent to them, refuse what still comes of them."""

    epoch: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeersUp:
    """New instances of lost slots run: connect to them, with full credit."""

    epoch: int
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """One partition of a range of a source, sealed by the job's key. ``rows`` are already accepted, and skipped."""

    number: int
    payload: bytes
    rows: int


@dataclass(frozen=True, slots=True)
class ReaderRange:
    """A range of a reader source. ``start`` and ``end`` are its offsets as JSON.

    ``digest`` is of its partition objects: equal digests mean that they are the same ones. ``places`` says which splits
    have records, as `ftlayer.runtime.connectors.offset_reader.places_of` does.
    """

    number: int
    start: str
    end: str
    splits: int
    digest: bytes
    places: bytes = b""


@dataclass(frozen=True, slots=True)
class AssignSplits:
    """Have ``subtask`` read these splits of a range of a reader source; a range without splits: it ends here."""

    source: str
    subtask: int
    range: ReaderRange
    mine: tuple[Split, ...]

    def without(self, split: int) -> AssignSplits:
        return replace(self, mine=tuple(each for each in self.mine if each.number != split))


@dataclass(frozen=True, slots=True)
class StopSources:
    """Read no further: end all sources (drain). What is accepted is processed."""


@dataclass(frozen=True, slots=True)
class ReplayNow:
    """Replays may be due: ask the vertex."""


@dataclass(frozen=True, slots=True)
class PauseIntake:
    """Until `ResumeIntake`: read no source, and take replays as `AllowReplays` says alone.

    A slot is quiet then (see `Heartbeat`) whether its sources have ended or not, but not while the vertex has not
    answered a question for replays. What it answers to a question from before is left where it is: pending.
    """


@dataclass(frozen=True, slots=True)
class ResumeIntake:
    """Go on as usual."""


@dataclass(frozen=True, slots=True)
class AllowReplays:
    """Let input ``uid`` take up to ``limit`` replays in all, answered by `ReplaysOut`; ``group`` numbers these."""

    uid: str
    group: int
    limit: int


@dataclass(frozen=True, slots=True)
class LetOut:
    """Let the one replay go out that was taken for ``group`` and kept, if one was."""

    uid: str
    group: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Answer with a `Heartbeat` that names this number, behind everything that is in the slot's mailbox now."""

    number: int


@dataclass(frozen=True, slots=True)
class EndReplays:
    """Nothing is pending in the vertex any more: the replay inputs end."""


@dataclass(frozen=True, slots=True)
class ResetTasks:
    """Barrier mode: this instance ends; another one of the slot says its `Hello` from the same process.

    What sinks have written since checkpoint ``stands`` (0: ever) will not be committed: abort it. It is the one that
    is restored, or a later one that may turn out to exist.
    """

    epoch: int
    stands: int


@dataclass(frozen=True, slots=True)
class TriggerCheckpoint:
    """Let the sources of this slot send ``barrier``, with their positions."""

    barrier: Barrier


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """The checkpoint is published, and its sinks are committed. ``read``: as of `CheckpointComplete`."""

    checkpoint: int
    read: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointAborted:
    """This checkpoint is given up. ``files_stay``: a later job may find it all the same."""

    checkpoint: int
    files_stay: bool = False


@dataclass(frozen=True, slots=True)
class Readmit:
    """Barrier mode: these letters are records of the chain again, to be tried anew, and each comes to one subtask.

    The subtask names them in `SubtaskSnapshot.readmitted`. Unless the restored checkpoint holds them they come again.
    """

    uid: str
    subtask: int
    letters: tuple[ChainLetter, ...]


@dataclass(frozen=True, slots=True)
class LoopWaits:
    """Barrier mode: whether records wait for another attempt in this head's loop, in any slot; at first none does."""

    uid: str
    waits: bool


@dataclass(frozen=True, slots=True)
class EndTasks:
    """Barrier mode: everything is committed; the sources end their streams, and with them all tasks."""


@dataclass(frozen=True, slots=True)
class AskStack:
    """Say what the slot does now. It is answered at once, and not by the loop, which may hang."""

    number: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End now. What is pending stays in the vertex."""

    reason: str


ToSlot = (
    Deploy
    | DropPeers
    | PeersUp
    | AssignSplits
    | StopSources
    | ReplayNow
    | PauseIntake
    | ResumeIntake
    | AllowReplays
    | LetOut
    | Probe
    | EndReplays
    | ResetTasks
    | TriggerCheckpoint
    | CheckpointCompleted
    | CheckpointAborted
    | Readmit
    | LoopWaits
    | EndTasks
    | AskStack
    | Cancel
)
