"""Which states an operator declares, and which of a checkpoint's it has given up or renamed.

A function declares a state when it asks for it in `open`. A checkpoint says of each state whether the program that took
it declared it. A restore compares the two when all functions are open, before the first record: a declared state that
the program declares no more is gone, and is not left behind without a word.

A state that `process` asks for first is not declared. It may be asked for with the first record, or next year, so
that nothing follows from what was asked for so far: it is kept in every checkpoint, and a restore never ends for its
sake. The price: one that was renamed begins empty, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Any

from ftlayer.errors import ConfigError, IncompatibleCheckpointError
from ftlayer.functions.keyed import ATOMS, Key, StateCache, is_immutable, plain_name
from ftlayer.state.tables.layers import NOTHING, LayeredTable

logger = logging.getLogger(__name__)


# Timers by time: a bucket of keys for each time, and a heap of times, few as windows have. A timer goes at once.


SPARE_TIMES = 64
"""Times without a timer that the heap may hold beside as many as there are with one."""


class TimerService:
    """The timers of one operator, of event and of processing time: `ftlayer.functions.keyed.Timers`."""

    def __init__(self) -> None:
        self.event = _Queue()
        self.processing = _Queue()

    def freeze(self) -> tuple[Buckets, Buckets]:
        """Return the timers of event and processing time, by their times; a changed bucket is copied until `thaw`."""
        return self.event.freeze(), self.processing.freeze()

    def thaw(self) -> None:
        self.event.thaw()
        self.processing.thaw()


Buckets = dict[int, dict[Key, None]]
"""The keys of each time, in the order of setting: a dict serves as a set that keeps its order."""


class _Queue:
    """`ftlayer.functions.keyed.TimerQueue`."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets: Buckets = {}
        self._times: list[int] = []
        # The buckets of the last snapshot that is still read: those that are still the same are not to be changed.
        self._frozen: Buckets = {}

    def freeze(self) -> Buckets:
        self._frozen = self._buckets.copy()
        return self._frozen

    def thaw(self) -> None:
        self._frozen = {}

    def _private(self, time_ms: int, bucket: dict[Key, None]) -> dict[Key, None]:
        if self._frozen and self._frozen.get(time_ms) is bucket:
            bucket = self._buckets[time_ms] = bucket.copy()
        return bucket

    def add(self, key: Key, time_ms: int) -> bool:
        bucket = self._buckets.get(time_ms)
        if bucket is None:
            self._buckets[time_ms] = {key: None}
            heappush(self._times, time_ms)
        elif key in bucket:
            return False
        else:
            self._private(time_ms, bucket)[key] = None
        self.count += 1
        return True

    def delete(self, key: Key, time_ms: int) -> bool:
        bucket = self._buckets.get(time_ms)
        if bucket is None or key not in bucket:
            return False
        bucket = self._private(time_ms, bucket)
        del bucket[key]
        self.count -= 1
        if not bucket:
            del self._buckets[time_ms]
            # Its time stays in the heap: a timer that is moved on with every record would fill it.
            if len(self._times) > 2 * len(self._buckets) + SPARE_TIMES:
                self._times = list(self._buckets)
                heapify(self._times)
        return True

    def next_ms(self) -> int | None:
        while self._times and self._times[0] not in self._buckets:
            heappop(self._times)
        return self._times[0] if self._times else None

    def take(self, until_ms: int) -> tuple[int, list[Key]] | None:
        time_ms = self.next_ms()
        if time_ms is None or time_ms > until_ms:
            return None
        heappop(self._times)
        keys = list(self._buckets.pop(time_ms))
        self.count -= len(keys)
        return time_ms, keys


