"""The asynchronous part of a slot's snapshots: a thread that writes them, and says so when they are durable.

One thread for all subtasks of the slot, one after the other: a checkpoint needs all of them in any case, and what is
written together is synced together.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import ChannelState, SnapshotTimes, SubtaskSnapshot
from ftlayer.checkpoint.storage.contract import PieceWriter, SlotStorage
from ftlayer.errors import CheckpointError, SnapshotCancelledError
from ftlayer.recovery import lasting
from ftlayer.runtime.barrier_mode.slot.in_flight import CapturedChannel
from ftlayer.runtime.barrier_mode.task.contract import PendingSnapshot
from ftlayer.runtime.protocol.messages import FromSlot, SubtaskAcked, SubtaskDeclined
from ftlayer.runtime.slot.events import Event, SnapshotOver
from ftlayer.runtime.task.contract import TaskKey

logger = logging.getLogger(__name__)

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
    """Carries out what `ftlayer.runtime.barrier_mode.slot.instructions` says of snapshots, in the loop's thread.

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
            part.channels, part.times = tuple(channel.write(writer) for channel in channels), times

        self._try(part, write)

    def _try(self, part: _SubtaskSnapshot, write: Callable[[PieceWriter], None]) -> None:
        if part.cancelled:
            return
        try:
            write(self._storage.writer(part.barrier))
        except SnapshotCancelledError:
            return
        except (Exception, MemoryError) as error:  # noqa: BLE001 - declines the checkpoint, with this reason
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
            except (Exception, MemoryError) as error:  # noqa: BLE001 - as above
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
            reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            final = lasting(error)
            code = "" if final is None else final.code
            self._send(SubtaskDeclined(part.barrier.checkpoint, *part.key, reason, code=code))
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
