"""A slot's way to the vertex: calls go out without waiting, answers come back through the mailbox.

Each kind of call has a thread of its own, so that XORs, which make room in the vertex, never queue behind
records that wait for room there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ftlayer.errors import IntakeTimeoutError, StaleIncarnationError
from ftlayer.records.ids import U64Array, xor_fold_by_root
from ftlayer.runtime.slot.rules import events
from ftlayer.runtime.task.actions import Acknowledge, AskReplays
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.worker import Worker
from ftlayer.vertex import calls
from ftlayer.vertex.client.client import VertexClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PersistOrder:
    """A task's `PersistRoots` on its way; ``number`` is its place among all of the stream.

    ``asked_s`` is when it was asked for, on a monotone clock of who asked.
    """

    number: int
    key: TaskKey
    ticket: int
    call: calls.Persist | calls.Register
    asked_s: float = 0.0

    @property
    def size(self) -> int:
        return size_of(self.call)


def size_of(call: calls.Persist | calls.Register) -> int:
    if isinstance(call, calls.Register):
        return 16 * len(call.roots)
    return int(call.payload.get_total_buffer_size())


class PersistQueue:
    """The calls of one stream, many at a time. A vertex without room is asked again, for as long as it takes.

    The positions of a source are a chain: when a call is refused for want of room, those behind it are refused
    for not following it. So whatever is refused waits until nothing is under way, and is then sent again in
    order. A refusal with nothing before it that lacked room is final. What was registered with a vertex that is lost is
    not sent again: its task begins anew.
    """

    def __init__(
        self,
        send: Callable[[PersistOrder], None],
        accepted: Callable[[PersistOrder, calls.Reply], None],
        failed: Callable[[BaseException], None],
        lost: Callable[[PersistOrder], None],
    ) -> None:
        """All four are called without waiting, from the loop's thread or the one that reads answers.

        ``send`` submits and has the future call `answered`; it is called in the order of the calls.
        """
        self._send, self._accepted, self._failed, self._lost = send, accepted, failed, lost
        self._lock = threading.Lock()
        self._numbers = 0
        self._under_way: set[int] = set()
        self._refused: dict[int, tuple[PersistOrder, BaseException]] = {}
        self._behind: list[PersistOrder] = []  # came while something was refused

    def put(
        self, key: TaskKey, ticket: int, call: calls.Persist | calls.Register, asked_s: float = 0.0
    ) -> None:
        with self._lock:
            self._numbers += 1
            order = PersistOrder(self._numbers, key, ticket, call, asked_s)
            if self._refused:
                self._behind.append(order)
                return
            self._under_way.add(order.number)
            self._send(order)

    def answered(self, order: PersistOrder, answer: Future[calls.Reply]) -> None:
        error = answer.exception()
        final: BaseException | None = None
        with self._lock:
            self._under_way.discard(order.number)
            is_lost = isinstance(error, StaleIncarnationError) and isinstance(order.call, calls.Register)
            if error is not None and not is_lost:
                self._refused[order.number] = order, error
            if self._refused and not self._under_way:
                final = self._first_final_error()
                if final is None:
                    again = [self._refused[number][0] for number in sorted(self._refused)] + self._behind
                    self._under_way.update(its.number for its in again)
                    self._refused, self._behind = {}, []
                    for its in again:
                        self._send(its)
        if error is None:
            self._accepted(order, answer.result())
        elif is_lost:
            self._lost(order)
        elif isinstance(error, IntakeTimeoutError):
            logger.warning("the vertex takes no more records for now; they are sent again: %s", error)
        if final is not None:
            self._failed(final)

    def _first_final_error(self) -> BaseException | None:
        """Return the error of the first refused call, unless it is that there was no room."""
        error = self._refused[min(self._refused)][1]
        return None if isinstance(error, IntakeTimeoutError) else error


# Below the pipeline's own window (64 calls, 64 MiB), which would make the submitting thread wait.
MAX_PERSISTS = 48
MAX_PERSIST_BYTES = 32 << 20
MAX_XORS = 32

TOUCH_ROOTS = 1 << 16
"""Roots of one `Touch`."""

CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class OpenedStream:
    """What the vertex says of a stream when a slot starts.

    ``positions`` are where its source's partitions go on, ``held`` those that were taken over; ``shard`` of ``shards``
    goes into root ids; ``exact``: the vertex keeps single ids.
    """

    positions: dict[str, bytes]
    shard: int
    shards: int
    exact: bool
    held: tuple[str, ...] = ()


class VertexPort:
    """All methods but `touch` belong to the loop's thread, and only `open` and `close` wait."""

    def __init__(
        self,
        client: VertexClient,
        streams: tuple[tuple[str, calls.StreamOptions], ...],
        post: Callable[[events.Event], None],
        owner: str,
    ) -> None:
        """``streams``: all of the graph's, with their options. ``post`` puts into the loop's mailbox.

        ``owner`` is the execution that has claimed the job. After a claim by another one all calls about streams are
        refused with `StaleOwnerError`.
        """
        self._client = client
        self._streams = streams
        self._owner = owner
        self._post = post
        self._pipeline = client.pipeline()
        self._incarnation = 0
        self._opened = threading.Event()  # cleared while the incarnation is being learned anew
        self._opened.set()
        self._lock = threading.Lock()  # guards the counts below
        self._persists = self._persist_bytes = 0
        self._xors = self._others = 0
        self._queues = {
            name: PersistQueue(self._send_persist, self._persisted, self._failed, self._ranges_lost)
            for name, _ in streams
        }
        self._unsent_xors: deque[Acknowledge] = deque()
        self._touching = False
        on_error = self._failed
        self._persister = Worker("persist", on_error)
        self._xorer = Worker("xor", on_error)
        self._failer = Worker("fail", on_error)
        self._taker = Worker("replays", on_error)
        self._ranger = Worker("ranges", on_error)
        self._toucher = Worker("touch", on_error)

    def open(self) -> dict[str, OpenedStream]:
        """Declare all streams; returns what the vertex says of each. Raises what `VertexClient.call` raises."""
        opened = self._open_streams()
        found = {}
        for name, answer in opened.items():
            shard, shards = self._client.shard_of(name)
            found[name] = OpenedStream(answer.positions, shard, shards, answer.exact, answer.held)
        return found

    def close(self) -> None:
        """Give everything up. What is unanswered stays so; waits a little for threads to notice."""
        workers = (self._persister, self._xorer, self._failer, self._taker, self._ranger, self._toucher)
        for worker in workers:
            worker.stop()
        with self._lock:
            idle = not (self._persists or self._xors or self._others)
        if idle and all(worker.join(CLOSE_TIMEOUT_S) for worker in workers):
            self._pipeline.close()

    # ------------------------------------------------------------ what is under way

    @property
    def may_persist(self) -> bool:
        with self._lock:
            return self._persists < MAX_PERSISTS and self._persist_bytes < MAX_PERSIST_BYTES

    @property
    def is_quiet(self) -> bool:
        """Whether all that changes something has its answer. (Replays that were asked for change nothing yet.)"""
        with self._lock:
            return not (self._persists or self._xors or self._others or self._unsent_xors)

    # ------------------------------------------------------------ calls

    def persist(self, key: TaskKey, ticket: int, call: calls.Persist | calls.Register) -> None:
        """Persist or register; `RootsAccepted` follows.

        A vertex that has no room (`IntakeTimeoutError`) is asked again, for as long as it takes. One that was lost
        since is `RangesRefused` for what is registered. Any other refusal is `PartFailed`.
        """
        with self._lock:
            self._persists += 1
            self._persist_bytes += size_of(call)
        self._queues[call.stream].put(key, ticket, replace(call, owner=self._owner), time.monotonic())

    def xor(self, event: Acknowledge) -> None:
        """Tell of XOR events; those that the vertex refuses as of an earlier incarnation are sent to the new one.

        Another slot may have learned of the new one first, and its records have come here since. Events of roots that
        the vertex has recovered have no effect: those are replayed under other ids.
        """
        with self._lock:
            if self._xors >= MAX_XORS:
                self._unsent_xors.append(event)
                return
            self._xors += 1
        self._xorer.do(partial(self._submit_xor, event))

    def fail(self, failures: tuple[calls.Failure, ...]) -> None:
        """End attempts; those that the vertex refuses as of an earlier incarnation are sent to the new one."""
        with self._lock:
            self._others += 1
        self._failer.do(partial(self._call_fail, failures))

    def take_replays(self, key: TaskKey, ask: AskReplays) -> None:
        self._taker.do(partial(self._call_take, key, ask))

    def call_ranges(
        self, key: TaskKey, number: int, call: calls.TakeOver | calls.AskRanges | calls.StoreRows
    ) -> None:
        """Make a call about ranges; `RangesCame` follows, or `RangesRefused`."""
        if not isinstance(call, calls.AskRanges):
            with self._lock:
                self._others += 1
        self._ranger.do(partial(self._call_ranges, key, number, replace(call, owner=self._owner)))

    def touch(self, roots: list[U64Array]) -> None:
        """Start the time of roots again. Skipped while an earlier call has no answer. Any thread."""
        with self._lock:
            if self._touching:
                return
            self._touching = True
        self._toucher.do(partial(self._call_touch, roots))

    # ------------------------------------------------------------ persist

    def _send_persist(self, order: PersistOrder) -> None:
        self._persister.do(partial(self._submit_persist, order))

    def _submit_persist(self, order: PersistOrder) -> None:
        future = self._pipeline.submit(order.call)
        future.add_done_callback(partial(self._queues[order.call.stream].answered, order))

    def _persisted(self, order: PersistOrder, reply: calls.Reply) -> None:
        self._answered(order)
        segment = reply.segment if isinstance(reply, calls.Registered) else -1
        self._post(events.RootsAccepted(order.key, order.ticket, time.monotonic() - order.asked_s, segment))

    def _ranges_lost(self, order: PersistOrder) -> None:
        assert isinstance(order.call, calls.Register)
        self._answered(order)
        self._refused(order.key, order.call.incarnation)

    def _answered(self, order: PersistOrder) -> None:
        with self._lock:
            self._persists -= 1
            self._persist_bytes -= order.size

    def _refused(self, key: TaskKey, incarnation: int) -> None:
        self._reopen(incarnation)
        self._post(events.RangesRefused(key, incarnation))

    # ------------------------------------------------------------ xor

    def _submit_xor(self, event: Acknowledge) -> None:
        self._opened.wait()
        incarnation = self._incarnation
        future = self._pipeline.submit(calls.Xor(event.roots, event.values, incarnation, ids=event.ids))
        future.add_done_callback(partial(self._xored, event, incarnation))

    def _xored(self, event: Acknowledge, incarnation: int, answer: Future[calls.Reply]) -> None:
        error = answer.exception()
        if isinstance(error, StaleIncarnationError):
            self._reopen(incarnation)
            self._xorer.do(partial(self._submit_xor, event))
            return
        if error is not None:
            self._failed(error)
        with self._lock:
            following = self._unsent_xors.popleft() if self._unsent_xors else None
            if following is None:
                self._xors -= 1
        if following is None:
            self._post(events.Wake())
        else:
            self._xorer.do(partial(self._submit_xor, following))

    # ------------------------------------------------------------ the other calls

    def _call_fail(self, failures: tuple[calls.Failure, ...]) -> None:
        incarnation = self._incarnation
        try:
            self._client.call(calls.Fail(failures, incarnation))
        except StaleIncarnationError:
            self._reopen(incarnation)
            # Behind what opens the streams, which the same thread does.
            self.fail(failures)
        finally:
            with self._lock:
                self._others -= 1
            self._post(events.Wake())

    def _call_take(self, key: TaskKey, ask: AskReplays) -> None:
        answer = self._client.call(calls.TakeReplays(ask.stream, ask.limit, self._owner))
        self._post(events.ReplaysCame(key, answer.batches, answer.held))

    def _call_ranges(
        self, key: TaskKey, number: int, call: calls.TakeOver | calls.AskRanges | calls.StoreRows
    ) -> None:
        ask: calls.AnsweredBy[calls.TakenOver | calls.RangesTold | calls.RowsStored] = call
        try:
            self._post(events.RangesCame(key, number, self._client.call(ask)))
        except StaleIncarnationError:
            assert not isinstance(call, calls.TakeOver)
            self._refused(key, call.incarnation)
        finally:
            if not isinstance(call, calls.AskRanges):
                with self._lock:
                    self._others -= 1

    def _call_touch(self, roots: list[U64Array]) -> None:
        try:
            every = np.concatenate(roots) if roots else np.empty(0, np.uint64)
            # A root may be held in many records. (Not `np.unique`: a sort takes ten times as long.)
            together, _ = xor_fold_by_root(every, every)
            for start in range(0, len(together), TOUCH_ROOTS):
                incarnation = self._incarnation
                try:
                    self._client.call(calls.Touch(together[start : start + TOUCH_ROOTS], incarnation))
                except StaleIncarnationError:
                    self._reopen(incarnation)
                    return
        finally:
            with self._lock:
                self._touching = False

    # ------------------------------------------------------------ incarnations

    def _reopen(self, refused: int) -> None:
        """Learn the vertex's incarnation anew, once for all the calls that were refused for the old one."""
        with self._lock:
            if self._incarnation != refused or not self._opened.is_set():
                return
            self._opened.clear()
            self._others += 1
        self._failer.do(self._open_again)

    def _open_again(self) -> None:
        try:
            self._open_streams()
        finally:
            self._opened.set()
            with self._lock:
                self._others -= 1
            self._post(events.Wake())

    def _open_streams(self) -> dict[str, calls.StreamOpened]:
        opened = {
            name: self._client.call(calls.OpenStream(name, options, self._owner))
            for name, options in self._streams
        }
        incarnations = {answer.incarnation for answer in opened.values()}
        self._incarnation = max(incarnations, default=0)
        return opened

    def _failed(self, error: BaseException) -> None:
        self._post(events.PartFailed(error))
