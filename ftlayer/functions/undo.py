"""Changes of state that can be taken back: the undo log of a chain, and a state backend that notes in it.

The log lives until the results of the functions have gone their way, since a record may fail late: where its result
becomes an Arrow column, behind a function a batch at a time, where a partitioner is asked. The chain then begins again.

Anchors: undo logs of databases (Mohan et al., ARIES, ACM TODS 17(1), 1992), here of logical operations, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial, wraps
from typing import Any, Protocol, SupportsIndex, TypeGuard, TypeVar

import numpy as np

from ftlayer.common.printable import described
from ftlayer.errors import StateSerializationError
from ftlayer.functions import keyed
from ftlayer.functions.failures import I64
from ftlayer.functions.handles import KeyedCall, Own, ValueHandle
from ftlayer.functions.keyed import ATOMS, Key, is_immutable, is_marker, private_copy
from ftlayer.records.failures import RowFailure
from ftlayer.records.kernels import native

Restore = Callable[[Any, Any], object]
"""``restore(key, old)`` makes what ``key`` names what it was before one change."""


class LateFailure(Exception):  # noqa: N818 - no error: it turns the chain round
    """A record failed, and its changes are mixed with those of records behind it: all are taken back.

    Attributes:
        row: the input row.
    """

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class Changes(Protocol):
    """Where tables note what functions do: an `UndoLog`, or one without copies.

    Attributes:
        add, entries: see `UndoLog`.
    """

    entries: list[Any]
    add: Callable[[tuple[Restore, Any, Any]], None]

    @property
    def copies(self) -> bool:
        """Whether `read` does anything."""

    def read(self, restore: Restore, key: Any, value: Any, where: Hashable) -> None:
        """See `UndoLog.read`."""


class UndoLog:
    """Changes of state, in their order. One serves all functions of one chain, in one thread.

    Attributes:
        entries: restore, key and old value of each change, one behind the other: so many tuples would keep Python's
            garbage collector busy. Its length is a mark for `fail`. It stays the same list.
        add: takes ``(restore, key, old)``, before the change or right behind it.
        copies: see `Changes`.
        alone: the log is of one record, so that a late failure turns nothing round.
        traced: failures are to have their tracebacks: that a failing record is tried again may be all of it.
    """

    copies = True
    __slots__ = ("_copied", "_is_mixed", "add", "alone", "entries", "traced")

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.add: Callable[[tuple[Restore, Any, Any]], None] = self.entries.extend
        self.alone = False
        self.traced = True
        # Where something lies that can be changed in place, and was copied: the place of the copy in the log.
        self._copied: dict[Hashable, int] = {}
        self._is_mixed = False

    @property
    def has_changes(self) -> bool:
        return bool(self.entries)

    def begin_segment(self) -> None:
        """The functions that share a loop begin: what is in the log now, others have changed."""
        self._is_mixed = self.has_changes

    def read(self, restore: Restore, key: Any, value: Any, where: Hashable) -> None:
        """A function reads ``value``, and may change it in place: the first time in a batch a copy is kept.

        ``where`` names the place of the value, ``restore(key, copy)`` puts the copy there. Raises
        `StateSerializationError` for what cannot be copied.
        """
        if is_immutable(value):
            return
        copied = self._copied.get(where)
        if copied is not None:
            self.add((_read_again, copied, None))
            return
        try:
            copy = private_copy(value)
        except BaseException as error:
            raise StateSerializationError(
                f"the state of the key {key!r:.100} holds a {type(value).__name__} that cannot be copied "
                f"({described(error)}), so what a failing record does to it could not be "
                "taken back; keep values that can be copied, or say in_place=False where the function changes none "
                "in place"
            ) from error
        self._copied[where] = len(self.entries)
        self.add((restore, key, copy))

    def fail(self, mark: int, row: int) -> None:
        """The functions of one loop have failed for ``row``: take its changes back, all behind ``mark``.

        Raises `LateFailure` if it changed something elsewhere too: in an earlier loop, or in place, in what another
        record of the batch had read before.
        """
        mixed = self._is_mixed or self._read_again_behind(mark)
        self._undo(mark)
        if mixed and not self.alone:
            raise LateFailure(row)

    def _read_again_behind(self, mark: int) -> bool:
        """Whether something was read behind ``mark`` whose copy is before it."""
        if not self._copied:
            return False
        kinds, copies = self.entries[mark::3], self.entries[mark + 1 :: 3]
        return any(kind is _read_again and copied < mark for kind, copied in zip(kinds, copies, strict=True))

    def late(self, row: int) -> None:
        """A result of ``row`` is refused behind all loops. Raises `LateFailure` if any record has changed something."""
        if self.has_changes and not self.alone:
            raise LateFailure(row)

    def refused(self, failures: Iterable[RowFailure], parents: I64, *, mixed: bool) -> None:
        """These failed, and changed nothing themselves.

        Raises `LateFailure` if more may have been changed for one of them: by an earlier loop (``mixed``), or as
        ``parents``, what each record of this one comes from, has it twice.
        """
        for failure in () if self.alone else failures:
            if mixed or np.count_nonzero(parents == failure.row) > 1:
                raise LateFailure(failure.row)

    def undo(self) -> None:
        self._undo(0)
        self._is_mixed = False

    def forget(self) -> None:
        self.entries.clear()
        self._copied.clear()
        self._is_mixed = False

    def _undo(self, mark: int) -> None:
        entries = self.entries
        while len(entries) > mark:
            old, key, restore = entries.pop(), entries.pop(), entries.pop()
            restore(key, old)
        copied = self._copied
        while copied and next(reversed(copied.values())) >= mark:
            copied.popitem()


class Uncopied:
    """A log's way in for functions that change no value in place: what they read is not copied."""

    copies = False

    def __init__(self, log: UndoLog) -> None:
        self.entries = log.entries
        self.add = log.add

    def read(self, restore: Restore, key: Any, value: Any, where: Hashable) -> None:
        """See `UndoLog.read`: nothing has to be kept."""


