"""Functions that see one record at a time together with a `Context`: state and timers of its key, side outputs.

A record is the bare value of a stream of one column, and a tuple in the columns' order of one of several.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, ItemsView, Iterable, Iterator, MutableMapping, Sequence, ValuesView
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ftlayer.common.checks import check_runs, named_type, not_here
from ftlayer.errors import ConfigError, UnsupportedError
from ftlayer.functions.conversion import NO_RECORDS
from ftlayer.functions.current import current_record
from ftlayer.functions.handles import (
    NOTHING,
    AggregatingHandle,
    KeyedCall,
    ListHandle,
    MapHandle,
    Own,
    ReducingHandle,
    Result,
    Value,
    ValueHandle,
)
from ftlayer.functions.keyed import (
    Key,
    KeyedState,
    ListTable,
    MapTable,
    OperatorStates,
    Stamped,
    StateTtl,
    Timers,
    is_expired,
    lifetime_ms,
    owned_all,
    table_name,
)
from ftlayer.functions.undo import value_handle

Aggregated = TypeVar("Aggregated")


class ExpiringValue(ValueHandle):
    __slots__ = ("_refreshes", "_stamp")

    def __init__(
        self,
        context: KeyedCall,
        table: MutableMapping[Key, Any],
        default: Any,
        ttl: StateTtl,
        own: Own = None,
    ) -> None:
        super().__init__(context, table, default, ttl, own)
        self._stamp = _stamp(context, ttl)
        self._refreshes = ttl.refresh_on_read

    def get(self) -> Any:
        key = self._context.key
        stamped = self._table.get(key, NOTHING)
        if stamped is NOTHING:
            return self._initial()
        if is_expired(stamped, self._context.now_ms):
            self._table.pop(key, None)
            return self._initial()
        if self._refreshes:
            self._table[key] = self._stamp(stamped[1])
        return stamped[1] if self._own is None else self._own(stamped[1])

    def set(self, value: Any) -> None:
        self._table[self._context.key] = self._stamp(value if self._own is None else self._own(value))


class ExpiringList(ListHandle):
    __slots__ = ("_refreshes", "_stamp")

    def __init__(self, context: KeyedCall, table: ListTable, ttl: StateTtl, own: Own = None) -> None:
        super().__init__(context, table, ttl, own)
        self._stamp = _stamp(context, ttl)
        self._refreshes = ttl.refresh_on_read

    def append(self, value: Any) -> None:
        self.extend((value,))

    def extend(self, values: Iterable[Any]) -> None:
        added = list(values) if self._own is None else owned_all(list(values))
        self._table.extend(self._context.key, list(map(self._stamp, added)))

    def get(self) -> list[Any]:
        key, now_ms = self._context.key, self._context.now_ms
        found = self._table.get(key)
        values = [stamped[1] for stamped in found if not is_expired(stamped, now_ms)]
        if self._refreshes or len(values) < len(found):
            kept = [stamped for stamped in found if not is_expired(stamped, now_ms)]
            self._table.clear(key)
            self._table.extend(key, map(self._stamp, values) if self._refreshes else kept)
        return values


class ExpiringMap(MapHandle):
    __slots__ = ("_refreshes", "_stamp")

    def __init__(self, context: KeyedCall, table: MapTable, ttl: StateTtl, own: Own = None) -> None:
        super().__init__(context, table, ttl, own)
        self._stamp = _stamp(context, ttl)
        self._refreshes = ttl.refresh_on_read

    def __getitem__(self, field: Any) -> Any:
        key = self._context.key
        stamped = self._table.items(key)[field]
        if is_expired(stamped, self._context.now_ms):
            self._table.remove(key, field)
            raise KeyError(field)
        if self._refreshes:
            self._table.put(key, field, self._stamp(stamped[1]))
        return stamped[1] if self._own is None else self._own(stamped[1])

    def __contains__(self, field: object) -> bool:
        return self.get(field, NOTHING) is not NOTHING

    def get(self, field: Any, default: Any = None) -> Any:
        try:
            return self[field]
        except KeyError:
            return default

    def items(self) -> ItemsView[Any, Any]:
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:
        return ValuesView(self)

    def __setitem__(self, field: Any, value: Any) -> None:
        own = value if self._own is None else self._own(value)
        self._table.put(self._context.key, field, self._stamp(own))

    def __delitem__(self, field: Any) -> None:
        key = self._context.key
        over = is_expired(self._table.items(key)[field], self._context.now_ms)
        self._table.remove(key, field)
        if over:
            raise KeyError(field)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fields())

    def __len__(self) -> int:
        return len(self._fields())

    def _fields(self) -> list[Any]:
        key, now_ms = self._context.key, self._context.now_ms
        items = self._table.items(key)
        over = [field for field, stamped in items.items() if is_expired(stamped, now_ms)]
        for field in over:
            self._table.remove(key, field)
        return list(self._table.items(key) if over else items)


def _stamp(context: KeyedCall, ttl: StateTtl) -> Callable[[Any], Stamped]:
    time_ms = lifetime_ms(ttl)
    return lambda value: (context.now_ms + time_ms, value)


MIN_MS, MAX_MS = -(2**63), 2**63 - 1

SideRows = tuple[list[Any], list[int]]
"""Records of a side output, and the place in its input that each was emitted at."""

Items = list[Any]


_WORDS = {
    "state getstate getliststate getmapstate getreducingstate getaggregatingstate getbroadcaststate": "state is "
    ".value(name, default), .list(name), .map(name), .reducing(…), .aggregating(…) or .broadcast(name)",
    "timer timerservice registereventtimetimer registerprocessingtimetimer": ".timers.event(time_ms) and "
    ".timers.processing(time_ms); .watermark and .now_ms are the times now",
    "emit collect sideoutput": "return or yield records; .output(tag, record) is for side outputs",
}


class Context:
    """The record's surroundings: its key and time, the key's state and timers, the side outputs.

    One object serves all calls of a function, so what it says holds for the call it was given to. Handles of
    state may be kept (from ``open`` on, say): they always speak of the key of the current call.

    Attributes:
        uid: the operator's.
        key: the current key: the value of a single key column, a tuple of several. UnsupportedError without
            keys, and outside ``process`` and ``on_timer``.
        timestamp: the record's or the timer's event time, milliseconds since 1970; None if it has none. What
            ``on_timer`` returns gets the timer's time; to give it another one, ``on_timer`` sets it here.
        watermark: no record older than this is expected any more (replays may come), milliseconds since 1970.
        now_ms: wall-clock time of the current batch, milliseconds since 1970.
        timers: see `KeyTimers`. UnsupportedError without keys.
    """

    __slots__ = (
        "_lists",
        "_maps",
        "_operators",
        "_own",
        "_owned",
        "_place",
        "_side",
        "_stamped",
        "_state",
        "_values",
        "key",
        "now_ms",
        "timers",
        "timestamp",
        "uid",
        "watermark",
    )

    key: Any
    timers: KeyTimers

    def __init__(
        self,
        uid: str,
        side: Sequence[str],
        state: KeyedState | None = None,
        timers: Timers | None = None,
        *,
        timed: bool = False,
        operators: OperatorStates | None = None,
        own: Own = None,
        copies: bool = True,
    ) -> None:
        """``state`` and ``timers`` are None without keys; ``timed`` says that the function has an ``on_timer``.

        ``operators`` is the state that belongs to no key. ``own`` copies what goes into state and comes out of it:
        where ``copies``, in all handles, else a function of ours does, by `_owned`.
        """
        self.uid = uid
        self._own = own if copies else None
        self._owned: Callable[[Any], Any] = (lambda value: value) if own is None else own
        self.timestamp: int | None = None
        self.watermark = MIN_MS
        self.now_ms = 0
        self._state = state
        self._operators = operators
        # Which names of keyed state have a time to live.
        self._stamped: dict[str, bool] = {}
        self._values: dict[str, ValueHandle] = {}
        self._lists: dict[str, ListHandle] = {}
        self._maps: dict[str, MapHandle] = {}
        self._place = 0
        self._side: dict[str, SideRows] = {tag: ([], []) for tag in side}
        if timers is not None:
            self.timers = KeyTimers(timers, self, timed)

    @property
    def attempt(self) -> int:
        """Which run of the current record this is, from 1; UnsupportedError where there is none (``on_timer``)."""
        return current_record().attempt

    @property
    def first_failed_at(self) -> dt.datetime | None:
        """When the current record first failed (UTC), None if it has not; UnsupportedError where there is none."""
        return current_record().first_failed_at

    @overload
    def value(self, name: str, default: None = None, *, ttl: StateTtl | None = None) -> ValueHandle: ...

    @overload
    def value(self, name: str, default: Value, *, ttl: StateTtl | None = None) -> ValueHandle[Value]: ...

    def value(self, name: str, default: Any = None, *, ttl: StateTtl | None = None) -> ValueHandle:
        """Return the handle of a single value; ``default`` is what it has where nothing is set, or left."""
        handle = self._values.get(name)
        if handle is None or handle.default is not default or handle.ttl is not ttl:
            table = self._keyed().values(self._table(name, ttl))
            handle = self._values[name] = (
                value_handle(self, table, default, self._own)
                if ttl is None
                else ExpiringValue(self, table, default, ttl, self._own)
            )
        return handle

    def list(self, name: str, *, ttl: StateTtl | None = None) -> ListHandle:
        """Return the handle of a list; with ``ttl`` each of its values has its own time."""
        handle = self._lists.get(name)
        if handle is None or handle.ttl is not ttl:
            table = self._keyed().lists(self._table(name, ttl))
            kind: type[ListHandle] = ListHandle if ttl is None else ExpiringList
            handle = self._lists[name] = kind(self, table, ttl, self._own)
        return handle

    def map(self, name: str, *, ttl: StateTtl | None = None) -> MapHandle:
        """Return the handle of a mapping; with ``ttl`` each of its items has its own time."""
        handle = self._maps.get(name)
        if handle is None or handle.ttl is not ttl:
            table = self._keyed().maps(self._table(name, ttl))
            kind: type[MapHandle] = MapHandle if ttl is None else ExpiringMap
            handle = self._maps[name] = kind(self, table, ttl, self._own)
        return handle

    def reducing(
        self, name: str, function: Callable[[Value, Value], Value], *, ttl: StateTtl | None = None
    ) -> ReducingHandle[Value]:
        """Return the handle of a value that others are added to: the first one, then ``function(value, other)``.

        It lies where `value` of this name does.
        """
        check_runs(function, f"state {name!r}: function")
        return ReducingHandle(self.value(name, NOTHING, ttl=ttl), function)

    def aggregating(
        self,
        name: str,
        create: Callable[[], Aggregated],
        add: Callable[[Aggregated, Value], Aggregated],
        result: Callable[[Aggregated], Result] | None = None,
        *,
        ttl: StateTtl | None = None,
    ) -> AggregatingHandle[Value, Result]:
        """Return the handle of an aggregate: ``add(create(), value)``, then ``add(aggregate, value)``.

        ``result(aggregate)`` is what its ``get`` returns, without it the aggregate. It lies where `value` of this
        name does.
        """
        for what, function in (("create", create), ("add", add), ("result", result)):
            check_runs(function, f"state {name!r}: {what}")
        return AggregatingHandle(self.value(name, NOTHING, ttl=ttl), create, add, result)

    def _describe(self, name: str, values: str) -> None:
        self._keyed().describe(name, values)

    def operator_list(self, name: str) -> Items:
        """Return a list of this subtask that belongs to no key; another parallelism deals its items out.

        A plain list, to be changed in place; may be asked for in ``open``, and holds there what was restored.
        """
        return self._unkeyed().list(name)

    def union_list(self, name: str) -> Items:
        """Return a list as `operator_list` does; a restore gives every subtask the items of all of them."""
        return self._unkeyed().list(name, union=True)

    def broadcast(self, name: str) -> dict[Any, Any]:
        """Return a mapping of this subtask that belongs to no key, and is the same in all subtasks.

        Nothing sees to it that it is: fill it from records that go to every subtask (`DataStream.broadcast`), alike
        and from nothing else. After a restore at another parallelism each subtask has one of the copies.
        """
        return self._unkeyed().broadcast(name)

    def output(self, tag: str, record: Any) -> None:
        """Emit a record to a side output; UnsupportedError if the operator declares none of this name."""
        try:
            records, places = self._side[tag]
        except KeyError:
            declared = ", ".join(map(repr, self._side)) or "none"
            raise UnsupportedError(
                f"{self.uid!r} has no side output {tag!r} (declared: {declared}); name it in `side`"
            ) from None
        records.append(record)
        places.append(self._place)

    def _enter(self, key: Key, timestamp: int | None, place: int) -> None:
        """Begin a timer's call. (The fused loop sets the same fields itself.)"""
        self.key = key
        self.timestamp = timestamp
        self._place = place

    def _leave(self) -> None:
        with suppress(AttributeError):
            del self.key

    def _take_side(self) -> dict[str, SideRows]:
        """Return the side outputs' records, each with the place it was emitted at, and begin afresh."""
        taken = {tag: pair for tag, pair in self._side.items() if pair[0]}
        for tag in taken:
            self._side[tag] = ([], [])
        return taken

    def _keyed(self) -> KeyedState:
        if self._state is None:
            raise UnsupportedError(_WITHOUT_KEYS.format(uid=self.uid, what="state"))
        return self._state

    def _table(self, name: str, ttl: StateTtl | None) -> str:
        """Return the table of a state; ConfigError if it has a time to live here and none there."""
        if self._stamped.setdefault(name, ttl is not None) is not (ttl is not None):
            raise ConfigError(
                f"{self.uid!r} uses the state {name!r} with a time to live and without; give each its own name"
            )
        return table_name(name, ttl)

    def _unkeyed(self) -> OperatorStates:
        if self._operators is None:
            raise UnsupportedError(f"{self.uid!r} runs where there is no operator state")
        return self._operators

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only reached for what is not set: it costs nothing where it is.
            if name == "timers":
                raise UnsupportedError(_WITHOUT_KEYS.format(uid=self.uid, what="timers"))
            if name == "key":
                if self._state is None:
                    raise UnsupportedError(_WITHOUT_KEYS.format(uid=self.uid, what="a key"))
                raise UnsupportedError(
                    f"{self.uid!r} asked for a key, or its state, where there is none; "
                    "use them in process and on_timer only"
                )
            raise not_here(self, name, _WORDS)


