"""Looking at what the loop works with from another thread."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

T = TypeVar("T")


def snapshot(items: deque[T]) -> list[T]:
    """Return what a deque holds at one moment, while its owner goes on changing it."""
    while True:
        try:
            return list(items)
        except RuntimeError:  # it changed while it was copied: look again
            continue
