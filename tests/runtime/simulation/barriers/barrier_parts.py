"""Stand-ins for threads, sockets and clocks: queues that a world empties step by step."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from ftlayer.errors import CheckpointError
from ftlayer.runtime.protocol.channel_frames import decode_from_slot, decode_to_slot, encode
from ftlayer.runtime.slot.pulse import Pulse
from ftlayer.runtime.slot.rules.events import CreditCame, FrameCame, LinkBroke, Mailbox


class IdleThread:
    """Never runs by itself; who waits for its end runs it."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: Any) -> None:
        self.target, self.args = target, args

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        owner = self.target.__self__  # type: ignore[attr-defined]
        # One that is at work now is waited for in vain.
        if not getattr(owner, "at_work", False):
            self.target(*self.args)

    def is_alive(self) -> bool:
        return False


class Rests(BaseException):
    """A thread has nothing to do for now: its next step comes when there is something."""


class StepCondition:
    """A condition on which a thread rests instead of waiting."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait_for(self, holds: Callable[[], Any], timeout: float | None = None) -> Any:
        if timeout is not None or not holds():
            raise Rests
        return True


class ThreadInSteps:
    """The thread of a changelog: what it does until it rests is a move."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target
        self._log: Any = target.__self__  # type: ignore[attr-defined]
        self._is_over = False

    @property
    def has_work(self) -> bool:
        return not self._is_over and self._log.readers() > 0

    def step(self) -> None:
        with contextlib.suppress(Rests):
            self._target()
            self._is_over = True

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


class StepQueue:
    """`queue.SimpleQueue` of somebody who never waits."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self.items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        if not self.items:
            raise Empty
        return self.items.popleft()

    get_nowait = get

    def empty(self) -> bool:
        return not self.items


class StepMailbox(Mailbox[Any]):
    """A mailbox whose owner rests instead of waiting.

    ``resting``: it has waited, and nothing has come; ``timeout_s`` is how long it wanted to.
    """

    def __init__(self, random: Random, is_urgent: Callable[[Any], bool]) -> None:
        super().__init__(is_urgent)
        self.random = random
        self.resting = False
        self.timeout_s: float | None = None

    def put(self, item: Any) -> None:
        super().put(item)
        self.resting = False

    def has_urgent(self) -> bool:
        # No barrier comes while a task runs, and in a slot one may come at any time.
        return super().has_urgent() or self.random.random() < 0.9

    def wait(self, timeout_s: float | None) -> None:
        if not self.items:
            self.resting, self.timeout_s = True, timeout_s


class StepWorker:
    """`ftlayer.runtime.worker.Worker`, one piece of work a step; at once when ``inline``."""

    def __init__(self, world: Any, on_error: Callable[[Exception], None]) -> None:
        self._world = world
        self._on_error = on_error
        self.todo: deque[Callable[[], None]] = deque()

    def do(self, work: Callable[[], None]) -> None:
        self.todo.append(work)
        while self._world.closing and self.todo:
            self.step()

    def step(self) -> None:
        try:
            self.todo.popleft()()
        except Exception as error:  # noqa: BLE001 - as in `Worker`
            if not isinstance(error, CheckpointError):
                self._world.outside.wrong.append(f"the driver's thread raised {error!r}")
            self._on_error(error)

    def stop(self) -> None:
        pass


class StepExecutor:
    """One thread of a pool; what is submitted is done step by step, or when the pool is closed."""

    def __init__(self, *_: Any) -> None:
        self.todo: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.todo.append((future, lambda: work(*args)))
        return future

    def step(self) -> None:
        future, work = self.todo.popleft()
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - as in `Executor`
            future.set_exception(error)

    def shutdown(self, wait: bool = True) -> None:
        while self.todo:
            self.step()


class InlineExecutor(StepExecutor):
    """Does at once what is submitted."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future = super().submit(work, *args)
        self.step()
        return future


class StepPulse(Pulse):
    """Beats when the world says so."""

    def start(self) -> None:
        pass


# ---------------------------------------------------------------- control streams


