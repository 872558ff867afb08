"""A source's subtask that keeps its rows until they are done, and registers where they are.

The vertex stores none of them before it wants them: because they failed or timed out, or because a slot was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.common.clock import Now
from ftlayer.errors import ProtocolError, SourceChangedError, SourceError
from ftlayer.records.ids import I32Array, I64Array, U64Array
from ftlayer.records.ipc import digest_of
from ftlayer.runtime.handler import Handler
from ftlayer.runtime.protocol.messages import EndOfStream
from ftlayer.runtime.task import actions as task_actions
from ftlayer.runtime.task.emitter import Emitter, RootEmission, SourceMarkers, failures_of
from ftlayer.runtime.task.event_time import SplitMarks
from ftlayer.topology.job_graph import JobGraph
from ftlayer.vertex import calls

UNNAMED = -1
"""The segment of a range that the vertex has not accepted yet."""


@dataclass(slots=True)
class BufferedRange:
    facts: calls.RowRange
    payload: pa.RecordBatch
    key_hashes: I32Array | None = None
    segment: int = UNNAMED


class ReplayBuffer:
    """One partition's rows from its floor on, in their order.

    An instance that takes a partition over, and has nothing of it, is given the ranges that are open, and reads their
    rows again: `take` keeps these, and returns what is behind them. Rows that are done are left out.

    Attributes:
        head: the position up to which rows are registered, or asked to be.
        rereading: ranges that are still to be read again, in their order.
    """

    def __init__(self, source: str, partition: str) -> None:
        self._source = source
        self._partition = partition
        self.head: bytes | None = None
        self._head_at = (-1, 0)
        # Up to which place rows were given to `take`, behind the last of them, and from which on they are gathered.
        self._reached = self._read_to = self._gathered_from = (-1, 0)
        self.rereading: deque[calls.OpenRange] = deque()
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        self._ranges: deque[BufferedRange] = deque()
        self._by_segment: dict[int, BufferedRange] = {}

    def __len__(self) -> int:
        return len(self._ranges)

    def taken_over(self, found: calls.HeldPartition) -> list[BufferedRange]:
        """Take what the vertex knows of the partition; return what is kept and has to be registered anew.

        Raises `SourceError` if rows are wanted that are not here, and that the reader has passed: another instance
        will read them.
        """
        kept = {(each.facts.begins, each.facts.rows): each for each in self._ranges}
        self._by_segment = {}
        self.rereading = deque()
        beyond: list[BufferedRange] = []
        below: deque[BufferedRange] = deque()
        for each in found.ranges:
            mine = kept.get((each.range.begins, each.range.rows))
            if mine is not None:
                self._name(mine, each.segment)
                below.append(mine)
            elif each.range.begins < self._gathered_from:
                raise self._passed(each.range)
            else:
                self.rereading.append(each)
        head_at = found.number, found.place
        for mine in self._ranges:
            if mine.facts.begins >= head_at:
                mine.segment = UNNAMED
                beyond.append(mine)
        self.head, self._head_at = found.position, head_at
        self._ranges = below
        if self._gathered and (not self.rereading or self.rereading[0].range.begins != self._gathered_from):
            if head_at <= self._gathered_from:
                raise SourceError(
                    f"source {self._source!r}: the vertex was lost while partition {self._partition!r} was read again"
                )
            self._begin_range()
        return beyond

    def take(self, rows: task_actions.SourceRows) -> task_actions.SourceRows | None:
        """Keep rows that are read again; return those that are new, None if there are none.

        Raises `SourceChangedError` if these are other rows than were read at the same place before.
        """
        offset = max(self._reread(rows), _rows_before(rows, self._head_at))
        first = _place_from(rows, offset)
        ends = self._read_to = _ends_of(rows)
        is_new = ends > self._head_at
        if is_new and rows.number == self._head_at[0]:
            # A gap that rows which were registered end in is before the next row as well.
            first = max(first, self._head_at[1])
        self._reached = (rows.number, first) if is_new else ends
        if not self._gathered:
            self._gathered_from = self._reached
        if not is_new:
            return None
        places = None if rows.places is None else rows.places[offset:]
        return replace(rows, first_ordinal=first, payload=rows.payload.slice(offset), places=places)

    def add(self, added: BufferedRange) -> None:
        self._ranges.append(added)
        self.head, self._head_at = added.facts.end, added.facts.ends

    def named(self, kept: BufferedRange, segment: int) -> None:
        self._name(kept, segment)

    def get(self, segment: int) -> BufferedRange | None:
        """Return a range; None if it was not read again yet, or is done."""
        return self._by_segment.get(segment)

    def forget_below(self, segment: int) -> None:
        while self._ranges and UNNAMED < self._ranges[0].segment < segment:
            del self._by_segment[self._ranges.popleft().segment]

    def check_ended(self) -> None:
        if self.rereading:
            facts = self.rereading[0].range
            at = f" at {self._read_to[1]}" if self._read_to[0] == facts.number else ""
            raise SourceChangedError(
                f"{self._where(facts)} are not done, and now the source ends{at}, before their end: give it back what "
                "it had, or give the source another uid, with which it is read from its start"
            )

    # ------------------------------------------------------------ reading again

    def _reread(self, rows: task_actions.SourceRows) -> int:
        """Keep what belongs to open ranges; return how many of the rows are dealt with."""
        offset, count = 0, rows.payload.num_rows
        while self.rereading:
            facts = self.rereading[0].range
            if not facts.rows and facts.ends <= _ends_of(rows):
                self._keep(self.rereading.popleft(), rows.payload.slice(0, 0))
                continue
            if offset == count:
                break
            if not self._gathered:
                offset = max(offset, _rows_before(rows, facts.begins))
                if offset == count:
                    break
                self._gathered_from = facts.begins
            size = min(_rows_before(rows, facts.ends) - offset, facts.rows - self._gathered_rows)
            if size <= 0:
                raise SourceChangedError(
                    f"{self._where(facts)} are not done, and the source passes over them now"
                )
            self._gathered.append(rows.payload.slice(offset, size))
            self._gathered_rows += size
            offset += size
            if self._gathered_rows == facts.rows:
                self._keep_gathered()
        return offset

    def _keep_gathered(self) -> None:
        found = self.rereading.popleft()
        alike = all(part.schema.equals(self._gathered[0].schema) for part in self._gathered)
        payload = pa.concat_batches(self._gathered) if alike else None
        if payload is None or (found.range.digest and digest_of(payload) != found.range.digest):
            raise SourceChangedError(
                f"{self._where(found.range)} are other rows now than those that were read before"
            )
        self._keep(found, payload)
        self._begin_range()

    def _keep(self, found: calls.OpenRange, payload: pa.RecordBatch) -> None:
        kept = BufferedRange(found.range, payload)
        self._ranges.append(kept)
        self._name(kept, found.segment)

    def _begin_range(self) -> None:
        self._gathered, self._gathered_rows = [], 0

    def _passed(self, facts: calls.RowRange) -> SourceError:
        return SourceError(
            f"{self._where(facts)} are not done, and this instance of the source has them no more"
        )

    def _name(self, kept: BufferedRange, segment: int) -> None:
        kept.segment = segment
        self._by_segment[segment] = kept

    def _where(self, facts: calls.RowRange) -> str:
        first = f"{facts.rows} rows of partition {self._partition!r} from {facts.first} on"
        return f"source {self._source!r}: {first}"


def _rows_before(rows: task_actions.SourceRows, place: tuple[int, int]) -> int:
    count: int = rows.payload.num_rows
    if rows.number != place[0]:
        return count if rows.number < place[0] else 0
    if rows.places is not None:
        return int(np.searchsorted(rows.places, place[1]))
    return min(count, max(0, place[1] - rows.first_ordinal))


def _ends_of(rows: task_actions.SourceRows) -> tuple[int, int]:
    return rows.number, rows.first_ordinal + rows.span


def _place_from(rows: task_actions.SourceRows, offset: int) -> int:
    """Return from which place on the rows behind the first ``offset`` are: a gap is before its row."""
    if rows.places is None or not offset:
        return rows.first_ordinal + offset
    return int(rows.places[offset - 1]) + 1


POLL_MS = 100
"""The vertex is asked so often what need not be kept any more, and what is wanted: it writes that down as often."""

LAST_POLL_MS = 20
"""The same at a source's end, which waits for the answer."""


