"""Barrier mode's half in a slot's process: the storage of checkpoints, and the thread that writes them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import queue
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import (
    ChannelState,
    Piece,
    Restore,
    SnapshotTimes,
    SubtaskRestore,
    SubtaskSnapshot,
)
from ftlayer.checkpoint.storage.contract import PieceWriter, SlotStorage
from ftlayer.checkpoint.storage.opening import slot_storage
from ftlayer.clock import system_now
from ftlayer.errors import CheckpointDamagedError, CheckpointError, SnapshotCancelledError
from ftlayer.functions.chains.firing import never
from ftlayer.functions.failures import raise_signalled, this_process
from ftlayer.partitioning.replay import groups_of
from ftlayer.printable import described, text_of
from ftlayer.records.ids import U64Array
from ftlayer.recovery import is_programs, lasting
from ftlayer.runtime.barrier_mode.slot.barriers import (
    BeginSnapshot,
    CancelSnapshot,
    CheckpointParts,
    DropFiles,
    GiveUpSnapshot,
    KeepFiles,
    ReleaseSnapshot,
    SnapshotCaptured,
)
from ftlayer.runtime.barrier_mode.slot.in_flight import CapturedChannel, put_in_flight
from ftlayer.runtime.barrier_mode.slot.last_words import LastWords
from ftlayer.runtime.barrier_mode.slot.rules import BarrierSlot
from ftlayer.runtime.barrier_mode.task.chain_suspects import ChainSuspects
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode, Checkpointed, PendingSnapshot
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol.elements import CheckpointPlan
from ftlayer.runtime.protocol.messages import (
    Conviction,
    Death,
    Deploy,
    FromSlot,
    SubtaskAcked,
    SubtaskDeclined,
)
from ftlayer.runtime.slot.events import Event, ModeInstruction, SnapshotOver
from ftlayer.runtime.slot.mode import SlotContext, SlotParts, misplaced
from ftlayer.runtime.task.contract import NO_SUSPECTS, Suspects, TaskKey
from ftlayer.secret_files import is_private
from ftlayer.state.contract import BackendSpec, CheckpointedBackend
from ftlayer.state.opening import open_backend

logger = logging.getLogger(__name__)


# What a slot's process has in hand, and how it ends itself: in a file on its host that outlives the process.
#
# A page of the file is mapped to memory, so that a note costs a copy of some bytes and no system call, and is there
# whatever becomes of the process. `LastWords` come behind the page. While its process lives, the file is locked.


MAX_STACK = 4_096
"""Characters that are kept of where the functions were."""

FORGOTTEN_S = 86_400
"""Boxes of processes that are gone are removed after so long where nobody has read them."""

_PREFIX = "ftlayer-boxes-"
_SUFFIX = ".box"
_PAGE = 4_096

_HEAD, _HEAD_AT = struct.Struct("<8sI32s"), 0
_NOTE, _NOTE_AT = struct.Struct("<II16s"), 64  # whether a record is in hand, its chain's place, its digest
_EXIT, _EXIT_AT = struct.Struct("<Ii"), 128  # whether the process exits, and its code
_EXIT_OF_C_AT = 136  # a byte: whether a C library has ended it
_IN_HAND = struct.Struct("<I")
_MAGIC = b"ftl box1"

_FATAL = "Fatal Python error: "
_NO_PLACE = "\nExtension modules:"


class BlackBox:
    """`ftlayer.runtime.barrier_mode.task.chain_suspects.RecordNotes` of one instance of a slot.

    Its methods are for the thread that runs the tasks.
    """

    def __init__(self, directory: Path, slot: int, instance: str, chains: Sequence[str]) -> None:
        """Make it in ``directory`` (see `box_directory`), and write last words from now on; raises `OSError`.

        ``chains`` are those whose records are noted; readers have to give the same.
        """
        self._directory = directory
        self._path = directory / f"{instance}{_SUFFIX}"
        self._places = {chain: place for place, chain in enumerate(chains)}
        # Locked before it has its name, so that it is never there and not locked.
        self._file, new = tempfile.mkstemp(dir=directory, prefix="new-")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            # A hole that the disk has no room for would end the process at its first note, by SIGBUS.
            if os.write(self._file, bytes(_PAGE)) < _PAGE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
            self._page = mmap.mmap(self._file, _PAGE)
            _HEAD.pack_into(self._page, _HEAD_AT, _MAGIC, slot, instance.encode())
            os.rename(new, self._path)
        except BaseException:
            os.close(self._file)
            Path(new).unlink(missing_ok=True)
            raise
        self._last_words = LastWords(self._file, self._exits, self._page, _EXIT_OF_C_AT)

    def about_to(self, chain: str, digest: bytes) -> None:
        _NOTE.pack_into(self._page, _NOTE_AT, 1, self._places[chain], digest)

    def over(self) -> None:
        _IN_HAND.pack_into(self._page, _NOTE_AT, 0)

    def close(self) -> None:
        """The instance has come to its end in a way that is known: remove the file."""
        self._last_words.close()
        self._path.unlink(missing_ok=True)
        self._page.close()
        os.close(self._file)
        _remove_if_empty(self._directory)

    def _exits(self, code: int) -> None:
        _EXIT.pack_into(self._page, _EXIT_AT, 1, code)


def box_directory(parent: str | None, job: str) -> Path:
    """Make the directory of one box of a job on this host; raises `OSError`.

    ``parent`` None: the system's directory for temporary files. It is this user's alone, as who can write there has
    records made dead letters, and its name is new: one that others know they could take.
    """
    base = Path(parent or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base)
    return Path(tempfile.mkdtemp(prefix=_name_of(job), dir=base))


def deaths_of(parent: str | None, job: str, chains: Sequence[str]) -> tuple[Death, ...]:
    """Return how processes of a job on this host have ended themselves, and forget it.

    ``parent`` as for `box_directory`. To be called while no box of this process is open.
    """
    directories = filter(is_private, Path(parent or tempfile.gettempdir()).glob(f"{_name_of(job)}*"))
    boxes = [box for directory in directories for box in directory.glob(f"*{_SUFFIX}")]
    found = [_read_of_black_box(box, chains) for box in sorted(boxes, key=lambda box: box.name)]
    return tuple(death for death in found if death is not None)


def _read_of_black_box(path: Path, chains: Sequence[str]) -> Death | None:
    """Take the box away, if its process is gone; return how that has ended, None where it did not end itself."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None  # another slot was quicker
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(file).st_nlink:
            return None
        path.unlink()
        _remove_if_empty(path.parent)
        return _death(os.pread(file, _PAGE, 0), os.pread(file, 4 * MAX_STACK, _PAGE), chains)
    except (BlockingIOError, PermissionError):
        return None  # its process lives
    finally:
        os.close(file)