def _read_again(copied: int, _: object) -> None:
    """Stand in the log for one more read of what lies copied at that place in it: nothing to restore."""


# Work that is done in pieces where a part of it fails late, so that the part fails alone.
#
# Behind a late failure nothing is known of the records that came after it: they may have seen what it changed. So all
# is taken back; the records before it run again, then it alone, then the others in pieces that grow. A record that
# does not fail so runs about three times where many fail late, and mostly once; what its functions do outside of
# state is done as often.


FIRST_SIZE = 16
"""Records in the piece behind one that failed late …"""

GROWTH = 4
"""… and how much larger the next one is."""


class PieceOfWork(Protocol):
    @property
    def size(self) -> int:
        """How many records, or timers, it took."""

    @property
    def has_failures(self) -> bool:
        """Whether one of them failed."""


Result = TypeVar("Result", bound=PieceOfWork)


def in_pieces(
    log: UndoLog, size: int, run: Callable[[int, int], Result | None]
) -> Iterator[tuple[int, Result]]:
    """Run so many records together if none fails late; give what comes of each piece, and where it begins.

    ``run(start, most)`` runs up to ``most`` records, and returns None if there are no more. It may raise `LateFailure`
    with the place of a record from ``start`` on. When a piece is given, what its records that failed have changed is
    taken back, and what the others have changed stays.
    """
    start = 0
    culprit: int | None = None
    while True:
        log.alone = size == 1
        try:
            piece = run(start, size)
        except LateFailure as late:
            log.undo()
            culprit = late.row
            size = max(culprit - start, 1)
            continue
        if piece is None:
            log.forget()
            return
        if log.alone and piece.has_failures:
            log.undo()
        log.forget()
        yield start, piece
        start += piece.size
        size = 1 if start == culprit else max(size * GROWTH, FIRST_SIZE)


# Tables of keyed state whose changes go into an undo log.
#
# Values that a function may change in place (`acc.append(x)`) are copied when they are first read in a batch, at a cost
# that grows with their size; numbers, strings and tuples of them are not.


class _Absent:
    __slots__ = ()


ABSENT: Any = _Absent()
"""In the log, for a key or an item that was not there."""


