"""Chains of functions that fail by a script, and their model: state as plain dicts, taken whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Filter, FlatMap, Map, MapBatches, Process, Reduce
from ftlayer.state.heap import HeapBackend

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64()), ("id", pa.int64())])
SIDE = (("side", pa.schema([("id", pa.int64())])),)

Record = tuple[str, Any, int]
Script = Container[tuple[str, int, str]]
"""What goes wrong: (operator, id of the record or time of the timer, where in the operator)."""


class ScriptedError(Exception):
    """A user's function fails."""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong in one operator."""

    script: Script
    uid: str

    def at(self, record: Record, where: str) -> None:
        """Raise, if this is a place where the record fails."""
        if self.hits(record, where):
            raise ScriptedError(f"{self.uid} {where}")

    def hits(self, record: Record, where: str) -> bool:
        return (self.uid, record[2], where) in self.script


def plain(trouble: Trouble) -> Callable[[Record], Record]:
    def function(record: Record) -> Record:
        trouble.at(record, "early")
        k, v, i = record
        return k, "no number" if trouble.hits(record, "misfit") else v + 1, i

    return function


def twice(trouble: Trouble) -> Callable[[Record], Iterator[Record]]:
    def function(record: Record) -> Iterator[Record]:
        yield record
        trouble.at(record, "early")
        yield record[0], record[1] * 2, record[2]

    return function


def kept(trouble: Trouble) -> Callable[[Record], bool]:
    def function(record: Record) -> bool:
        trouble.at(record, "early")
        return record[1] % 5 != 0

    return function


def added(trouble: Trouble) -> Callable[[Record, Record], Record]:
    def function(old: Record, record: Record) -> Record:
        trouble.at(record, "early")
        return record[0], old[1] + record[1], record[2]

    return function


def gathered(trouble: Trouble) -> Callable[[list[Any], Record], list[Any]]:
    """A reduce whose aggregate is changed in place; what it gives is no copy."""

    def function(old: list[Any], record: Record) -> list[Any]:
        trouble.at(record, "early")
        old[0] = record[0]
        old[1] += 1
        trouble.at(record, "late")
        old[2] = record[2]
        return old

    return function