def _death(page: bytes, words: bytes, chains: Sequence[str]) -> Death | None:
    if len(page) < _PAGE:
        return None
    magic, slot, instance = _HEAD.unpack_from(page, _HEAD_AT)
    in_hand, place, digest = _NOTE.unpack_from(page, _NOTE_AT)
    exited, code = _EXIT.unpack_from(page, _EXIT_AT)
    text = words.decode("utf-8", "replace")
    first, _, rest = text.removeprefix(_FATAL).partition("\n")
    if magic != _MAGIC:
        return None
    if text.startswith(_FATAL):
        cause = first.strip()
    elif exited:
        cause = f"it called os._exit({code})"
    elif page[_EXIT_OF_C_AT]:
        cause = "a C library called exit()"
    else:
        return None
    stack = rest.partition(_NO_PLACE)[0].strip()[:MAX_STACK]
    name = instance.rstrip(b"\0").decode("ascii", "replace")
    if not in_hand or place >= len(chains):
        return Death(name, slot, cause, stack=stack)
    return Death(name, slot, cause, chains[place], digest, stack)


def _name_of(job: str) -> str:
    return f"{_PREFIX}{blake2b(job.encode(), digest_size=8).hexdigest()}-"


def _sweep(base: Path) -> None:
    forgotten = time.time() - FORGOTTEN_S
    for directory in filter(is_private, base.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            for path in directory.iterdir():
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and status.st_mtime <= forgotten:
                        _read_of_black_box(path, ())
            if directory.lstat().st_mtime <= forgotten:
                directory.rmdir()  # its process was killed before it had a box


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        # Others have theirs in it, or it is gone.
        return


# The asynchronous part of a slot's snapshots: a thread that writes them, and says so when they are durable.
#
# One thread for all subtasks of the slot, one after the other: a checkpoint needs all of them in any case, and what is
# written together is synced together.


STOP_WAIT_S = 5.0
"""How long `close` waits for the thread: a write to a storage that does not answer cannot be interrupted."""


@dataclass(eq=False)
class _SubtaskSnapshot:
    """One subtask's part of a checkpoint.

    Attributes:
        cancelled: set by the loop, looked at by the thread.
        snapshot, channels, times: what is written so far; the thread's own.
    """

    key: TaskKey
    barrier: Barrier
    pending: PendingSnapshot
    began_ms: float
    cancelled: bool = False
    snapshot: SubtaskSnapshot | None = None
    channels: tuple[ChannelState, ...] | None = None
    times: SnapshotTimes | None = None


_Job = Callable[[], None]


class SnapshotRunner:
    """Carries out what `ftlayer.runtime.barrier_mode.slot.barriers` says of snapshots, in the loop's thread.

    The subtask has acked when both `PendingSnapshot.write` and `CapturedChannel.write` of each channel are over and
    synced. ``pending`` of each `begin` is released once, in the loop's thread.
    """

    def __init__(
        self,
        storage: SlotStorage,
        subtasks: int,
        send: Callable[[FromSlot], None],
        post: Callable[[Event], None],
    ) -> None:
        """``subtasks`` is how many the slot has; ``send`` reaches the coordinator, ``post`` the loop's mailbox."""
        self._storage = storage
        self._subtasks = subtasks
        self._send, self._post = send, post
        self._parts: dict[tuple[TaskKey, int], _SubtaskSnapshot] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_over = False
        # All below belongs to the thread.
        self._unsynced: list[tuple[_SubtaskSnapshot, SubtaskSnapshot]] = []
        self._acked: dict[int, int] = {}
        self._latest: dict[TaskKey, int] = {}
        self._thread = threading.Thread(target=self._run, name="ftlayer-snapshots", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the loop's side

    def begin(self, key: TaskKey, barrier: Barrier, pending: PendingSnapshot) -> None:
        part = _SubtaskSnapshot(key, barrier, pending, stopwatch_ms())
        self._parts[key, barrier.checkpoint] = part
        self._jobs.put(lambda: self._write(part))

    def captured(
        self, key: TaskKey, checkpoint: int, channels: tuple[CapturedChannel, ...], times: SnapshotTimes
    ) -> None:
        part = self._parts.get((key, checkpoint))
        if part is not None:
            self._jobs.put(lambda: self._write_channels(part, channels, times))

    def give_up(self, key: TaskKey, checkpoint: int, reason: str) -> None:
        self._send(SubtaskDeclined(checkpoint, *key, reason, counts=False))
        self.cancel(key, checkpoint)

    def cancel(self, key: TaskKey, checkpoint: int) -> None:
        part = self._parts.get((key, checkpoint))
        if part is not None and not part.cancelled:
            part.cancelled = True
            # If the thread had nothing to do for it, this is the only place that says that it is over.
            self._jobs.put(lambda: self._over(part))

    def over(self, key: TaskKey, checkpoint: int) -> None:
        """The thread is done with a snapshot (`SnapshotOver`): release it."""
        part = self._parts.pop((key, checkpoint), None)
        if part is not None:
            part.pending.release()

    def completed(self, checkpoint: int) -> None:
        self._jobs.put(lambda: self._storage.completed(checkpoint))

    def aborted(self, checkpoint: int) -> None:
        self._jobs.put(lambda: self._storage.aborted(checkpoint))

    def close(self, *, over: bool = False) -> None:
        """Give up what is being written, and release everything. ``over``: see `SlotStorage.close`."""
        self._is_over = over
        for part in self._parts.values():
            part.cancelled = True
        self._jobs.put(None)
        self._thread.join(STOP_WAIT_S)
        for key, checkpoint in list(self._parts):
            self.over(key, checkpoint)

    def latest_acked(self, key: TaskKey) -> int:
        """Return the latest checkpoint that a task's part was acknowledged for, 0 for none; behind `close`."""
        return self._latest.get(key, 0)

    # ------------------------------------------------------------ the thread's side

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
        self._storage.close(over=self._is_over)

    def _do(self, job: _Job) -> None:
        try:
            job()
            if self._jobs.empty():
                self._sync()
        except CheckpointError as error:
            # Of what completed or aborted asked for: the files are swept later.
            logger.warning("the storage of checkpoints: %s", error)

    def _write(self, part: _SubtaskSnapshot) -> None:
        def write(writer: PieceWriter) -> None:
            part.snapshot = part.pending.write(writer, lambda: part.cancelled)

        self._try(part, write)

    def _write_channels(
        self, part: _SubtaskSnapshot, channels: tuple[CapturedChannel, ...], times: SnapshotTimes
    ) -> None:
        def write(writer: PieceWriter) -> None:
            uid, subtask = part.key
            written = tuple(channel.write(writer, f"{uid}/{subtask}") for channel in channels)
            part.channels, part.times = written, times

        self._try(part, write)

    def _try(self, part: _SubtaskSnapshot, write: Callable[[PieceWriter], None]) -> None:
        if part.cancelled:
            return
        try:
            write(self._storage.writer(part.barrier))
        except SnapshotCancelledError:
            return
        except BaseException as error:  # noqa: BLE001 - declines the checkpoint, with this reason
            raise_signalled(error)
            self._decline(part, error)
            return
        if part.snapshot is not None and part.channels is not None and part.times is not None:
            in_flight = sum(channel.frames.length for channel in part.channels)
            times = replace(
                part.times,
                async_ms=stopwatch_ms() - part.began_ms,
                in_flight_bytes=in_flight,
            )
            whole = replace(part.snapshot, channels=part.channels, times=times)
            self._unsynced.append((part, _measured(whole, part.barrier.checkpoint)))

    def _sync(self) -> None:
        """Make durable what was written since the last time, and say so."""
        unsynced, self._unsynced = self._unsynced, []
        for checkpoint in sorted({part.barrier.checkpoint for part, _ in unsynced}):
            mine = [(part, whole) for part, whole in unsynced if part.barrier.checkpoint == checkpoint]
            try:
                writer = self._storage.writer(mine[0][0].barrier)
                self._acked[checkpoint] = self._acked.get(checkpoint, 0) + len(mine)
                if self._acked[checkpoint] == self._subtasks:
                    del self._acked[checkpoint]
                    writer.close()
                else:
                    writer.sync()
            except BaseException as error:  # noqa: BLE001 - as above
                raise_signalled(error)
                for part, _ in mine:
                    self._decline(part, error)
                continue
            for part, whole in mine:
                if not part.cancelled:
                    self._latest[part.key] = max(checkpoint, self._latest.get(part.key, 0))
                    self._send(SubtaskAcked(checkpoint, whole))
                self._over(part)

    def _decline(self, part: _SubtaskSnapshot, error: BaseException) -> None:
        logger.warning(
            "checkpoint %d: %s cannot take its part", part.barrier.checkpoint, part.key, exc_info=error
        )
        if not part.cancelled:
            part.cancelled = True
            reason = text_of(error) if isinstance(error, CheckpointError) else described(error)
            final = lasting(error)
            code = "" if final is None else final.code
            declined = SubtaskDeclined(
                part.barrier.checkpoint, *part.key, reason, True, code, is_programs(error)
            )
            self._send(declined)
        self._over(part)

    def _over(self, part: _SubtaskSnapshot) -> None:
        self._post(SnapshotOver(part.key, part.barrier.checkpoint))


def stopwatch_ms() -> float:
    """Return milliseconds since any fixed moment, as exactly as the machine can."""
    return time.perf_counter_ns() / 1e6


def _measured(snapshot: SubtaskSnapshot, checkpoint: int) -> SubtaskSnapshot:
    """Fill in how many bytes it refers to, and how many of them are new."""
    keyed = () if snapshot.keyed is None else snapshot.keyed.pieces
    aside = sum(len(item) for state in snapshot.operators for item in state.items)
    aside += sum(len(committable.message) for committable in snapshot.committables)
    aside += snapshot.times.in_flight_bytes
    return replace(
        snapshot,
        state_bytes=aside + sum(part.piece.length for part in keyed),
        written_bytes=aside + sum(part.piece.length for part in keyed if part.checkpoint == checkpoint),
    )


class Suspecting:
    """One instance's. Chains without a failure policy have no suspects, and a job without any has no boxes."""

    def __init__(self, slot: SlotContext, directory: str | None) -> None:
        """``directory`` is for local files; None: the system's for temporary ones."""
        self._slot = slot
        self._directory = directory
        self._chains = tuple(
            vertex.uid for vertex in slot.order.graph.vertices if vertex.failures is not None
        )
        self._box: BlackBox | None = None
        self._armed = False
        self._convictions: tuple[Conviction, ...] = ()

    def deaths(self) -> tuple[Death, ...]:
        """Return how processes of the job on this host have ended themselves, as far as nobody has asked yet."""
        if not self._chains:
            return ()
        try:
            return deaths_of(self._directory, self._slot.order.job, self._chains)
        except OSError as error:
            logger.warning("slot %d: how others have ended cannot be read: %s", self._slot.order.slot, error)
            return ()

    def begin(self, deploy: Deploy) -> None:
        """The tasks begin: from now on the process writes down how it ends itself."""
        if not self._chains:
            return
        order = self._slot.order
        self._convictions = deploy.convictions
        try:
            directory = box_directory(self._directory, order.job)
            self._box = BlackBox(directory, order.slot, self._slot.instance, self._chains)
        except OSError as error:
            logger.warning(
                "slot %d: a record that ends its process would not be found, since nothing can be kept of it: %s",
                order.slot,
                error,
            )
            return
        self._armed = deploy.armed

    def of(self, uid: str) -> Suspects:
        """Return the suspects of a chain in this slot; behind `begin`."""
        if uid not in self._chains:
            return NO_SUSPECTS
        if self._box is None:
            return ChainSuspects(uid, armed=False, convictions=self._convictions, notes=_NoNotes())
        return ChainSuspects(uid, armed=self._armed, convictions=self._convictions, notes=self._box)

    def end(self) -> None:
        """The tasks run no more: what becomes of the process now is no record's doing."""
        if self._box is not None:
            self._box.close()
            self._box = None


class _NoNotes:
    def about_to(self, chain: str, digest: bytes) -> None:
        """No process would read it."""

    def over(self) -> None:
        """Nothing was noted."""


@dataclass(frozen=True)
class BarrierSlotFactory:
    plan: CheckpointPlan
    restarts_in_place = True

    def instance(self, slot: SlotContext) -> BarrierSlotShell:
        return BarrierSlotShell(self.plan, slot)


@dataclass(frozen=True)
class _Opened:
    storage: SlotStorage
    checkpointed: Mapping[TaskKey, Checkpointed]


class BarrierSlotShell:
    """`ftlayer.runtime.slot.mode.SlotModeShell` of a job with checkpoints.

    Attributes:
        snapshots: writes them; None before there are tasks.
    """

    touch_timeout_ms = None
    tracer = None
    """See `SlotModeShell.tracer`: no record has a root."""

    def __init__(self, plan: CheckpointPlan, slot: SlotContext) -> None:
        self.snapshots: SnapshotRunner | None = None
        self._plan = plan
        self._slot = slot
        self._opened: _Opened | None = None
        self._rules: BarrierSlot | None = None
        self._restored: Restore | None = None  # what it begins with
        self._suspecting = Suspecting(slot, plan.config.state_directory)

    def open(self, deploy: Deploy) -> BarrierTaskMode:
        order, plan = self._slot.order, self._plan
        self._restored = deploy.restore
        storage = slot_storage(
            plan.config,
            order.graph.name,
            plan.run,
            slot=order.slot,
            epoch=deploy.epoch,
            instance=self._slot.instance,
            key=plan.key,
        )
        place = this_process(f"slot {order.slot}")
        sinks = partial(open_sink, run=self._slot.run_of(deploy), checkpoint_key=order.key, place=place)
        self._suspecting.begin(deploy)
        tasks = BarrierTaskMode(
            _by_subtask(deploy.restore),
            partial(self._open_state, storage),
            sinks,
            self._suspecting.of,
            place,
            self._is_interrupted if plan.config.interruptible_timers else never,
        )
        self._opened = _Opened(storage, tasks.checkpointed)
        return tasks

    def rules(self, parts: SlotParts) -> BarrierSlot:
        opened = self._opened
        assert opened is not None
        self.snapshots = SnapshotRunner(
            opened.storage, len(parts.seating.seats), self._slot.tell, self._slot.post
        )
        checkpoints = CheckpointParts(self._plan.config, opened.checkpointed, stopwatch_ms)
        rules = self._rules = BarrierSlot(checkpoints, parts)
        if self._restored is not None:
            read = partial(_read, opened.storage, self._restored.location)
            put_in_flight(parts.graph, parts.seating, parts.codec, self._restored, read)
        return rules

    def positions(self, key: TaskKey) -> Mapping[str, bytes]:
        restored = _by_subtask(self._restored).get(key)
        return {} if restored is None else restored.positions

    def carry_out(self, instruction: ModeInstruction) -> None:
        snapshots = self.snapshots
        assert snapshots is not None
        match instruction:
            case BeginSnapshot(key, barrier, pending):
                snapshots.begin(key, barrier, pending)
            case SnapshotCaptured(key, checkpoint, channels, times):
                snapshots.captured(key, checkpoint, channels, times)
            case GiveUpSnapshot(key, checkpoint, reason):
                snapshots.give_up(key, checkpoint, reason)
            case CancelSnapshot(key, checkpoint):
                snapshots.cancel(key, checkpoint)
            case ReleaseSnapshot(key, checkpoint):
                snapshots.over(key, checkpoint)
            case KeepFiles(checkpoint):
                snapshots.completed(checkpoint)
            case DropFiles(checkpoint):
                snapshots.aborted(checkpoint)
            case _:
                raise misplaced(instruction)

    def touch(self, roots: list[U64Array]) -> None:
        """See `SlotModeShell.touch`: no record has roots."""

    def deaths(self) -> tuple[Death, ...]:
        return self._suspecting.deaths()

    def damaged(self, error: BaseException) -> int:
        if self._restored is None or not isinstance(error, CheckpointDamagedError):
            return 0
        return self._restored.checkpoint

    def end(self, *, over: bool, stands: int) -> None:
        """See `SlotModeShell.end`: give up what is being written, and what no checkpoint can hold."""
        self._suspecting.end()
        if self._opened is None or self.snapshots is None:
            return
        self.snapshots.close(over=over)
        for key, task in self._opened.checkpointed.items():
            task.discard(stands, self.snapshots.latest_acked(key))

    def close(self) -> None:
        """See `SlotModeShell.close`: `end` has closed everything."""

    def _is_interrupted(self) -> bool:
        rules = self._rules
        return rules is not None and rules.interrupts(self._slot.barrier_waits(), system_now().mono_ms)

    def _open_state(
        self, storage: SlotStorage, uid: str, subtask: int, keys: Mapping[str, pa.Schema]
    ) -> CheckpointedBackend:
        graph, config, restore = self._slot.order.graph, self._plan.config, self._restored
        groups = groups_of(subtask, graph.vertex(uid).parallelism, graph.max_parallelism)
        spec = BackendSpec(groups.start, groups.stop, graph.max_parallelism, keys, config.state_directory)
        location = "" if restore is None else restore.location
        return open_backend(config, spec, _by_subtask(restore).get((uid, subtask)), storage, location)


def _by_subtask(restore: Restore | None) -> dict[TaskKey, SubtaskRestore]:
    return {} if restore is None else {(each.uid, each.subtask): each for each in restore.subtasks}


def _read(storage: SlotStorage, location: str, piece: Piece) -> bytes:
    with storage.open(location, piece) as file:
        return file.read()