class StateDeclarations:
    """The names of one operator's states in one subtask: those restored, and those asked for."""

    def __init__(self) -> None:
        self._restored: dict[str, bool] = {}
        self._asked: set[str] = set()
        self._declared: set[str] = set()
        self._opened = False
        self._warned = False

    def restored(self, name: str, declared: bool) -> None:
        """A snapshot of the checkpoint holds it; of a state in several, all have to say that it was declared."""
        self._restored[name] = declared and self._restored.get(name, True)

    def ask(self, name: str) -> None:
        if name not in self._asked:
            self._asked.add(name)
            if not self._opened:
                self._declared.add(name)

    def opened(self) -> None:
        """All functions are open: what they ask for from now on is not declared."""
        self._opened = True

    @property
    def declared(self) -> frozenset[str]:
        return frozenset(self._declared)

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self._restored)

    def is_restored(self, name: str) -> bool:
        return name in self._restored

    def is_declared(self, name: str) -> bool:
        """What the next checkpoint says of it: as the one before did, as long as nothing has asked for the state."""
        if name in self._asked:
            return name in self._declared
        return self._restored.get(name, False)

    def new(self) -> list[str]:
        """The states that were asked for and that the checkpoint does not hold."""
        return sorted(self._asked - self._restored.keys())

    def gone(self, has_entries: Callable[[str], bool]) -> list[str]:
        """The states with entries that the checkpoint's program declared, and this one, behind `opened`, does not."""
        return sorted(
            name
            for name, declared in self._restored.items()
            if declared and name not in self._declared and has_entries(name)
        )

    @property
    def waits(self) -> bool:
        """Whether a state of the checkpoint was not asked for yet, and `maybe_renamed` has found none so far."""
        return not self._warned and not self._restored.keys() <= self._asked

    def maybe_renamed(self, has_entries: Callable[[str], bool]) -> tuple[list[str], list[str]] | None:
        """The states begun anew and those with entries not asked for yet, the first time that there are both."""
        new = self.new()
        if not self.waits or not new:
            return None
        idle = sorted(name for name in self._restored.keys() - self._asked if has_entries(name))
        self._warned = bool(idle)
        return (new, idle) if idle else None


VALUE, LIST, MAP, TIMERS = "value", "list", "map", "timers"


_NO_ITEMS: Mapping[Any, Any] = MappingProxyType({})


class OperatorTables:
    """The tables of one operator, by name; ``caches`` have some of its state in a form of their own."""

    def __init__(self, uid: str, create: Callable[[str, str], LayeredTable]) -> None:
        self._uid = uid
        self._create = create
        self._tables: dict[str, tuple[str, LayeredTable, Any]] = {}
        self.declarations = StateDeclarations()
        self.caches: list[StateCache] = []
        # What is said of values: by this program, and by the checkpoint where its version is the present one.
        self._described: dict[str, str] = {}
        self._restored: dict[str, str] = {}

    def values(self, name: str) -> LayeredTable:
        return self._table(name, VALUE)[0]

    def lists(self, name: str) -> LayeredList:
        found: LayeredList = self._table(name, LIST)[1]
        return found

    def maps(self, name: str) -> LayeredMap:
        found: LayeredMap = self._table(name, MAP)[1]
        return found

    def restored(self, name: str, kind: str) -> LayeredTable:
        """Return the table for what a checkpoint holds; IncompatibleCheckpointError if it holds two kinds."""
        return self._found(name, kind)[0]

    def describe(self, name: str, values: str) -> None:
        self._described[name] = values

    def described(self, name: str) -> str:
        """Return what this program says of a table's values; "" if nothing."""
        return self._described.get(name, "")

    def restored_values(self, name: str, values: str) -> None:
        """A checkpoint says so of a table's values, which are not migrated."""
        self._restored[name] = values

    def cache(self, cache: StateCache) -> None:
        self.caches.append(cache)

    def opened(self) -> None:
        """All functions are open; IncompatibleCheckpointError if a declared state is gone, or of other values."""
        self.declarations.opened()
        for name, values in self._restored.items():
            differs = values != self.described(name) and name in self.declarations.declared
            if differs and self._has_entries(name):
                raise IncompatibleCheckpointError(self._differs(name, values))
        gone = self.declarations.gone(self._has_entries)
        if gone:
            raise IncompatibleCheckpointError(self._gone(gone[0]))

    def look_for_renamed(self) -> bool:
        """Warn, once, if a state begins anew beside others that wait to be asked for. Whether one does wait."""
        found = self.declarations.maybe_renamed(self._has_entries)
        if found is not None:
            logger.warning(
                "%r begins the state %s. The checkpoint holds %s, which was not asked for yet, and which no `open` "
                "asks for: it is kept. If it was renamed, give StateMigration(%r, ..., renamed_from=...) and restore "
                "again",
                self._uid,
                *(", ".join(map(repr, names)) for names in found),
                self._uid,
            )
        return self.declarations.waits

    def _has_entries(self, name: str) -> bool:
        return bool(self._tables[name][1])

    def _gone(self, name: str) -> str:
        plain = plain_name(name)
        new = next(iter(self.declarations.new()), None)
        if new is None:
            what = "If it was renamed, migrations need StateMigration"
            what += f"({self._uid!r}, its new name, renamed_from={plain!r})"
        elif plain_name(new) == plain:
            what = "With a time to live it is another state than without: what it holds is not carried over"
        else:
            what = f"{new!r} is new. Was it renamed? Then migrations need "
            what += f"StateMigration({self._uid!r}, {plain_name(new)!r}, renamed_from={plain!r})"
        return (
            f"{self._uid!r} does not ask for the state {name!r} in `open`, and the program that took the checkpoint "
            f"did. {what}. If it is still used, ask for it in `open`. If it may be dropped, name it: "
            f"allow_unclaimed_state=[{f'{self._uid}/{name}'!r}]"
        )

    def _differs(self, name: str, values: str) -> str:
        held, now = values or "what a function made of it", self.described(name)
        return (
            f"{self._uid!r} keeps {now or 'what a function makes of it'} as its state {name!r}, and the checkpoint "
            f"holds {held}. To go on with it, migrations need StateMigration({self._uid!r}, {name!r}, version=…, "
            "migrate=…), which makes one of the other; to begin anew, name it: "
            f"allow_unclaimed_state=[{f'{self._uid}/{name}'!r}]"
        )

    def _table(self, name: str, kind: str) -> tuple[LayeredTable, Any]:
        self.declarations.ask(name)
        return self._found(name, kind)

    def _found(self, name: str, kind: str) -> tuple[LayeredTable, Any]:
        found = self._tables.get(name)
        if found is None:
            table = self._create(name, kind)
            found = self._tables[name] = kind, table, _WRAPPERS[kind](table)
        elif found[0] != kind:
            if self.declarations.is_restored(name):
                raise IncompatibleCheckpointError(
                    f"{self._uid!r} uses the state {name!r} as a {kind}, and the checkpoint holds it as a {found[0]}; "
                    "give the new state another name, or restore without the operator's state under another uid"
                )
            raise ConfigError(
                f"the state {name!r} is used as a {kind} and as a {found[0]}; give each its own name"
            )
        return found[1], found[2]