class UndoValues(MutableMapping[Key, Any]):
    """A table of single values.

    Attributes:
        table: it without the log.
        log: where changes go.
    """

    def __init__(self, table: MutableMapping[Key, Any], log: Changes) -> None:
        self.table = table
        self.log = log
        self._add = log.add
        self._get = table.get

    def get(self, key: Key, default: Any = None) -> Any:
        value = self._get(key, ABSENT)
        if type(value) not in ATOMS:
            if value is ABSENT:
                return default
            self.read(key, value)
        return value

    def __getitem__(self, key: Key) -> Any:
        value = self.get(key, ABSENT)
        if value is ABSENT:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Key, value: Any) -> None:
        self._add((self.restore, key, self._get(key, ABSENT)))
        self.table[key] = value

    def __delitem__(self, key: Key) -> None:
        # `LayeredTable` has no use for `del`.
        self.pop(key)

    def pop(self, key: Key, default: Any = ABSENT) -> Any:
        value = self._get(key, ABSENT)
        if value is ABSENT:
            if default is ABSENT:
                raise KeyError(key)
            return default
        self.read(key, value)
        self._add((self.restore, key, value))
        self.table.pop(key)
        return value

    def look_up(self, key: Key) -> Any:
        """Return the value that is about to be replaced, and log it; KeyError where there is none."""
        value = self._get(key, ABSENT)
        if value is not ABSENT:
            self.read(key, value)
        self._add((self.restore, key, value))
        if value is ABSENT:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[Key]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, key: Key, value: Any) -> None:
        """A key's value is read, and may be changed in place."""
        self.log.read(self.restore, key, value, (id(self), key))

    def restore(self, key: Key, old: Any) -> None:
        if old is ABSENT:
            self.table.pop(key, None)
        else:
            self.table[key] = old


class UndoLists:
    def __init__(self, table: keyed.ListTable, log: Changes) -> None:
        self._table = table
        self._log = log

    def size(self, key: Key) -> int:
        return self._table.size(key)

    def get(self, key: Key) -> list[Any]:
        found = self._table.get(key)
        # The list is the caller's own; what is in it is not.
        if not (ATOMS.issuperset(map(type, found)) or all(map(is_immutable, found))):
            self._log.read(self._replace, key, found, (id(self), key))
        return found

    def extend(self, key: Key, values: Iterable[Any]) -> None:
        size = self._table.size(key)
        self._table.extend(key, values)
        self._log.add((self._cut, key, size))

    def clear(self, key: Key) -> None:
        self._log.add((self._replace, key, self._table.get(key)))
        self._table.clear(key)

    def _cut(self, key: Key, size: int) -> None:
        self._replace(key, self._table.get(key)[:size])

    def _replace(self, key: Key, items: list[Any]) -> None:
        self._table.clear(key)
        self._table.extend(key, items)


class UndoMaps:
    """A table of mappings: `ftlayer.functions.keyed.MapTable`.

    Attributes:
        table: it without the log.
    """

    def __init__(self, table: keyed.MapTable, log: Changes) -> None:
        self.table = table
        self._log = log

    def keys(self) -> Iterable[Key]:
        return self.table.keys()

    def items(self, key: Key) -> Mapping[Any, Any]:
        found = self.table.items(key)
        return _Items(self, key, found) if found else found

    def put(self, key: Key, field: Any, value: Any) -> None:
        self._log.add((self._restore, (key, field), self.table.items(key).get(field, ABSENT)))
        self.table.put(key, field, value)

    def remove(self, key: Key, field: Any) -> None:
        old = self.table.items(key)[field]
        self.table.remove(key, field)
        self._log.add((self._restore, (key, field), old))

    def clear(self, key: Key) -> None:
        self._log.add((self._replace, key, dict(self.table.items(key))))
        self.table.clear(key)

    def read(self, key: Key, field: Any, value: Any) -> None:
        self._log.read(self._restore, (key, field), value, (id(self), key, field))

    def _restore(self, where: tuple[Key, Any], old: Any) -> None:
        key, field = where
        if old is not ABSENT:
            self.table.put(key, field, old)
        elif field in self.table.items(key):
            self.table.remove(key, field)

    def _replace(self, key: Key, items: Mapping[Any, Any]) -> None:
        self.table.clear(key)
        for field, value in items.items():
            self.table.put(key, field, value)


class _Items(Mapping[Any, Any]):
    """The items of one key, each of which is copied when it is read, if it can be changed."""

    __slots__ = ("_found", "_key", "_maps")

    def __init__(self, maps: UndoMaps, key: Key, found: Mapping[Any, Any]) -> None:
        self._maps = maps
        self._key = key
        self._found = found

    def __getitem__(self, field: Any) -> Any:
        value = self._found[field]
        if type(value) not in ATOMS:
            self._maps.read(self._key, field, value)
        return value

    def __contains__(self, field: object) -> bool:
        return field in self._found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def value_handle(
    context: KeyedCall, table: MutableMapping[Key, Any], default: Any, own: Own = None
) -> ValueHandle:
    """Return the handle of a single value; what it changes goes into a log where ``table`` has one."""
    if not (is_marker(default) or is_immutable(default)):
        return ValueHandle(context, table, default, own=own)
    if isinstance(table, UndoValues):
        if finds_as_dict(table.table):
            noted = (table.log.entries, table.restore, table.read, ABSENT)
            return native.DictValueHandle(context, table.table, table.pop, default, own, *noted)
    elif finds_as_dict(table):
        return native.DictValueHandle(context, table, table.pop, default, own)
    return ValueHandle(context, table, default, own=own)