@dataclass(eq=False)
class Control:
    """One instance's control stream, both ends. ``up`` and ``down`` are frames on their way."""

    slot: int
    instance: str
    on_message: Callable[[Any], None] | None = None
    up: deque[bytes | None] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    closed: bool = False
    reason: str = "it has ended"
    process: Any = None

    def start(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        self.on_message = on_message

    def send(self, message: Any) -> None:
        if not self.closed:
            self.up.append(encode(message))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.up.append(None)

    def say(self, message: Any) -> None:
        self.down.append(encode(message))

    def deliver_down(self) -> None:
        frame = self.down.popleft()
        if not self.closed and self.on_message is not None:
            self.on_message(decode_to_slot(frame))

    @staticmethod
    def decoded(frame: bytes) -> Any:
        return decode_from_slot(frame)


class ControlServer:
    """The driver's end of all control streams."""

    def __init__(self) -> None:
        self.streams: dict[str, Control] = {}

    def send(self, instance: str, message: Any) -> None:
        stream = self.streams.get(instance)
        if stream is not None:
            stream.say(message)

    def close(self) -> None:
        self.streams.clear()


class Submitter:
    """Spark: it starts and ends processes when the world lets it."""

    def __init__(self) -> None:
        self.submitted: deque[tuple[int, int]] = deque()
        self.unwanted: set[tuple[int, int]] = set()

    def submit(self, slot: int, attempt: int) -> None:
        self.submitted.append((slot, attempt))

    def cancel(self, slot: int, attempt: int) -> None:
        self.unwanted.add((slot, attempt))

    def ask_session(self) -> None:
        """It lives."""

    def count_tasks(self, done: Callable[[Any], None]) -> None:
        """Spark does not tell."""
        done(None)

    def close(self) -> None:
        """Nothing of it is left open."""


# ---------------------------------------------------------------- streams between slots


class Channels:
    """A slot's server for other slots (`ChannelServer`)."""

    def __init__(self, host: str, *, roster: Any, post: Callable[[Any], None], socket: str, **_: Any) -> None:
        self.roster, self.post, self.socket = roster, post, socket
        self.port = 0
        self.open = True
        self.streams: dict[int, Link] = {}

    def grant(self, slot: int, grants: bytes) -> None:
        stream = self.streams.get(slot)
        if stream is not None:
            stream.back.append(grants)

    def close(self) -> None:
        self.open = False
        self.roster.close()
        for link in self.streams.values():
            link.broken = "the other slot has ended the stream"
        self.streams.clear()


class Link:
    """A slot's stream to another one (`PeerLink`): frames out, credit back."""

    transport = "simulated"

    def __init__(self, peer: Any, endpoint: Any, header: Any, post: Callable[[Any], None]) -> None:
        self.peer, self.header, self._post = peer, header, post
        self.frames: deque[bytes] = deque()
        self.back: deque[bytes] = deque()
        self.receiver: Channels | None = None
        self.silent = False  # discarded, closed or broken: nothing more is told
        self.broken = ""

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def waiting(self) -> list[bytes]:
        return list(self.frames)

    def discard(self) -> None:
        self.silent = True
        self.frames.clear()

    def close(self) -> None:
        self.silent = True

    def can_deliver(self, servers: Mapping[str, Channels]) -> bool:
        """Whether its next frame is taken or refused now."""
        if not self.frames or self.broken:
            return False
        if self.receiver is not None:
            return True
        server = servers.get(self.peer.instance)
        if server is None or not server.open:
            self.broken = "connection refused"
            return False
        verdict = server.roster.verdict(self.header)
        if verdict is False:
            self.broken = "it was refused"
        elif verdict:
            self.receiver = server
            server.streams[self.header.sender] = self
        return bool(verdict)

    def deliver(self) -> None:
        assert self.receiver is not None
        frame = self.frames.popleft()
        if not self.receiver.roster.is_current(self.header.sender, self.header.instance):
            self.broken = "it was replaced"
            return
        self.receiver.post(FrameCame(self.header.sender, self.header.instance, pa.py_buffer(frame)))

    def give_back(self) -> None:
        data = self.back.popleft()
        if not self.silent:
            self._post(CreditCame(self.peer.slot, self.peer.instance, data))

    @property
    def tells(self) -> bool:
        """Whether its end is to be told now: behind the credit that came before it."""
        return bool(self.broken) and not self.silent and not self.back

    def tell_broken(self) -> None:
        self.silent = True
        self._post(LinkBroke(self.peer.slot, self.peer.instance, self.broken))


def threads_of(thread: type) -> Any:
    """Return what takes the place of the module `threading`."""
    return SimpleNamespace(Thread=thread, Lock=threading.Lock, Event=StepEvent, Condition=threading.Condition)


class StepEvent(threading.Event):
    """It was given up."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()
