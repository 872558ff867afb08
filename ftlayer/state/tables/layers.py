"""A table of keyed state in layers, so that its content at a barrier can be written while it goes on changing.

What was touched since the last barrier is the *front*: the dict's own content, so that a key found there costs
what a dict costs. Below it are frozen layers, the newest first, which nothing changes any more; then the *base*, a
plain dict; then, of some backends, a *store* on disk. Freezing moves the front into a new layer. Layers are merged
into the base, and the base into the store, while those are not read (the idea of log-structured merge trees).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, islice
from sys import getsizeof
from types import FunctionType, ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common.printable import described
from ftlayer.config import MIB
from ftlayer.errors import StateSerializationError
from ftlayer.functions.keyed import ATOMS, NAN, Key, is_immutable, private_copy
from ftlayer.records.kernels import native
from ftlayer.records.keyhash import spark_hash
from ftlayer.records.partitioning import key_groups

# How many bytes of memory keys and values take up, as `sys.getsizeof` has it for each object that they consist of.
#
# Atoms, and tuples of them, are counted in C, others many at a time: those of one type by one call, 50 ns for an
# atom. A value that two keys share counts for each of them.


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
    """Return the bytes of objects and their parts, up to ``depth``; ``seen``: users' objects that were counted."""
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


U16Array = npt.NDArray[np.uint16]

KEYS_AT_ONCE = 1_000
"""Keys that are converted in one call, which keeps the interpreter to itself: well below a millisecond."""


