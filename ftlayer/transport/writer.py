"""The thread that writes to a stream."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ftlayer.transport.failures import TRANSPORT_ERRORS

T = TypeVar("T")


class WriterThread(Generic[T]):
    """Writes what it is given, in order: a peer that does not read holds up nothing else. Any thread may use it."""

    def __init__(self, name: str) -> None:
        """Take items from now on; they are written once it is started."""
        self._name = name
        self._lock = threading.Lock()
        self._items: deque[T] = deque()  # the first one is being written
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for an item; False: it ends here
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(
        self,
        write: Callable[[T], None],
        on_broken: Callable[[BaseException], None],
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write; ``at_end`` is called behind the last item, unless it was stopped.

        After one of `TRANSPORT_ERRORS` nothing more is written, and ``on_broken`` is told of it.
        """
        self._thread = threading.Thread(
            target=self._run, args=(write, on_broken, at_end), name=self._name, daemon=True
        )
        self._thread.start()

    def put(self, item: T) -> None:
        """Write ``item`` behind those before it; never waits."""
        with self._lock:
            self._items.append(item)
        self._signals.put(True)

    def waiting(self) -> list[T]:
        """Return what is not written yet."""
        with self._lock:
            return list(self._items)

    def finish(self) -> None:
        self._signals.put(False)

    def stop(self) -> None:
        """Write nothing more; what is not written yet keeps waiting."""
        self._stopped = True
        self._signals.put(False)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended (None: however long that takes), unless it was never started."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(
        self,
        write: Callable[[T], None],
        on_broken: Callable[[BaseException], None],
        at_end: Callable[[], None] | None,
    ) -> None:
        try:
            while self._signals.get() and not self._stopped:
                write(self._items[0])
                with self._lock:
                    self._items.popleft()
            if at_end is not None and not self._stopped:
                at_end()
        except TRANSPORT_ERRORS as error:
            on_broken(error)
