"""A thread that does one thing after another, for a loop that must not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ftlayer.functions.failures import raise_signalled


class Worker:
    """Runs functions in the order they were given; what one raises goes to ``on_error``, and the next follows."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._name = name
        self._on_error = on_error
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Have ``work`` done; never waits. The thread starts with the first call, which is the loop's."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"ftlayer-{self._name}", daemon=True)
            self._thread.start()
        self._todo.put(work)

    def stop(self) -> None:
        """End the thread behind what it was given; does not wait for it."""
        self._todo.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; whether it came."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the owner decides what becomes of it
                raise_signalled(error)
                self._on_error(error)
