"""All channels of a slot to others: what waits for more rows, for a peer, or for credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ftlayer.checkpoint.barrier import Alignment, SnapshotKind
from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.channel_frames import ElementCodec, roots_in, rows_in
from ftlayer.runtime.slot.rules.credit import SendWindow
from ftlayer.runtime.slot.rules.events import Transmit
from ftlayer.runtime.slot.rules.inbox import Inbox, can_join, cut, joined, size_of
from ftlayer.topology.job_graph import Channel

LIMIT_FRAMES = 4
"""What a slow receiver lets be in flight is at least so many frames: a task runs for a whole frame at a time, and all
that comes of it is in flight, on top of the limit."""


class Output(Protocol):
    @property
    def has_room(self) -> bool:
        """Whether the task should produce more for it."""

    def send(self, element: messages.Element, now_ms: int) -> None:
        """Take an element, whether there is room or not."""


class LocalOutput:
    """A channel to a task of the same slot: elements are handed over as they are."""

    def __init__(self, channel: Channel, inbox: Inbox) -> None:
        self._channel = channel
        self._inbox = inbox

    @property
    def has_room(self) -> bool:
        return self._inbox.has_room(self._channel)

    def send(self, element: messages.Element, now_ms: int) -> None:
        self._inbox.put(self._channel, element, 0)


@dataclass(frozen=True, slots=True)
class LateBarrier:
    """A barrier that waits in an output in its order, and overtakes what waits before it at ``due_ms`` (monotone)."""

    barrier: messages.Barrier
    frame: bytes
    due_ms: int


class RemoteOutput:
    """A channel to another slot: small batches wait for others, then everything for credit.

    Attributes:
        channel, slot: which one, and the slot it leads to.
        waiting_since_ms: since when a small batch waits; None if none does.
        late: barriers with a timeout that wait in their order, the earliest first.
        window: what may be on its way, and what is.
    """

    def __init__(self, channel: Channel, slot: int, codec: ElementCodec, options: TopologyOptions) -> None:
        self.channel = channel
        self.slot = slot
        self.waiting_since_ms: int | None = None
        self.late: deque[LateBarrier] = deque()
        self._codec = codec
        self._batch_rows = options.batch_rows
        self._frame_bytes = self._full = options.channel_bytes
        self.window = SendWindow(options.channel_bytes)
        self._small: tuple[messages.Batch, ...] = ()  # replaced, never changed: another thread looks at it
        self._small_rows = self._small_bytes = 0
        self._mark: messages.Watermark | messages.Idle | messages.Splits | messages.EndOfStream | None = None

    @property
    def has_room(self) -> bool:
        return self.window.has_room

    @property
    def is_empty(self) -> bool:
        return not self._small and self.window.is_empty

    def send(self, element: messages.Element, now_ms: int) -> None:
        if not isinstance(element, messages.Batch):
            self.flush()
            if not isinstance(element, messages.Barrier | messages.CancelMarker | messages.LatencyMarker):
                self._mark = element
            self.window.put(self._codec.encode(self.channel, element))
            return
        for part in cut(element, self._rows_at_most(element)):
            if self._small and not can_join(self._small[0], part):
                self.flush()
            self._small += (part,)
            self._small_rows += part.num_rows
            self._small_bytes += size_of(part)
            if self._small_rows >= self._batch_rows or self._small_bytes >= self._frame_bytes:
                self.flush()
            elif self.waiting_since_ms is None:
                self.waiting_since_ms = now_ms

    def flush(self) -> None:
        if self._small:
            self.window.put(self._codec.encode(self.channel, joined(self._small)))
            self._forget_small()

    def take(self) -> bytes | None:
        """Return the next frame to go out, counted as sent; None if none may go."""
        return self.window.take()

    def limit(self, size: int) -> None:
        """From now on at most ``size`` bytes may be on their way, in frames that are much smaller if it is little."""
        self.window.limit = size
        self._frame_bytes = size if size >= self._full else size // LIMIT_FRAMES

    def send_barrier(self, barrier: messages.Barrier, due_ms: int | None) -> None:
        """Take a barrier that goes behind everything; it overtakes it at ``due_ms`` (see `overtake_late`)."""
        self.flush()
        frame = self._codec.encode(self.channel, barrier)
        self.window.put(frame)
        if due_ms is not None:
            self.late.append(LateBarrier(barrier, frame, due_ms))

    def overtake(self, barrier: messages.Barrier) -> tuple[bytes, ...]:
        """Take a barrier that goes ahead of everything; returns the frames with records that it overtakes."""
        self.flush()
        overtaken = _with_records(self.window.waiting())
        self.window.put_first(self._codec.encode(self.channel, barrier))
        return overtaken

    def overtake_late(self, late: LateBarrier) -> tuple[bytes, ...]:
        """Turn one of the late barriers unaligned; returns the frames with records that it overtakes."""
        self.late.remove(late)
        overtaken = _with_records(self.window.pull(late.frame))
        unaligned = replace(late.barrier, alignment=Alignment.UNALIGNED)
        self.window.put_first(self._codec.encode(self.channel, unaligned))
        return overtaken

    def granted(self, size: int) -> None:
        self.window.granted(size)

    def reset(self) -> int:
        """Forget everything, for a receiver that begins anew; returns the records that had not been sent.

        The last mark is what the new one has to hear first: a watermark, splits, or an end, are not said a second time.
        """
        rows = self._small_rows + sum(rows_in(frame) for frame in self.window.reset())
        self.late.clear()
        self._forget_small()
        if self._mark is not None:
            self.window.put(self._codec.encode(self.channel, self._mark))
        return rows

    def roots(self) -> list[U64Array]:
        """Return the roots of what has not been sent; may be called by any thread."""
        small = [batch.lineage.roots for batch in self._small if batch.lineage is not None]
        return small + [roots_in(frame) for frame in self.window.waiting()]

    def validate(self) -> None:
        assert self._small_rows == sum(batch.num_rows for batch in self._small), "small rows are miscounted"
        assert (self.waiting_since_ms is None) == (not self._small), "small batches wait for nothing"
        assert self.window.in_flight >= 0, f"{self.channel} has more credit than there is"

    def _rows_at_most(self, batch: messages.Batch) -> int:
        """Return where to cut, so that frames are as small as a limit that was lowered wants them."""
        size = int(batch.payload.nbytes)
        if self._frame_bytes >= self._full or not size:
            return self._batch_rows
        # Only what has more than twice as many rows is cut.
        return max(1, min(self._batch_rows, batch.num_rows * self._frame_bytes // (2 * size)))

    def _forget_small(self) -> None:
        self._small = ()
        self._small_rows = self._small_bytes = 0
        self.waiting_since_ms = None


def _with_records(frames: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(frame for frame in frames if rows_in(frame))


AGES_A_FRAME = 4
"""A busy loop lets a small batch go for so many ``batch_age_ms`` of its CPU time. A frame takes 1 to 2 ms at its ends,
whatever is in it, where processes share cores: with the default it is a tenth of the work at the most."""

LONGEST_AGES = 200
"""A small batch waits no longer than so many times ``batch_age_ms``, however busy the loop is."""


@dataclass(frozen=True, slots=True)
class Departed:
    """A barrier with a timeout has left, or is about to, and has overtaken these frames, if any."""

    channel: Channel
    checkpoint: int
    overtaken: tuple[bytes, ...]


class Outgoing:
    """Says what may be sent. Nothing goes to a slot before `peer_up`, nor after `peer_lost` or `drop_peer`.

    Attributes:
        aging: outputs with small batches, the oldest first.
        late: outputs with late barriers.
        departed: late barriers that have left since the last `take_departed`.
        handed: frames that were returned, and may not be carried out yet.
    """

    def __init__(self, outputs: Mapping[Channel, RemoteOutput], batch_age_ms: int) -> None:
        """Small batches wait for others up to ``batch_age_ms``, and longer in a busy loop (`flush_aged`)."""
        self._outputs = outputs
        self._age_ms = batch_age_ms
        self._up: set[int] = set()
        self.aging: dict[RemoteOutput, None] = {}
        self._price_ms = AGES_A_FRAME * batch_age_ms
        self._kept_ms = len(outputs) * self._price_ms  # what is not used is kept for one of each channel
        self._paid_ms = -self._kept_ms  # of the loop's CPU time: what old small batches have been sent for
        self.late: set[RemoteOutput] = set()
        self.departed: list[Departed] = []
        self.handed: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        return all(output.is_empty for output in self._outputs.values())

    def send(self, output: RemoteOutput, element: messages.Element, now_ms: int) -> list[Transmit]:
        output.send(element, now_ms)
        if output.waiting_since_ms is None:
            self.aging.pop(output, None)
        elif output not in self.aging:
            self.aging[output] = None
        return self._transmit(output)

    def send_barrier(
        self, output: RemoteOutput, barrier: messages.Barrier, now: Now
    ) -> tuple[list[Transmit], tuple[bytes, ...] | None]:
        """Send a barrier: an UNALIGNED one ahead of all that has not left, others behind it.

        Also returns the frames with records that it has overtaken; None: `take_departed` will tell.
        """
        self.aging.pop(output, None)
        overtaken: tuple[bytes, ...] | None = ()
        if barrier.alignment is Alignment.UNALIGNED:
            overtaken = output.overtake(barrier)
        elif barrier.timeout_ms is not None and barrier.kind is SnapshotKind.CHECKPOINT:
            output.send_barrier(barrier, now.mono_ms + barrier.started_ms + barrier.timeout_ms - now.wall_ms)
            self.late.add(output)
            overtaken = None
        else:
            output.send_barrier(barrier, None)
        return self._transmit(output), overtaken

    def take_departed(self) -> list[Departed]:
        departed, self.departed = self.departed, []
        return departed

    def overtake_late(self, now_ms: int) -> list[Transmit]:
        """Let late barriers overtake what waits before them, if it is time."""
        sent: list[Transmit] = []
        for output in list(self.late):
            while output.late and output.late[0].due_ms <= now_ms:
                late = output.late[0]
                overtaken = output.overtake_late(late)
                self.departed.append(Departed(output.channel, late.barrier.checkpoint, overtaken))
            sent += self._transmit(output)
        return sent

    @property
    def late_due_ms(self) -> int | None:
        """When the next late barrier overtakes what waits before it (monotone, ms); None: there is none."""
        return min((output.late[0].due_ms for output in self.late), default=None)

    def forget_late(self, checkpoint: int) -> None:
        """Let the barriers of a checkpoint wait in their order, however long it takes."""
        for output in list(self.late):
            output.late = deque(late for late in output.late if late.barrier.checkpoint != checkpoint)
            self._note_late(output)

    def limited(self, channel: Channel, size: int) -> list[Transmit]:
        output = self._outputs.get(channel)
        if output is None:
            return []
        output.limit(size)
        return self._transmit(output)

    def granted(self, channel: Channel, size: int) -> list[Transmit]:
        output = self._outputs.get(channel)
        if output is None:
            return []
        output.granted(size)
        return self._transmit(output)

    def flush_aged(self, now_ms: int, cpu_ms: int) -> list[Transmit]:
        """Let nothing wait for others that has waited long enough, as far as that is worth its cost.

        ``cpu_ms`` is the CPU time that the loop's thread has taken so far. A turn of a source leaves a small batch for
        each of its channels. Were all of them sent as soon as they are old, frames would become smaller with each slot
        more, until they cost more than their records; and at once where slots share cores. So in a busy loop one goes
        for each `AGES_A_FRAME` ages of CPU time, the oldest first. A loop that has nothing to do lets all go (`flush`).
        """
        self._paid_ms = max(self._paid_ms, cpu_ms - self._kept_ms)
        sent: list[Transmit] = []
        while self.aging:
            oldest = next(iter(self.aging))
            since = oldest.waiting_since_ms
            waited_ms = LONGEST_AGES * self._age_ms if since is None else now_ms - since
            if waited_ms < self._age_ms:
                break
            if waited_ms < LONGEST_AGES * self._age_ms:
                if cpu_ms - self._paid_ms < self._price_ms:
                    break
                self._paid_ms += self._price_ms
            sent += self._flush(oldest)
        return sent

    def flush(self) -> list[Transmit]:
        return [each for output in list(self.aging) for each in self._flush(output)]

    def carried_out(self) -> None:
        """All that this has returned so far is on its way: its roots are held there."""
        # Another thread may look at the old one.
        self.handed = []

    def roots(self) -> list[U64Array]:
        """Return the roots of what is not on its way; may be called by any thread."""
        held = [roots_in(frame) for frame in list(self.handed)]
        for output in self._outputs.values():
            held += output.roots()
        return held

    # ------------------------------------------------------------ peers

    def peer_up(self, slot: int) -> list[Transmit]:
        self._up.add(slot)
        return [each for output in self._towards(slot) for each in self._transmit(output)]

    def peer_lost(self, slot: int) -> None:
        self._up.discard(slot)

    def drop_peer(self, slot: int) -> int:
        """Forget what was for a slot; what comes now is held for its next instance. Returns the unsent records."""
        self._up.discard(slot)
        dropped = 0
        for output in self._towards(slot):
            dropped += output.reset()
            self.aging.pop(output, None)
        return dropped

    def unsent_to(self, slot: int) -> bool:
        return any(not output.is_empty for output in self._towards(slot))

    def _towards(self, slot: int) -> Iterable[RemoteOutput]:
        return [output for output in self._outputs.values() if output.slot == slot]

    def _flush(self, output: RemoteOutput) -> list[Transmit]:
        del self.aging[output]
        output.flush()
        return self._transmit(output)

    def _transmit(self, output: RemoteOutput) -> list[Transmit]:
        sent: list[Transmit] = []
        if output.slot in self._up:
            while (frame := output.take()) is not None:
                self.handed.append(frame)
                sent.append(Transmit(output.slot, frame))
                if output.late and frame is output.late[0].frame:
                    self.departed.append(
                        Departed(output.channel, output.late.popleft().barrier.checkpoint, ())
                    )
        if output in self.late:
            self._note_late(output)
        return sent

    def _note_late(self, output: RemoteOutput) -> None:
        if not output.late:
            self.late.discard(output)
