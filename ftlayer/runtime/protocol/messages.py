"""Messages between a slot and the coordinator, one frozen dataclass each.

They travel as msgpack on one stream for each slot. When the stream breaks, the slot is lost to the coordinator
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
from typing import Any

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.snapshots import Restore, SubtaskSnapshot
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.common.rules.histogram import Exemplar, Histogram
from ftlayer.errors import UnauthorizedError
from ftlayer.vertex.calls.jobs import EdgeDetails, SubtaskDetails

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
        slot: which one it ran.
        cause: in words.
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

    Attributes:
        chain: uid of the operator at the chain's head.
        digest: of the record's values (`row_digests` of `ChainSuspects`): equal records share it.
        reason, traceback, place: what becomes of the letter's last attempt.
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
    """Return the exemplars of histograms, by part, under the name of their bucket's counter."""
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
    """Return the histograms of a name, by part, out of counters that were added up, and exemplars by counter."""
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
    """A process is ready to run ``slot``; other slots reach its channels at ``address`` (``grpc://…``).

    ``socket``: path of a Unix socket at which those of its machine do, "" for none.
    ``deaths``: how earlier processes of the job on its host have ended themselves, as far as nobody has said so yet.
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
    """Whether an instance with these counters has come to the end of a record: it does not just take some, and die.

    In other modes it is not known of a record when it is done: there it is enough to take one.
    """
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
    """Barrier mode: a subtask of a source has emitted its last record; it goes on sending barriers.

    An iteration's head says so when its inputs have ended and nothing comes back any more.
    """

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
    """One partition of a range of a source. ``payload`` is sealed by the job's key.

    ``rows`` are already accepted and are to be skipped.
    """

    number: int
    payload: bytes
    rows: int


@dataclass(frozen=True, slots=True)
class ReaderRange:
    """A range of a reader source.

    Attributes:
        start, end: its offsets as JSON.
        splits: how many splits it has.
        digest: of its partition objects; equal digests mean that they are the same ones.
        places: which splits have records, as `ftlayer.runtime.connectors.offset_reader.places_of` returns it.
    """

    number: int
    start: str
    end: str
    splits: int
    digest: bytes
    places: bytes = b""


@dataclass(frozen=True, slots=True)
class AssignSplits:
    """Read these splits of a range of a reader source; a range without splits: the source ends here.

    ``subtask`` reads them.
    """

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
    """Let the replay input ``uid`` take up to ``limit`` replays in all; answered by `ReplaysOut`.

    ``group`` numbers these messages over all inputs of a run.
    """

    uid: str
    group: int
    limit: int


@dataclass(frozen=True, slots=True)
class LetOut:
    """Let the one replay go out that was taken for ``group`` and kept; nothing to do if none was."""

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
    """Barrier mode: these letters are records of the chain again, to be tried anew. Each comes to one subtask.

    The subtask names them in `SubtaskSnapshot.readmitted`. After a restart they come again, unless the checkpoint
    that is restored holds them.
    """

    uid: str
    subtask: int
    letters: tuple[ChainLetter, ...]


@dataclass(frozen=True, slots=True)
class LoopWaits:
    """Barrier mode: whether records wait for another attempt somewhere in the loop of this head, in any slot.

    Before the first one says so none does.
    """

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