def logged_lookup(values: UndoValues) -> Callable[[Key], Any]:
    """Return `UndoValues.look_up`. It does not look at a value that nothing changes in place."""
    table, log = values.table, values.log
    if not finds_as_dict(table):
        return values.look_up
    return native.LoggedLookup(
        table, log.entries, values.restore, values.read if log.copies else None, ABSENT
    )


def finds_as_dict(table: MutableMapping[Key, Any]) -> TypeGuard[dict[Key, Any]]:
    """Return whether ``table`` is a dict that looks up, and sets, items as all do."""
    kind = type(table)
    return (
        issubclass(kind, dict)
        and kind.__getitem__ is dict.__getitem__
        and kind.__setitem__ is dict.__setitem__
    )


# Operator state whose changes go into an undo log: lists and mappings that users change in place.
#
# They are a `list` and a `dict` in all that reads them. An item that can be changed itself is copied, with all others,
# when one is read for the first time in a batch.


def logged(state: Any, log: Changes) -> UndoItems | UndoBroadcast:
    return UndoBroadcast(state, log) if isinstance(state, dict) else UndoItems(state, log)


def _noted(change: Callable[..., Any]) -> Any:
    """Return a method that notes the items as they are, and changes them as that of `list` does."""

    @wraps(change)
    def noted(items: UndoItems, *args: Any, **options: Any) -> Any:
        items._changes()
        return change(items, *args, **options)

    return noted


class UndoItems(list[Any]):
    __slots__ = ("_log",)

    def __init__(self, items: Iterable[Any], log: Changes) -> None:
        super().__init__(items)
        self._log = log

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self._read(found if isinstance(place, slice) else (found,))
        return found

    def __iter__(self) -> Iterator[Any]:
        self._read(super().__iter__())
        return super().__iter__()

    def append(self, item: Any) -> None:
        self._log.add((self._cut, None, len(self)))
        super().append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self._log.add((self._cut, None, len(self)))
        super().extend(items)

    def __iadd__(self, items: Iterable[Any]) -> UndoItems:  # type: ignore[misc]
        self.extend(items)
        return self

    __imul__ = _noted(list.__imul__)
    __setitem__ = _noted(list.__setitem__)
    __delitem__ = _noted(list.__delitem__)
    insert = _noted(list.insert)
    remove = _noted(list.remove)
    clear = _noted(list.clear)
    reverse = _noted(list.reverse)
    sort = _noted(list.sort)

    def pop(self, place: SupportsIndex = -1) -> Any:
        found = self[place]
        self._changes()
        super().__delitem__(place)
        return found

    def _read(self, items: Iterable[Any]) -> None:
        if not all(type(item) in ATOMS or is_immutable(item) for item in items):
            self._log.read(self._replace, None, super().copy(), id(self))

    def _changes(self) -> None:
        self._log.add((self._replace, None, super().copy()))

    def _cut(self, _: None, size: int) -> None:
        super().__delitem__(slice(size, None))

    def _replace(self, _: None, items: list[Any]) -> None:
        super().__setitem__(slice(None), items)