@dataclass(slots=True)
class _Asked:
    """Rows that the vertex was asked to register, ready to be sent."""

    kept: BufferedRange
    buffer: ReplayBuffer
    roots: U64Array
    sends: list[task_actions.Send]
    failures: tuple[calls.Failure, ...]
    accepted: bool = False


class RangeSourceTask:
    """`ftlayer.runtime.task.contract.Task` of a source. Sends rows in the order it got them, and no watermarks.

    A partition is *taken over* before its first rows are: until the vertex has answered they wait. When the vertex has
    lost its memory (`RangesLost`), all are taken over anew; what it does not know of is registered again,
    and goes out by replays.
    """

    def __init__(
        self,
        graph: JobGraph,
        uid: str,
        subtask: int,
        handler: Handler,
        holder: str,
        known: Iterable[str] = (),
    ) -> None:
        """``handler`` is this subtask's own; ``holder`` is a name no earlier instance of the subtask has had.

        ``known``: partitions of this subtask that were read before.
        """
        self.uid = uid
        self.subtask = subtask
        self._stream = graph.stream_of(uid)
        self._schema = graph.vertex(uid).operators[0].schema
        self._handler = handler
        self._holder = holder
        self._emitter = Emitter(graph, uid, subtask, handler)
        self._markers = SourceMarkers(self._emitter, uid)
        self._splits = SplitMarks(self._emitter)
        self._buffers: dict[str, ReplayBuffer] = {name: ReplayBuffer(uid, name) for name in known}
        self._held_back: deque[task_actions.SourceRows] = deque()  # for a partition that is being taken over
        self._untaken: set[str] = set(known)
        self._asked: deque[_Asked] = deque()
        self._first_ticket = 1  # of the first in `_asked`
        self._calls = 0
        self._taking_over = 0  # number of the last `TakeOver`; answers to earlier ones count no more
        self._polling = 0  # number of the last `AskRanges`, 0 while none is under way
        self._storing: dict[int, int] = {}  # number of a `StoreRows` → segment
        self._wakes_ms = 0
        self._incarnation = 0
        self._is_stale = False
        self._held: tuple[U64Array, ...] = ()
        self._ending = self._said_end = self._has_ended = False

    # ------------------------------------------------------------ views

    @property
    def rereads(self) -> bool:
        """Whether rows may have to be read again before there are new ones."""
        return bool(self._untaken) or any(buffer.rereading for buffer in self._buffers.values())

    @property
    def incarnation(self) -> int:
        """The vertex's, as it was when partitions were taken over last."""
        return self._incarnation

    @property
    def keeps(self) -> bool:
        """Whether rows are kept: they are not done, or not known to be. A vertex that is lost knows of none."""
        return bool(self._untaken or self._held_back) or any(map(len, self._buffers.values()))

    def held_roots(self) -> U64Array:
        held = self._held
        return np.concatenate(held) if held else np.zeros(0, np.uint64)

    # ------------------------------------------------------------ events

    def handle(self, event: task_actions.TaskEvent, now: Now) -> list[task_actions.Action]:
        match event:
            case task_actions.TaskStart():
                return self._take_over() if self._untaken else []
            case task_actions.TimeCame():
                return self._poll(now)
            case task_actions.SourceRows():
                return self._read(event, now)
            case task_actions.RowsPersisted(ticket, segment):
                return self._registered(ticket, segment, now)
            case task_actions.RangesAnswered(number, reply):
                return self._answered(number, reply, now)
            case task_actions.RangesLost(incarnation):
                return self._lost() if incarnation == self._incarnation else []
            case task_actions.SourceOver():
                self._ending = True
                return [*self._wake(now), *self._ended()]
            case _:
                raise task_actions.refused(self.uid, event)

    # ------------------------------------------------------------ taking over

    def _take_over(self) -> list[task_actions.Action]:
        self._calls += 1
        self._taking_over = self._calls
        call = calls.TakeOver(self._stream, tuple(sorted(self._untaken)), self._holder)
        return [task_actions.CallRanges(self._calls, call)]

    def _taken_over(self, found: calls.TakenOver, now: Now) -> list[task_actions.Action]:
        names = {each.partition for each in found.partitions}
        if self._incarnation not in (0, found.incarnation) and not names.issuperset(self._buffers):
            # Others were taken over of a vertex that is lost.
            self._is_stale = True
            return self._take_all_over()
        self._incarnation = found.incarnation
        actions: list[task_actions.Action] = []
        for partition in found.partitions:
            buffer = self._buffers[partition.partition]
            self._untaken.discard(partition.partition)
            for kept in buffer.taken_over(partition):
                actions += self._register(buffer, kept, now)
        waiting, self._held_back = self._held_back, deque()
        for rows in waiting:
            actions += self._read(rows, now)
        return [*actions, *self._wake(now), *self._ended()]

    def _lost(self) -> list[task_actions.Action]:
        """The vertex knows nothing of what it was told in memory: take everything over anew."""
        self._is_stale = False
        self._first_ticket += len(self._asked)
        self._asked.clear()
        self._publish()
        self._storing, self._polling = {}, 0
        self._untaken = set(self._buffers)
        return self._take_over() if self._untaken else []

    def _take_all_over(self) -> list[task_actions.Action]:
        """Take everything over anew, if that is known to be lost, once no answer to a registration is missing.

        One that is refused is a `RangesLost`.
        """
        return self._lost() if self._is_stale and not self._asked else []

    # ------------------------------------------------------------ new rows

    def _read(self, rows: task_actions.SourceRows, now: Now) -> list[task_actions.Action]:
        buffer = self._buffers.get(rows.partition)
        if buffer is None:
            buffer = self._buffers[rows.partition] = ReplayBuffer(self.uid, rows.partition)
            self._untaken.add(rows.partition)
            self._held_back.append(rows)
            return self._take_over()
        if rows.partition in self._untaken:
            self._held_back.append(rows)
            return []
        new = buffer.take(rows)
        actions = self._wake(now)
        if new is None:
            return actions
        assert new.position is not None
        payload = new.payload
        facts = calls.RowRange(
            new.partition,
            buffer.head,
            new.position.end,
            new.number,
            new.first_ordinal,
            payload.num_rows,
            new.span,
            digest_of(payload),
        )
        return [*actions, *self._register(buffer, BufferedRange(facts, payload), now, new)]

    def _register(
        self, buffer: ReplayBuffer, kept: BufferedRange, now: Now, rows: task_actions.SourceRows | None = None
    ) -> list[task_actions.Action]:
        """Make roots of the rows, and have them registered behind what is registered already.

        ``rows`` None: they went out before, are wanted, and go out again by replays.
        """
        facts = kept.facts
        if facts.start != buffer.head:
            facts = kept.facts = replace(facts, start=buffer.head)
        n = facts.rows
        among = self._handler.persister.root_range(self._stream, self.subtask, facts.number, facts.first, n)
        if among is None:
            raise ProtocolError(f"source {self.uid!r} registers rows only with fault tolerance on")
        roots = among.ids()
        emission = self._emission(kept.payload, roots, None if rows is None else rows.in_time)
        kept.key_hashes = emission.key_hashes
        buffer.add(kept)
        call = calls.Register(
            self._stream,
            facts,
            among,
            emission.values,
            self._holder,
            self._incarnation,
            emission.ids,
            wanted=rows is None,
        )
        if rows is None:
            self._asked.append(_Asked(kept, buffer, roots, [], ()))
        else:
            markers = self._markers.behind(n, now, int(roots[-1]) if n else 0)
            sends = [*self._splits.around(rows, emission.sends), *markers]
            failures = failures_of(roots, emission.failures)
            if rows.misfit:
                failures = (calls.Failure(int(roots[0]), rows.misfit, self.uid, fatal=True),)
            self._asked.append(_Asked(kept, buffer, roots, sends, failures))
        self._publish()
        return [task_actions.PersistRoots(self._first_ticket + len(self._asked) - 1, call)]

    def _registered(self, ticket: int, segment: int, now: Now) -> list[task_actions.Action]:
        """Send what is registered, up to the first rows that are not: answers may come in any order."""
        place = ticket - self._first_ticket
        if not 0 <= place < len(self._asked) or self._asked[place].accepted:
            raise ProtocolError(f"source {self.uid!r}: ticket {ticket} was accepted, which is not out")
        self._asked[place].accepted = True
        self._asked[place].buffer.named(self._asked[place].kept, segment)
        actions: list[task_actions.Action] = []
        while self._asked and self._asked[0].accepted:
            asked = self._asked.popleft()
            actions.extend(asked.sends)
            if asked.failures:
                actions.append(task_actions.FailRoots(asked.failures))
            self._first_ticket += 1
        self._publish()
        return [*actions, *self._take_all_over(), *self._wake(now), *self._ended()]

    # ------------------------------------------------------------ what is kept

    def _poll(self, now: Now) -> list[task_actions.Action]:
        self._wakes_ms = 0
        if self._polling or self._untaken or not any(map(len, self._buffers.values())):
            return self._wake(now)
        self._calls += 1
        self._polling = self._calls
        return [
            task_actions.CallRanges(
                self._calls, calls.AskRanges(self._stream, self._holder, self._incarnation)
            )
        ]

    def _wake(self, now: Now) -> list[task_actions.Action]:
        due_ms = now.mono_ms + (LAST_POLL_MS if self._ending else POLL_MS)
        if now.mono_ms < self._wakes_ms <= due_ms or self._polling or not (self.keeps or self.rereads):
            return []
        self._wakes_ms = due_ms
        return [task_actions.WakeAt(due_ms)]

    def _answered(
        self, number: int, reply: calls.TakenOver | calls.RangesTold | calls.RowsStored, now: Now
    ) -> list[task_actions.Action]:
        match reply:
            case calls.TakenOver():
                # A later one asks for all that this one did.
                return self._taken_over(reply, now) if number == self._taking_over else []
            case calls.RangesTold() if number == self._polling:
                self._polling = 0
                return [*self._told(reply), *self._wake(now), *self._ended()]
            case calls.RowsStored():
                self._storing.pop(number, None)
        return []

    def _told(self, told: calls.RangesTold) -> list[task_actions.Action]:
        for partition, segment in told.done_below.items():
            self._buffers[partition].forget_below(segment)
        actions: list[task_actions.Action] = []
        under_way = set(self._storing.values())
        for wanted in told.wanted:
            kept = next(
                (found for each in self._buffers.values() if (found := each.get(wanted.segment))), None
            )
            if kept is not None and wanted.segment not in under_way:
                actions.append(self._store(kept, wanted.rows))
        return actions

    def _store(self, kept: BufferedRange, rows: U64Array) -> task_actions.CallRanges:
        if kept.key_hashes is None:
            kept.key_hashes = self._key_hashes(kept)
        which: I64Array = rows.astype(np.int64)
        hashes = None if kept.key_hashes is None else np.ascontiguousarray(kept.key_hashes[which])
        self._calls += 1
        self._storing[self._calls] = kept.segment
        call = calls.StoreRows(
            self._stream,
            kept.segment,
            rows,
            _rows_of(kept.payload, which),
            self._holder,
            self._incarnation,
            hashes,
        )
        return task_actions.CallRanges(self._calls, call)

    def _key_hashes(self, kept: BufferedRange) -> I32Array | None:
        """Return what the replay twins need of rows that were read again: they are sent by replays alone."""
        facts = kept.facts
        roots = self._handler.persister.roots(
            self._stream, self.subtask, facts.number, facts.first, facts.rows
        )
        assert roots is not None
        return self._emission(kept.payload, roots).key_hashes

    def _emission(self, payload: pa.RecordBatch, roots: U64Array, split: int | None = None) -> RootEmission:
        """Make the batches of rows. One that does not fit the schema is not sent, by no replay either."""
        if payload.schema.equals(self._schema):
            return self._emitter.roots(payload, roots, split=split)
        return self._emitter.unsent(roots)

    # ------------------------------------------------------------ the end

    def _ended(self) -> list[task_actions.Action]:
        if not self._ending or self._has_ended or self._asked or self._untaken:
            return []
        for buffer in self._buffers.values():
            buffer.check_ended()
        actions: list[task_actions.Action] = []
        if not self._said_end:
            self._said_end = True
            actions += self._emitter.mark(EndOfStream())
        if not self._storing and not any(map(len, self._buffers.values())):
            self._has_ended = True
            actions.append(task_actions.TaskEnded())
        return actions

    def _publish(self) -> None:
        self._held = tuple(asked.roots for asked in self._asked)


def _rows_of(payload: pa.RecordBatch, which: I64Array) -> pa.RecordBatch:
    """Return some rows, in ascending order; all of a stretch without a copy, as after a loss."""
    first, count = int(which[0]), len(which)
    if int(which[-1]) - first + 1 == count:
        return payload.slice(first, count)
    return pc.take(payload, pa.array(which), boundscheck=False)
