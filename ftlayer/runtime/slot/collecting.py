"""Python's cyclic garbage collection while a slot runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 10_000
"""Records live for a batch, so most of what is looked at earlier than this is still in use."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect more rarely, and never look at what is there already: a third of a slot's time, at Python's defaults."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        # The process goes on to other Spark tasks.
        gc.set_threshold(*before)
        gc.unfreeze()