# ---------------------------------------------------------------- lists and maps over a table


class LayeredList:
    def __init__(self, table: LayeredTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def size(self, key: Key) -> int:
        found = self._table.read(key)
        return 0 if found is NOTHING else len(found)

    def get(self, key: Key) -> list[Any]:
        found = self._table.read(key)
        if found is NOTHING:
            return []
        if not (ATOMS.issuperset(map(type, found)) or all(map(is_immutable, found))):
            self._table.lend(key)
            found = self._table.read(key)
        return list(found)

    def extend(self, key: Key, values: Iterable[Any]) -> None:
        more = list(values)
        if not more:
            return
        found = self._table.own(key)
        if found is NOTHING:
            self._table[key] = more
        else:
            found.extend(more)

    def clear(self, key: Key) -> None:
        self._table.discard(key)


class LayeredMap:
    def __init__(self, table: LayeredTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def keys(self) -> Iterable[Key]:
        return iter(self._table)

    def items(self, key: Key) -> Mapping[Any, Any]:
        """Return the items, not to be changed, and valid until the next change."""
        found: Any = self._table.read(key)
        return _NO_ITEMS if found is NOTHING else found

    def put(self, key: Key, field: Any, value: Any) -> None:
        found = self._table.own(key)
        if found is NOTHING:
            self._table[key] = {field: value}
        else:
            found[field] = value

    def remove(self, key: Key, field: Any) -> None:
        found = self._table.read(key)
        if found is NOTHING or field not in found:
            raise KeyError(field)
        if len(found) == 1:
            self._table.discard(key)
        else:
            del self._table.own(key)[field]

    def clear(self, key: Key) -> None:
        self._table.discard(key)


_WRAPPERS: dict[str, Callable[[LayeredTable], Any]] = {
    VALUE: lambda table: table,
    LIST: LayeredList,
    MAP: LayeredMap,
}
