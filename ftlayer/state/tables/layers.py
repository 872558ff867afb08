"""A table of keyed state in layers, so that its content at a barrier can be written while it goes on changing.

What was touched since the last barrier is the *front*: the dict's own content, so that a key found there costs
what a dict costs. Below it are frozen layers, the newest first, which nothing changes any more; then the *base*, a
plain dict; then, of some backends, a *store* on disk. Freezing moves the front into a new layer. Layers are merged
into the base, and the base into the store, while those are not read (the idea of log-structured merge trees).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from itertools import chain, islice
from typing import Any, Protocol

from ftlayer.errors import StateSerializationError
from ftlayer.functions.keyed import Key
from ftlayer.functions.values import ATOMS, is_immutable, private_copy
from ftlayer.state.tables.footprint import ENTRY, footprint


class _Absent:
    __slots__ = ()


NOTHING: Any = _Absent()
"""A layer's answer for a key that is not in it."""

DELETED: Any = _Absent()
"""In place of the value of a key that was deleted; below it there may be an older value."""


class Sharing:
    """Who else reads what lies below the fronts of a backend's tables.

    Attributes:
        readers: how many snapshots and changelogs still read values.
        base_readers: how many of them read bases and stores.
    """

    __slots__ = ("base_readers", "readers")

    def __init__(self) -> None:
        self.readers = 0
        self.base_readers = 0


class Store(Protocol):
    """The store below the base of one table."""

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
        """Find out `bytes`."""
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
    """The dict below a `LayeredTable`, which copies itself in C."""

    __slots__ = ("_base", "_clean", "_deleted", "_layers", "_lent", "_sharing", "_store", "where")


class LayeredTable(_Raw):
    """A table of values by key: `dict` in all that a user of a mapping sees.

    A value from below the front that can be changed in place is copied into the front while a snapshot reads it. Who
    keeps such an object over a barrier and changes it then, changes the snapshot: so functions get and set copies
    (`ftlayer.functions.handles.Own`), and what is in lists is lent to them until the next freeze.

    ``del table[key]`` is not to be used: it would lay an older value bare. A class that overrides ``__delitem__`` has
    one slot for it and ``__setitem__``, and setting a value would cost three times as much. `pop` is right.
    """

    __slots__ = ()

    def __init__(self, where: str, sharing: Sharing, store: Store | None = None) -> None:
        """``where`` names operator and table in errors."""
        super().__init__()
        self.where = where
        self._sharing = sharing
        self._store = store
        self._base: dict[Key, Any] = {}
        self._layers: tuple[Layer, ...] = ()
        self._deleted: set[Key] = set()
        self._clean: dict[Key, Any] = {}
        self._lent: set[Key] = set()

    # ------------------------------------------------------------ one key

    def __missing__(self, key: Key) -> Any:
        value = self._below(key)
        if value is NOTHING:
            raise KeyError(key)
        return self._fetched(key, value)

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the value, or ``default``."""
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
            if self._store is not None or self._below(key) is not NOTHING:
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
        """Remove the key, if it is there."""
        if dict.pop(self, key, NOTHING) is NOTHING or self._store is None:
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
        if value is not NOTHING and (self._sharing.readers or self._store is not None):
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
        for layer in self._layers:
            value = layer.values.get(key, NOTHING)
            if value is not NOTHING:
                return value
            if key in layer.deleted:
                return NOTHING
        value = self._base.get(key, NOTHING)
        if value is NOTHING and self._store is not None:
            return self._store.get(key)
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
                f"({type(error).__name__}: {error}), so no snapshot of it can be taken"
            ) from error

    # ------------------------------------------------------------ all keys

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys as they are now."""
        keys = dict.fromkeys(dict.keys(self))
        gone = set(self._deleted)
        for layer in self._layers:
            keys |= dict.fromkeys(key for key in layer.values if key not in gone and key not in keys)
            gone |= layer.deleted
        keys |= dict.fromkeys(k for k, v in self._base.items() if k not in gone and v is not DELETED)
        if self._store is not None:
            base = self._base
            keys |= dict.fromkeys(k for k in self._store.all_keys() if k not in gone and k not in base)
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

    # ------------------------------------------------------------ layers, for the backend

    def touched(self) -> int:
        """Return how many keys the front knows of."""
        return dict.__len__(self) + len(self._deleted)

    def front_bytes(self) -> int:
        """Return how many bytes of memory the front takes up."""
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
        self._layers = (layer, *self._layers)
        return layer

    @property
    def base(self) -> dict[Key, Any]:
        """The base; changed only by the backend, while `Sharing.base_readers` is 0."""
        return self._base

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The frozen layers, the newest first."""
        return self._layers

    @property
    def store(self) -> Store | None:
        return self._store

    def replace_layers(self, old: Iterable[Layer], new: Iterable[Layer]) -> None:
        """Put layers in place of neighbours that say the same together."""
        replaced = set(map(id, old))
        at = next(place for place, layer in enumerate(self._layers) if id(layer) in replaced)
        rest = [layer for layer in self._layers if id(layer) not in replaced]
        self._layers = (*rest[:at], *new, *rest[at:])


def sliced(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Cut into lists of ``size``; the last may be shorter."""
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
