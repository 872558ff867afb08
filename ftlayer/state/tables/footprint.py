"""How many bytes of memory keys and values take up, as `sys.getsizeof` has it for each object that they consist of.

Atoms, and tuples of them, are counted in C, others many at a time: those of one type by one call, 50 ns for an atom. A
value that two keys share counts for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from sys import getsizeof
from types import FunctionType, ModuleType
from typing import Any

from ftlayer.functions.values import ATOMS
from ftlayer.records.kernels import native

ENTRY = 100
"""Bytes of an entry in a dict beside its key and value: a dict is between a third and two thirds full."""

_MAX_DEPTH = 50
"""What is nested deeper is not counted."""

_ITEMS = (list, tuple, set, frozenset, deque)
_PLAIN = frozenset({*_ITEMS, dict})
_SHARED = (type, ModuleType, FunctionType)
"""What belongs to the program, not to a value."""


def footprint(keys: Collection[Any], values: Iterable[Any]) -> int:
    """Return the bytes of the entries of a dict with these keys; ``values`` may be fewer: of deleted keys."""
    seen: set[int] = set()
    size = ENTRY * len(keys)
    for objects in (list(keys), list(values)):
        plain = native.plain_footprint(objects)
        size += measured(objects, _MAX_DEPTH, seen) if plain is None else plain
    return size


def measured(objects: list[Any], depth: int, seen: set[int]) -> int:
    """Return the bytes of any objects, what they consist of included, up to ``depth``.

    ``seen``: the objects of users' classes that were counted, which may refer to one another.
    """
    if not objects or not depth:
        return 0
    kinds = set(map(type, objects))
    total = sum(map(getsizeof, objects))
    if kinds <= ATOMS:
        return total
    if len(kinds) == 1:
        return total + measured(_inside(kinds.pop(), objects, seen), depth - 1, seen)
    by_kind: dict[type, list[Any]] = {}
    for item in objects:
        by_kind.setdefault(type(item), []).append(item)
    inside = [_inside(kind, own, seen) for kind, own in by_kind.items() if kind not in ATOMS]
    return total + measured(list(chain.from_iterable(inside)), depth - 1, seen)


def _inside(kind: type, objects: list[Any], seen: set[int]) -> list[Any]:
    """Return what objects of one type consist of, where `sys.getsizeof` does not count it."""
    inside: list[Any] = []
    if issubclass(kind, _ITEMS):
        inside += chain.from_iterable(objects)
    elif issubclass(kind, Mapping):
        inside += chain.from_iterable(objects)
        inside += chain.from_iterable(mapping.values() for mapping in objects)
    if kind not in _PLAIN and not issubclass(kind, _SHARED):
        new = {id(item): item for item in objects if id(item) not in seen}
        seen.update(new)
        for slot in _slots(kind):
            inside += [getattr(item, slot) for item in new.values() if hasattr(item, slot)]
        if hasattr(objects[0], "__dict__"):
            inside += chain.from_iterable(vars(item).values() for item in new.values())
    return inside


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return [slot for slot in found if slot not in ("__dict__", "__weakref__")]