_WITHOUT_KEYS = "{uid!r} has no keys, so it has not {what}; call key_by before process"


class KeyTimers:
    """Timers of the current key. Setting one twice is the same as setting it once.

    Times are milliseconds since 1970. One that lies behind the watermark, or before now, is due at once: it fires
    when the batch is done.
    """

    __slots__ = ("_context", "_timed", "_timers")

    def __init__(self, timers: Timers, context: Context, timed: bool) -> None:
        self._timers = timers
        self._context = context
        self._timed = timed

    def event(self, time_ms: int) -> None:
        """Have ``on_timer`` called once the watermark reaches ``time_ms``."""
        self._timers.event.add(self._context.key, self._checked(time_ms))

    def processing(self, time_ms: int) -> None:
        """Have ``on_timer`` called once the wall clock reaches ``time_ms``."""
        self._timers.processing.add(self._context.key, self._checked(time_ms))

    def delete_event(self, time_ms: int) -> None:
        """Take back `event`; nothing happens if there is no such timer."""
        self._timers.event.delete(self._context.key, time_ms)

    def delete_processing(self, time_ms: int) -> None:
        """Take back `processing`; nothing happens if there is no such timer."""
        self._timers.processing.delete(self._context.key, time_ms)

    def _checked(self, time_ms: int) -> int:
        if not self._timed:
            raise UnsupportedError(
                f"{self._context.uid!r} sets a timer and its function has no on_timer(time_ms, ctx); write one"
            )
        try:
            exact = index(time_ms)
        except TypeError:
            raise TypeError(f"a timer's time is a whole number of milliseconds, not {time_ms!r}") from None
        if not MIN_MS <= exact <= MAX_MS:
            raise ValueError(f"a timer's time is a 64-bit number of milliseconds since 1970, not {time_ms!r}")
        return exact


