"""What a stream's records wait for at the vertex, and in which order they are sent again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from ftlayer.errors import IntakeTimeoutError, StaleIncarnationError
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.vertex.calls import Persist, Register, Reply

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PersistOrder:
    """A task's `PersistRoots` on its way; ``number`` is its place among all of the stream.

    ``asked_s`` is when it was asked for, on a monotone clock of who asked.
    """

    number: int
    key: TaskKey
    ticket: int
    call: Persist | Register
    asked_s: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the call, about."""
        return size_of(self.call)


def size_of(call: Persist | Register) -> int:
    """Return about how many bytes a call has."""
    if isinstance(call, Register):
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
        accepted: Callable[[PersistOrder, Reply], None],
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

    def put(self, key: TaskKey, ticket: int, call: Persist | Register, asked_s: float = 0.0) -> None:
        """Send a call behind those before it."""
        with self._lock:
            self._numbers += 1
            order = PersistOrder(self._numbers, key, ticket, call, asked_s)
            if self._refused:
                self._behind.append(order)
                return
            self._under_way.add(order.number)
            self._send(order)

    def answered(self, order: PersistOrder, answer: Future[Reply]) -> None:
        error = answer.exception()
        final: BaseException | None = None
        with self._lock:
            self._under_way.discard(order.number)
            is_lost = isinstance(error, StaleIncarnationError) and isinstance(order.call, Register)
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


def answer_to(queue: PersistQueue, order: PersistOrder) -> Callable[[Future[Reply]], None]:
    """Return the callback of a call's future."""
    return partial(queue.answered, order)