class UndoBroadcast(dict[Any, Any]):
    __slots__ = ("_log",)

    def __init__(self, items: dict[Any, Any], log: Changes) -> None:
        super().__init__(items)
        self._log = log

    def __getitem__(self, field: Any) -> Any:
        return self._read(field, super().__getitem__(field))

    def get(self, field: Any, default: Any = None) -> Any:
        try:
            return self[field]
        except KeyError:
            return default

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def __setitem__(self, field: Any, value: Any) -> None:
        self._changes(field)
        super().__setitem__(field, value)

    def __delitem__(self, field: Any) -> None:
        self._changes(field)
        super().__delitem__(field)

    def pop(self, field: Any, *default: Any) -> Any:
        if field in self:
            self[field]  # read: it may be changed behind that
            self._changes(field)
        return super().pop(field, *default)

    def popitem(self) -> tuple[Any, Any]:
        field = next(reversed(self), ABSENT)
        return super().popitem() if field is ABSENT else (field, self.pop(field))

    def setdefault(self, field: Any, default: Any = None) -> Any:
        if field not in self:
            self[field] = default
        return self[field]

    def update(self, *others: Any, **fields: Any) -> None:
        for field, value in dict(*others, **fields).items():
            self[field] = value

    def __ior__(self, other: Any) -> UndoBroadcast:  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        for field in list(self):
            del self[field]

    def _read(self, field: Any, value: Any) -> Any:
        if type(value) not in ATOMS:
            self._log.read(self._restore, field, value, (id(self), field))
        return value

    def _read_all(self) -> None:
        for field, value in super().items():
            self._read(field, value)

    def _changes(self, field: Any) -> None:
        self._log.add((self._restore, field, super().get(field, ABSENT)))

    def _restore(self, field: Any, old: Any) -> None:
        if old is ABSENT:
            super().pop(field, None)
        else:
            super().__setitem__(field, old)


class UndoQueue:
    """Timers of one kind: `ftlayer.functions.keyed.TimerQueue`.

    A timer that was deleted, and is set again by the log, fires behind the others of its time. One that fires alone is
    gone, also if it fails: what fired it has it.
    """

    def __init__(self, timers: keyed.TimerQueue, log: UndoLog) -> None:
        self._timers = timers
        self._log = log

    @property
    def count(self) -> int:
        return self._timers.count

    def add(self, key: Key, time_ms: int) -> bool:
        added = self._timers.add(key, time_ms)
        if added:
            self._log.add((self._timers.delete, key, time_ms))
        return added

    def delete(self, key: Key, time_ms: int) -> bool:
        deleted = self._timers.delete(key, time_ms)
        if deleted:
            self._log.add((self._timers.add, key, time_ms))
        return deleted

    def take(self, until_ms: int) -> tuple[int, list[Key]] | None:
        due = self._timers.take(until_ms)
        if due is not None and not self._log.alone:
            self._log.add((self._set, *due))
        return due

    def next_ms(self) -> int | None:
        return self._timers.next_ms()

    def _set(self, time_ms: int, keys: list[Key]) -> None:
        for key in keys:
            self._timers.add(key, time_ms)


class UndoTimers:
    def __init__(self, timers: keyed.Timers, log: UndoLog) -> None:
        self.event = UndoQueue(timers.event, log)
        self.processing = UndoQueue(timers.processing, log)


class UndoBackend:
    """`ftlayer.functions.keyed.Backend`: what functions change through it goes into ``log``."""

    def __init__(self, backend: keyed.Backend, log: UndoLog, *, copies: bool = True) -> None:
        """``copies``: what functions read is copied where they could change it in place."""
        self._backend = backend
        self._log = log
        self.copies = copies
        self._changes: Changes = log if copies else Uncopied(log)

    def uncopied(self) -> UndoBackend:
        """Return the same for functions that change no value in place."""
        return UndoBackend(self._backend, self._log, copies=False)

    def state(self, uid: str) -> UndoState:
        return UndoState(self._backend.state(uid), self._changes)

    def timers(self, uid: str) -> UndoTimers:
        return UndoTimers(self._backend.timers(uid), self._log)

    def operators(self, uid: str) -> keyed.OperatorStates:
        states = self._backend.operators(uid)
        states.log_changes(partial(logged, log=self._changes))
        return states


class UndoState:
    def __init__(self, state: keyed.KeyedState, log: Changes) -> None:
        self._state = state
        self._log = log
        # One object a table: the log tells places by them.
        self._values: dict[str, UndoValues] = {}
        self._lists: dict[str, UndoLists] = {}
        self._maps: dict[str, UndoMaps] = {}

    def values(self, name: str) -> UndoValues:
        return self._values.setdefault(name, UndoValues(self._state.values(name), self._log))

    def lists(self, name: str) -> UndoLists:
        return self._lists.setdefault(name, UndoLists(self._state.lists(name), self._log))

    def maps(self, name: str) -> UndoMaps:
        return self._maps.setdefault(name, UndoMaps(self._state.maps(name), self._log))

    def describe(self, name: str, values: str) -> None:
        self._state.describe(name, values)

    def cache(self, cache: keyed.StateCache) -> None:
        self._state.cache(cache)
