"""Leaves out of a snapshot what is over when it is taken: values with a time to live.

What is written is what a read at that time would return. The tables themselves stay as they are: a value that is
over there is removed when its key is used (`ftlayer.functions.ttl`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ftlayer.checkpoint.snapshots import TableInfo
from ftlayer.functions.ttl import holds_stamped, is_expired
from ftlayer.state.keyed import LIST, MAP
from ftlayer.state.layers import DELETED
from ftlayer.state.view import Part


def unexpired(info: TableInfo, parts: Iterable[Part], now_ms: int, *, deletions: bool) -> Iterator[Part]:
    """Return ``parts`` of a table without what is over at ``now_ms``.

    ``deletions``: with DELETED for a key of which nothing is left, since an older value may lie below that is not
    over: it was written with a longer time.
    """
    if not holds_stamped(info.name):
        yield from parts
        return
    rest = _RESTS.get(info.kind, _rest_of_value)
    for part in parts:
        left = [(key, value if value is DELETED else rest(value, now_ms)) for key, value in part]
        yield left if deletions else [pair for pair in left if pair[1] is not DELETED]


def _rest_of_value(stamped: Any, now_ms: int) -> Any:
    return DELETED if is_expired(stamped, now_ms) else stamped


def _rest_of_list(values: Any, now_ms: int) -> Any:
    left = [stamped for stamped in values if not is_expired(stamped, now_ms)]
    return left or DELETED


def _rest_of_map(items: Any, now_ms: int) -> Any:
    left = {field: stamped for field, stamped in items.items() if not is_expired(stamped, now_ms)}
    return left or DELETED


_RESTS: dict[str, Callable[[Any, int], Any]] = {LIST: _rest_of_list, MAP: _rest_of_map}