class KeyGroups:
    """The key groups of one operator's keys, of ``max_parallelism``."""

    def __init__(self, uid: str, keys: pa.Schema, max_parallelism: int) -> None:
        self._uid = uid
        self._types = [field.type for field in keys]
        self.max_parallelism = max_parallelism
        self._floats = [place for place, kind in enumerate(self._types) if pa.types.is_floating(kind)]

    def of(self, keys: Sequence[Key]) -> U16Array:
        """Return the group of each key: uint16[n]. `StateSerializationError` for a key of other types."""
        groups = np.empty(len(keys), np.uint16)
        for first in range(0, len(keys), KEYS_AT_ONCE):
            part = keys[first : first + KEYS_AT_ONCE]
            groups[first : first + len(part)] = key_groups(self._hashes(part), self.max_parallelism)
        return groups

    def _hashes(self, keys: Sequence[Any]) -> npt.NDArray[np.int32]:
        if not self._types:
            raise StateSerializationError(f"operator {self._uid!r} has state and no key columns")
        try:
            columns = [keys] if len(self._types) == 1 else list(zip(*keys, strict=True))
            return spark_hash([pa.array(c, kind) for c, kind in zip(columns, self._types, strict=True)])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            types = ", ".join(map(str, self._types))
            raise StateSerializationError(
                f"operator {self._uid!r} has state for keys that are not of its key columns' types ({types}): "
                f"{error}; use ctx.key as it is"
            ) from error

    def canonical(self, key: Any) -> Any:
        """Return the same for all keys that are equal: 0.0 for -0.0."""
        if not self._floats:
            return key
        if len(self._types) == 1:
            return 0.0 if key == 0 else key
        return tuple([0.0 if place in self._floats and part == 0 else part for place, part in enumerate(key)])

    def found_again(self, keys: list[Any]) -> list[Any]:
        """Return keys that were read, such that a dict finds them: there is only one not-a-number among keys."""
        if not self._floats:
            return keys
        if len(self._types) == 1:
            return [NAN if key != key else key for key in keys]
        return [self._tuple(key) for key in keys]

    def _tuple(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        if all(key[place] == key[place] for place in self._floats):
            return key
        return tuple(NAN if part != part else part for part in key)


class _Absent:
    __slots__ = ()


NOTHING: Any = _Absent()
"""A layer's answer for a key that is not in it."""

DELETED: Any = _Absent()
"""In place of the value of a key that was deleted; below it there may be an older value."""


class Sharing:
    """How many ``readers`` of values there are below the fronts of a backend, and of them ``base_readers``."""

    __slots__ = ("base_readers", "readers")

    def __init__(self) -> None:
        self.readers = 0
        self.base_readers = 0


class Store(Protocol):
    def get(self, key: Key) -> Any:
        """Return the value, which has no other owner; NOTHING if there is none."""

    def all_keys(self) -> Iterator[Key]:
        """Return all keys; nothing may be written meanwhile."""


class Layer:
    """The entries that were touched between two freezes. Nothing in it changes any more.

    Attributes:
        values: of the keys that were set or read.
        deleted: keys that were deleted; those that are in ``values`` too were set again.
        clean: what was only read: a key whose value in ``values`` is the same object has not changed.
        bytes: of memory that it takes up, where that was measured; else 0.
    """

    __slots__ = ("bytes", "clean", "deleted", "values")

    def __init__(self, values: dict[Key, Any], deleted: set[Key], clean: dict[Key, Any]) -> None:
        self.values = values
        self.deleted = deleted
        self.clean = clean
        self.bytes = 0

    def measure(self) -> None:
        self.bytes = _footprint(self.values, self.deleted, self.clean)

    def changes(self) -> Iterator[tuple[Key, Any]]:
        """Return what was changed: new values, and DELETED."""
        clean, values = self.clean, self.values
        deletions = ((key, DELETED) for key in self.deleted if key not in values)
        if not clean:
            return chain(values.items(), deletions)
        get = clean.get
        return chain(((k, v) for k, v in values.items() if get(k, NOTHING) is not v), deletions)

    def __len__(self) -> int:
        return len(self.values) + len(self.deleted)


def merged(older: Layer, newer: Layer, size: int) -> Iterator[Layer | None]:
    """Return one layer for two that follow each other, behind a None for every ``size`` entries that were handled."""
    values: dict[Key, Any] = {}
    clean: dict[Key, Any] = {}
    for part in sliced(older.values.items(), size):
        values.update(part)
        yield None
    for keys in sliced(newer.deleted, size):
        for key in keys:
            values.pop(key, None)
        yield None
    for part in sliced(newer.values.items(), size):
        values.update(part)
        yield None
    for part in sliced(older.clean.items(), size):
        clean.update(part)
        yield None
    # A key that only the newer one read may have been changed in the older one: it is clean in none of them.
    for part in sliced(newer.clean.items(), size):
        clean.update([(key, value) for key, value in part if key not in older.values])
        yield None
    yield Layer(values, older.deleted | newer.deleted, clean)


def _footprint(values: dict[Key, Any], deleted: set[Key], clean: dict[Key, Any]) -> int:
    # What is clean is a second reference to a value.
    of_values = footprint(dict.keys(values), dict.values(values))
    return of_values + footprint(deleted, ()) + ENTRY * len(clean)


class _Raw(dict[Key, Any]):
    __slots__ = ("_clean", "_deleted", "_lent", "_sharing", "base", "layers", "store", "where")


class LayeredTable(_Raw):
    """A table of values by key: `dict` in all that a user of a mapping sees.

    A value from below the front that can be changed in place is copied into the front while a snapshot reads it. Who
    keeps such an object over a barrier and changes it then, changes the snapshot: so functions get and set copies
    (`ftlayer.functions.handles.Own`), and what is in lists is lent to them until the next freeze.

    ``del table[key]`` is not to be used: it would lay an older value bare. A class that overrides ``__delitem__`` has
    one slot for it and ``__setitem__``, and setting a value would cost three times as much. `pop` is right.

    Attributes:
        where: names operator and table in errors.
        layers: the newest first.
        base: changed only by the backend, while `Sharing.base_readers` is 0.
        store: None where there is none.
    """

    __slots__ = ()

    def __init__(self, where: str, sharing: Sharing, store: Store | None = None) -> None:
        super().__init__()
        self.where = where
        self._sharing = sharing
        self.store = store
        self.base: dict[Key, Any] = {}
        self.layers: tuple[Layer, ...] = ()
        self._deleted: set[Key] = set()
        self._clean: dict[Key, Any] = {}
        self._lent: set[Key] = set()

    def __missing__(self, key: Key) -> Any:
        value = self._below(key)
        if value is NOTHING:
            raise KeyError(key)
        return self._fetched(key, value)

    def get(self, key: Key, default: Any = None) -> Any:
        value = dict.get(self, key, NOTHING)
        if value is NOTHING:
            value = self._below(key)
            return default if value is NOTHING else self._fetched(key, value)
        return value

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._below(key) is not NOTHING

    def pop(self, key: Key, default: Any = NOTHING) -> Any:
        """Remove the key and return its value, or ``default``; KeyError without one."""
        value = dict.pop(self, key, NOTHING)
        if value is not NOTHING:
            # To ask a store whether it has the key costs as much as a mark that says that it has it no more.
            if self.store is not None or self._below(key) is not NOTHING:
                self._deleted.add(key)
            return value
        value = self._below(key)
        if value is NOTHING:
            if default is NOTHING:
                raise KeyError(key)
            return default
        self._deleted.add(key)
        return self._owned(key, value)

    def discard(self, key: Key) -> None:
        if dict.pop(self, key, NOTHING) is NOTHING or self.store is None:
            if self._below(key) is not NOTHING:
                self._deleted.add(key)
        else:
            self._deleted.add(key)

    def read(self, key: Key) -> Any:
        """Return a container that is not to be changed (what is in it may be, if `own` follows); NOTHING without."""
        value = dict.get(self, key, NOTHING)
        if value is not NOTHING:
            return value
        value = self._below(key)
        if value is not NOTHING and (self._sharing.readers or self.store is not None):
            value = self._owned(key, value)
            self._clean[key] = value
            self[key] = value
        return value

    def own(self, key: Key) -> Any:
        """Return a container to be changed in place; NOTHING without one."""
        value = dict.get(self, key, NOTHING)
        if value is NOTHING:
            value = self._below(key)
            if value is NOTHING:
                return value
            value = self._owned(key, value)
            self[key] = value
        if self._clean:
            self._clean.pop(key, None)
        return value

    def lend(self, key: Key) -> None:
        """A function gets what is in the key's container, may change it, and may keep it behind the next freeze."""
        self.own(key)
        self._lent.add(key)

    def _below(self, key: object) -> Any:
        if key in self._deleted:
            return NOTHING
        for layer in self.layers:
            value = layer.values.get(key, NOTHING)
            if value is not NOTHING:
                return value
            if key in layer.deleted:
                return NOTHING
        value = self.base.get(key, NOTHING)
        if value is NOTHING and self.store is not None:
            return self.store.get(key)
        return NOTHING if value is DELETED else value

    def _fetched(self, key: Key, value: Any) -> Any:
        """Bring a value from below into the front, where the next use of it is quick."""
        if type(value) in ATOMS or is_immutable(value):
            self._clean[key] = value
        elif self._sharing.readers:
            value = self._owned(key, value)
        self[key] = value
        return value

    def _owned(self, key: Key, value: Any) -> Any:
        if not self._sharing.readers or type(value) in ATOMS:
            return value
        return self._copied(key, value)

    def _copied(self, key: Key, value: Any) -> Any:
        try:
            return private_copy(value)
        except Exception as error:
            raise StateSerializationError(
                f"{self.where} holds a {type(value).__name__} for the key {key!r:.100} that cannot be copied "
                f"({described(error)}), so no snapshot of it can be taken"
            ) from error

    def __iter__(self) -> Iterator[Key]:
        keys = dict.fromkeys(dict.keys(self))
        gone = set(self._deleted)
        for layer in self.layers:
            keys |= dict.fromkeys(key for key in layer.values if key not in gone and key not in keys)
            gone |= layer.deleted
        keys |= dict.fromkeys(k for k, v in self.base.items() if k not in gone and v is not DELETED)
        if self.store is not None:
            base = self.base
            keys |= dict.fromkeys(k for k in self.store.all_keys() if k not in gone and k not in base)
        return iter(keys)

    def __len__(self) -> int:
        """Count the keys, which takes time in proportion."""
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __reversed__(self) -> Iterator[Key]:
        return reversed(list(self))

    def clear(self) -> None:
        keys = list(self)
        dict.clear(self)
        self._clean.clear()
        self._deleted.update(keys)

    def popitem(self) -> tuple[Key, Any]:
        """Remove some key and return it with its value; KeyError without any."""
        for key in self:
            return key, self.pop(key)
        raise KeyError("popitem(): the table is empty")

    def copy(self) -> dict[Key, Any]:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]
    __eq__ = MutableMapping.__eq__
    keys = MutableMapping.keys  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault

    def touched(self) -> int:
        return dict.__len__(self) + len(self._deleted)

    def front_bytes(self) -> int:
        return _footprint(self, self._deleted, self._clean)

    def newest(self, count: int) -> tuple[list[Key], list[Any]]:
        """Return the keys and values of the front that came last."""
        keys = list(islice(dict.__reversed__(self), count))
        get = dict.get
        return keys, [get(self, key) for key in keys]

    def some(self, count: int, turn: int) -> tuple[list[Key], list[Any]]:
        """Return about so many keys and values from all over the front, others at another ``turn``."""
        stride = max(1, dict.__len__(self) // count)
        first = turn % stride
        keys = islice(dict.keys(self), first, None, stride)
        return list(keys), list(islice(dict.values(self), first, None, stride))

    def freeze(self) -> Layer | None:
        """Move the front into a new layer, and return it; None if nothing was touched."""
        if not dict.__len__(self) and not self._deleted:
            return None
        # A class with an `__iter__` of its own is copied item by item in Python; the class below it is not.
        self.__class__ = _Raw  # type: ignore[assignment]
        values = dict.copy(self)
        self.__class__ = LayeredTable
        dict.clear(self)
        for key in self._lent:
            if key in values:
                values[key] = self._copied(key, values[key])
        self._lent.clear()
        layer = Layer(values, self._deleted, self._clean)
        self._deleted, self._clean = set(), {}
        self.layers = (layer, *self.layers)
        return layer

    def replace_layers(self, old: Iterable[Layer], new: Iterable[Layer]) -> None:
        """Put layers in place of neighbours that say the same together."""
        replaced = set(map(id, old))
        at = next(place for place, layer in enumerate(self.layers) if id(layer) in replaced)
        rest = [layer for layer in self.layers if id(layer) not in replaced]
        self.layers = (*rest[:at], *new, *rest[at:])


def sliced(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part


# How much state larger than memory keeps there: what is moved to disk when, and when the input waits for that.
#
# Bytes are those of `ftlayer.state.tables.layers`. What lies in bases is counted from above while it grows, and
# measured when that count is too high: a key that is written again and again counts each time until then, and slices of
# a layer count as much as they have entries.


MAX_BYTES = 64 * MIB
"""What bases keep in memory. Moved down to it from a quarter above it."""

FRONT_PART = 2
"""A front that holds the so many-th part of that becomes a layer, where it can be moved on to disk."""

MOST = 3
"""With so many times `MAX_BYTES` in fronts, layers and bases the input waits. A snapshot may still read the bases
then, or the disk may be slower than the functions."""

LOOK = 8
"""When the so many-th part of a front's entries may have changed in place, a few of them tell whether it has grown."""

FEW = 32
"""So many."""


KEPT_BYTES = {"heap": 512 * MIB, "lmdb": 2 * MAX_BYTES}
"""By backend, the bytes of layers that are kept for the next incremental snapshot, or wait for the changelog. Values
that are the current ones too count, though they cost no memory beside the state."""


def max_kept(config: CheckpointConfig) -> int:
    return KEPT_BYTES[config.backend]


class StateMemory:
    """The bytes in memory of one backend, in fronts, layers and bases, and what is to become of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._exact = True
        self._has_grown = False
        self._moving = False
        self.front = 0
        self.layers = 0
        self.bases = 0

    @property
    def is_full(self) -> bool:
        return self.front + self.layers + self.bases > MOST * self._most

    @property
    def is_front_large(self) -> bool:
        """Whether fronts are to become layers, if those can be moved on."""
        return self.front > self._most // FRONT_PART or self.is_full

    def grew(self, size: int) -> None:
        """So much more lies in bases; some of it may have replaced other values."""
        self.bases += size
        self._exact, self._has_grown = False, True

    def moved(self, size: int) -> None:
        self.bases = max(0, self.bases - size)
        # A value that has grown in place counts more now than it did when it came.
        self._exact = False

    def excess(self, measure: Callable[[], int]) -> int:
        """Return how many bytes of bases go to disk; ``measure``, which reads all, is asked where it matters."""
        seems_down = self._moving and self.bases <= self._most
        if (self._has_grown and self._is_over()) or (not self._exact and seems_down):
            self.bases, self._exact, self._has_grown = measure(), True, False
        self._moving = self._is_over() or (self._moving and self.bases > self._most)
        return self.bases - self._most if self._moving else 0

    def emptied(self) -> None:
        self.bases, self._exact, self._has_grown = 0, True, False

    def _is_over(self) -> bool:
        return 4 * self.bases > 5 * self._most


class FrontGauge:
    """Measures the front of one table: what is new at once; all of it when as many records came as it has entries.

    In between a few entries tell whether values grow in place: if so it is measured then.
    """

    def __init__(self, table: LayeredTable) -> None:
        self._table = table
        self._entries = 0
        self._changed = 0
        self._looked_at = 0
        self._looks = 0
        self.bytes = 0

    def look(self, handled: int) -> None:
        """The task has handled so many records since the last time; each may have changed an entry in place."""
        entries = dict.__len__(self._table)
        grown = entries - self._entries
        self._entries = entries
        self._changed += max(handled, grown)
        if grown > 0 and self._changed < entries:
            self.bytes += footprint(*self._table.newest(grown))
        if self._changed >= entries or self._seems_larger(entries):
            self.bytes = self._table.front_bytes()
            self._changed = self._looked_at = 0

    def _seems_larger(self, entries: int) -> bool:
        if LOOK * (self._changed - self._looked_at) < entries:
            return False
        self._looked_at = self._changed
        self._looks += 1
        few = self._table.some(FEW, self._looks)
        return footprint(*few) * entries > 2 * len(few[0]) * self.bytes

    def frozen(self) -> None:
        self._entries = self._changed = self._looked_at = self.bytes = 0
