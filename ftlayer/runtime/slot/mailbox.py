"""The one queue by which everything reaches a slot's loop."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ftlayer.runtime.slot.views import snapshot

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread puts, one thread gets; a `get` that waits wakes at once.

    Unlike `queue.SimpleQueue` it can be looked into, and putting costs no system call while the loop is busy.
    """

    def __init__(self, is_urgent: Callable[[T], bool] = lambda _: False) -> None:
        self._is_urgent = is_urgent
        self._urgent: deque[None] = deque()  # as long as there are urgent items
        self._items: deque[T] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = False

    def put(self, item: T) -> None:
        """Add an item; never waits."""
        if self._is_urgent(item):
            self._urgent.append(None)
        self._items.append(item)
        # The getter first says that it sleeps and then looks again, so one of the two sees the other.
        if self._asleep:
            self._wake.put(None)

    def take(self) -> T | None:
        """Return the next item; None if there is none."""
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        if self._urgent and self._is_urgent(item):
            self._urgent.popleft()
        return item

    def has_urgent(self) -> bool:
        """Whether an urgent item is in the box; of the thread that gets."""
        return bool(self._urgent)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until there is an item, or the time has passed (None: no limit); may return early."""
        self._asleep = True
        try:
            if not self._items:
                self._wake.get(timeout=timeout_s)
        except queue.Empty:
            return
        finally:
            self._asleep = False

    def waiting(self) -> list[T]:
        """Return what is in the box now; may be called by any thread."""
        return snapshot(self._items)

    def __len__(self) -> int:
        return len(self._items)