class Keeper(ProcessFunction):
    """Uses every handle, and fails between any two uses."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def process(self, record: Record, ctx: Any) -> Iterator[Record]:
        at = self.trouble.at
        number, seen, times = ctx.value("number", 0), ctx.value("seen"), ctx.map("times")
        items, shared, wide = ctx.list("items"), ctx.operator_list("shared"), ctx.broadcast("wide")
        try:
            at(record, "early")
            number.set(number.get() + 1)
            names = seen.get() or []
            names.append(record[2])
            at(record, "in place")
            seen.set(names)
            items.extend([record[2], [record[2]]])
            if record[2] % 4 == 0:
                items.get()[1].append("again")
            if record[2] % 7 == 0:
                items.clear()
            held = times.get(record[1] % 3)
            times[record[1] % 3] = [record[2]] if held is None else [*held, record[2]]
            if record[2] % 3 == 0 and held is not None:
                held.append("in place")
                del times[record[1] % 3]
            if record[2] % 6 == 5:
                times.clear()
            at(record, "middle")
            shared.append([record[2]])
            if record[2] % 5 == 0:
                shared[0].append("in place")
                shared.pop()
            wide[record[0]] = record[2]
            wide.setdefault("all", []).append(record[2])
            ctx.timers.event(record[1])
            ctx.timers.processing(record[2])
            ctx.timers.delete_event(record[1] - 1)
            ctx.output("side", "no id" if self.trouble.hits(record, "side") else record[2])
            yield record[0], number.get(), record[2]
            at(record, "late")
            if record[2] % 2:
                number.clear()
            yield record[0], len(names), record[2]
        finally:
            wide["left"] = wide.get("left", 0) + 1

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Record]:
        timer = (ctx.key, time_ms, time_ms)
        at = self.trouble.at
        number, seen, wide = ctx.value("number", 0), ctx.value("seen"), ctx.broadcast("wide")
        at(timer, "timer early")
        number.set(number.get() + 1)
        names = seen.get() or []
        names.append(time_ms)
        at(timer, "timer in place")
        seen.set(names)
        wide.setdefault("all", []).append(time_ms)
        if time_ms % 3 == 0:
            ctx.timers.event(time_ms + 1)
        ctx.timers.delete_event(time_ms + 2)
        ctx.output("side", "no id" if self.trouble.hits(timer, "timer side") else time_ms)
        yield ctx.key, "no number" if self.trouble.hits(timer, "timer misfit") else number.get(), time_ms
        at(timer, "timer late")
        yield ctx.key, len(names), time_ms


def batches(trouble: Trouble) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        for record in batch.to_pylist():
            trouble.at((record["k"], record["v"], record["id"]), "early")
        return batch

    return function


PLACES = {
    "map": ("early", "misfit"),
    "flat": ("early",),
    "filter": ("early",),
    "reduce": ("early",),
    "gather": ("early", "late"),
    "process": ("early", "in place", "middle", "side", "late"),
    "batches": ("early",),
}
TIMER_PLACES = ("timer early", "timer in place", "timer side", "timer misfit", "timer late")


def operators_of(kind: str, uid: str, script: Script) -> list[Any]:
    trouble = Trouble(script, uid)
    match kind:
        case "map":
            return [Map(uid, plain(trouble), SCHEMA)]
        case "flat":
            return [FlatMap(uid, twice(trouble), SCHEMA)]
        case "filter":
            return [Filter(uid, kept(trouble), SCHEMA)]
        case "reduce":
            return [Reduce(uid, added(trouble), SCHEMA, ("k",))]
        case "gather":
            gather = Reduce(uid, gathered(trouble), SCHEMA, ("k",), create=lambda: ["", 0, 0])
            return [gather, Map(f"{uid}-result", tuple, SCHEMA)]
        case "process":
            return [Process(uid, Keeper(trouble), SCHEMA, ("k",), side=SIDE)]
        case _:
            return [MapBatches(uid, batches(trouble), SCHEMA, "arrow", False)]


# ---------------------------------------------------------------- the model


class Cell:
    """A value, a list or a mapping of the current key."""

    def __init__(self, entries: dict[str, Any], key: str, default: Any) -> None:
        self.entries, self.key, self.default = entries, key, default

    def get(self, *_: Any) -> Any:
        return self.entries.get(self.key, self.default)

    def set(self, value: Any) -> None:
        self.entries[self.key] = value

    def clear(self) -> None:
        self.entries.pop(self.key, None)


class Items(Cell):
    def get(self, *_: Any) -> list[Any]:
        return list(self.entries.get(self.key, []))

    def extend(self, values: list[Any]) -> None:
        self.entries.setdefault(self.key, []).extend(values)


class Fields(Cell):
    def get(self, name: Any = None, *_: Any) -> Any:
        return self.entries.get(self.key, {}).get(name)

    def __setitem__(self, name: Any, value: Any) -> None:
        self.entries.setdefault(self.key, {})[name] = value

    def __delitem__(self, name: Any) -> None:
        del self.entries[self.key][name]
        if not self.entries[self.key]:
            del self.entries[self.key]


@dataclass
class Model:
    """All state of a chain as plain dicts, and what it has put out."""

    tables: dict[tuple[str, str], Any] = field(default_factory=dict)
    side: list[int] = field(default_factory=list)

    def table(self, uid: str, name: str, make: Callable[[], Any] = dict) -> Any:
        return self.tables.setdefault((uid, name), make())

    def run(self, kinds: list[str], script: Script, record: Record) -> list[Record] | None:
        """Return what comes of a record, None if it fails: then nothing has changed."""
        return self._whole(self._through(kinds, 0, script, record))

    def fire(self, kinds: list[str], script: Script, uid: str, timer: tuple[str, int]) -> list[Record] | None:
        """Return what comes of a timer, None if it fails: then nothing has changed."""
        key, time_ms = timer
        place = kinds.index("process")
        results = Keeper(Trouble(script, uid)).on_timer(time_ms, ModelContext(self, uid, key))
        return self._whole(
            out for result in results for out in self._through(kinds, place + 1, script, result)
        )

    def _whole(self, came: Iterator[Record]) -> list[Record] | None:
        before = copy.deepcopy((self.tables, self.side))
        try:
            results = list(came)
            if any(type(v) is not int for _, v, _ in results):
                raise ScriptedError("misfit at the end")
        except (ScriptedError, TypeError):
            self.tables, self.side = before
            return None
        return copy.deepcopy([tuple(result) for result in results])

    def _through(self, kinds: list[str], place: int, script: Script, record: Record) -> Iterator[Record]:
        if place == len(kinds):
            yield copy.deepcopy(record)
            return
        kind, uid = kinds[place], f"{kinds[place]}{place}"
        trouble = Trouble(script, uid)
        results: Any
        match kind:
            case "map":
                results = [plain(trouble)(record)]
            case "flat":
                results = twice(trouble)(record)
            case "filter":
                results = [record] if kept(trouble)(record) else []
            case "batches":
                if type(record[1]) is not int:
                    raise ScriptedError("misfit before a batch")
                batches(trouble)(
                    pa.RecordBatch.from_pylist([dict(zip(["k", "v", "id"], record, strict=True))], SCHEMA)
                )
                results = [record]
            case "reduce" | "gather":
                table = self.table(uid, "aggregate")
                if kind == "gather":
                    table[record[0]] = gathered(trouble)(table.get(record[0], ["", 0, 0]), record)
                elif record[0] in table:
                    table[record[0]] = added(trouble)(table[record[0]], record)
                else:
                    table[record[0]] = record
                results = [tuple(table[record[0]])]
            case _:
                results = Keeper(trouble).process(record, ModelContext(self, uid, record[0]))
        for result in results:
            yield from self._through(kinds, place + 1, script, result)


class ModelContext:
    def __init__(self, model: Model, uid: str, key: str) -> None:
        self.model, self.uid, self.key, self.timers = model, uid, key, self

    def value(self, name: str, default: Any = None) -> Cell:
        return Cell(self.model.table(self.uid, name), self.key, default)

    def list(self, name: str) -> Items:
        return Items(self.model.table(self.uid, name), self.key, None)

    def map(self, name: str) -> Fields:
        return Fields(self.model.table(self.uid, name), self.key, None)

    def operator_list(self, name: str) -> Any:
        return self.model.table(self.uid, name, list)

    def broadcast(self, name: str) -> Any:
        return self.model.table(self.uid, name)

    def output(self, tag: str, value: Any) -> None:
        if type(value) is not int:
            raise ScriptedError("misfit")
        self.model.side.append(value)

    def event(self, time_ms: int) -> None:
        self.model.table(self.uid, "event", set).add((self.key, time_ms))

    def processing(self, time_ms: int) -> None:
        self.model.table(self.uid, "processing", set).add((self.key, time_ms))

    def delete_event(self, time_ms: int) -> None:
        self.model.table(self.uid, "event", set).discard((self.key, time_ms))


def rows_of(records: list[Record]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [dict(zip(("k", "v", "id"), record, strict=True)) for record in records], SCHEMA
    )


def tuples(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in batch.to_pylist()]


def state_of(backend: HeapBackend, uid: str, name: str, expected: Any) -> Any:
    """Return what the backend has of a table of the model."""
    state = backend.state(uid)
    match name:
        case "shared":
            return list(backend.operators(uid).list(name))
        case "wide":
            return dict(backend.operators(uid).broadcast(name))
        case "items":
            return {key: state.lists(name).get(key) for key in KEYS if state.lists(name).size(key)}
        case "times":
            return {key: dict(state.maps(name).items(key)) for key in KEYS if state.maps(name).items(key)}
        case "event" | "processing":
            timers = backend.timers(uid)
            due = timers.event.take if name == "event" else timers.processing.take
            return {(key, found[0]) for found in iter(lambda: due(10**9), None) for key in found[1]}
        case _:
            return dict(state.values(name))


KEYS = "abc"