def results_of(returned: Iterable[Any] | None) -> Iterable[Any]:
    """Return what a process function returned, to iterate over; TypeError for what is not meant as many records."""
    if returned is None:
        return ()
    if isinstance(returned, NO_RECORDS):
        raise TypeError(f"expected an iterable of records, got {named_type(returned)}; wrap it in a list")
    return returned


LAST_WATERMARK_MS = 2**63 - 1
"""`Context.watermark` once all inputs have ended: every timer of event time is due."""


class _OfContext:
    def open(self, ctx: Context) -> None:
        """Get ready; called once in the slot, before the first record. There is no key yet."""

    def on_timer(self, time_ms: int, ctx: Context) -> Iterable[Any] | None:
        """Take the timer that was set for ``time_ms`` and ``ctx.key``; return any number of records, or None.

        An exception here ends the slot, since there is no record to blame; with a `FailurePolicy` in barrier mode the
        timer is tried again, as a record is. A function that sets a timer of
        event time in every call has to stop once ``ctx.watermark`` is `LAST_WATERMARK_MS`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method on_timer(time_ms, ctx)")

    def close(self) -> None:
        """Give resources up; called when the slot ends in an orderly way, not when it is lost."""


class ProcessFunction(_OfContext):
    """Takes records of one input.

    A record whose `process` raises fails, with all it has put out. In barrier mode with a `FailurePolicy` what it
    changed of the state, and the timers it set, are as if it had never come; else they stay, and a replay meets them.
    """

    def process(self, record: Any, ctx: Context) -> Iterable[Any] | None:
        """Take a record; return (or yield) any number of records, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process(record, ctx)")


class CoProcessFunction(_OfContext):
    """Takes records of two inputs that share state and timers of a key. See `ProcessFunction`."""

    def process_left(self, record: Any, ctx: Context) -> Iterable[Any] | None:
        """Take a record of the first input."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_left(record, ctx)")

    def process_right(self, record: Any, ctx: Context) -> Iterable[Any] | None:
        """Take a record of the second input."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_right(record, ctx)")


def uses_timers(function: Any) -> bool:
    """Whether ``function`` has an ``on_timer`` of its own: without one it cannot set timers."""
    return getattr(type(function), "on_timer", None) not in (_OfContext.on_timer, None)
