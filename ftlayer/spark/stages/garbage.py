"""Garbage collections in Spark's Python workers: what is imported is left out of them."""

from __future__ import annotations

import gc
from functools import cache


@cache
def leave_out_imports() -> None:
    """Keep all that a worker has by now out of garbage collections, once in its life.

    Spark collects garbage after each task, before the worker takes the next one. With ftlayer, pandas and pyarrow
    imported that is some 65 ms of CPU time, and a batch of a wrapped query has four tasks or more. What a worker makes
    later is collected as before.
    """
    gc.collect()
    gc.freeze()
