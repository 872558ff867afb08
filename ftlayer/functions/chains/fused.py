"""Per-record functions fused into one loop, written out as nested Python and compiled when a task starts.

For ``map(f0).flat_map(f1).filter(f2).map(f3)`` the loop is::

    for r0 in records:
        before = len(out)
        at = 0
        try:
            r1 = f0(r0)
            at = 1
            for r2 in results(f1(r1)):
                at = 2
                if f2(r2):
                    at = 3
                    r4 = f3(r2)
                    out.append(r4)
                at = 1
        ...
        counts.append(len(out) - before)

so a record passes through all functions while it is in the processor's cache, nothing is built in
between, and ``at`` tells which function raised. For ``reduce(f0)`` the body is::

    k0 = r0[1]
    try:
        old0 = t0[k0]
    except KeyError:
        r1 = r0
    except TypeError:
        raise unhashable(u0, k0) from None
    else:
        r1 = f0(old0, r0)
    ...
    t0[k0] = r1

where the dots are all that follows: if one of the functions behind it raises, the aggregate is what it was. (Unless
there is a flat_map before the reduce, whose earlier results have gone through; and what is found out later, that
a result does not fit its schema, say, leaves it changed. With an undo log ``look0(k0)`` stands for ``t0[k0]``, which
logs the aggregate too: all of that is taken back.)
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import check_ran
from ftlayer.errors import InvalidTopologyError, StateSerializationError, UnhashableKeyError
from ftlayer.functions.conversion import Form
from ftlayer.functions.handles import Own
from ftlayer.functions.keyed import ATOMS, NAN, Key, KeyedState
from ftlayer.functions.process import Context, results_of
from ftlayer.functions.steps import Filter, FlatMap, Map, Step
from ftlayer.functions.undo import UndoLog, UndoValues, logged_lookup


@dataclass(frozen=True)
class KeyColumn:
    """Where a part of the key lies in a record of the form VALUES: in a column, or in a field of a struct."""

    position: int
    fields: tuple[str, ...]
    is_float: bool

    @classmethod
    def of(cls, uid: str, name: str, schema: pa.Schema) -> KeyColumn:
        """Find a column by its whole name, else by the path that the name spells; InvalidTopologyError."""
        column, *fields = [name] if name in schema.names else name.split(".")
        kind: Any = schema.field(column).type if column in schema.names else None
        for field in fields:
            found = kind is not None and pa.types.is_struct(kind) and kind.get_field_index(field) >= 0
            kind = kind.field(field).type if found else None
        if kind is None:
            raise InvalidTopologyError(
                f"{uid!r} has the key {name!r}, which its input lacks ({', '.join(schema.names)})"
            )
        return cls(schema.names.index(column), tuple(fields), pa.types.is_floating(kind))

    def source(self, record: str, width: int) -> str:
        """Return the Python expression of it; the field of a struct that is null is null."""
        value = record if width == 1 else f"{record}[{self.position}]"
        for field in self.fields:
            value = f"(None if (part := {value}) is None else part[{field!r}])"
        return f"(NAN if (part := {value}) != part else part)" if self.is_float else value


@dataclass(frozen=True)
class KeyColumns:
    """Where the key lies in a record of ``width`` columns."""

    columns: tuple[KeyColumn, ...]
    width: int

    @classmethod
    def of(cls, uid: str, keys: Sequence[str], schema: pa.Schema) -> KeyColumns:
        return cls(tuple(KeyColumn.of(uid, name, schema) for name in keys), len(schema))

    def source(self, record: str) -> str:
        """Return the Python expression of the key of ``record``; it speaks of `NAN` by that name."""
        parts = [column.source(record, self.width) for column in self.columns]
        return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


@dataclass(frozen=True)
class Reducing(Step):
    """A `Reduce` and its table, which is one of ``state``; without a state, the segment alone may change the table.

    ``own`` copies what is put into the table, and that the function may keep; None: nothing is copied.
    """

    key: KeyColumns
    table: MutableMapping[Key, Any]
    create: Callable[[], Any] | None = None
    state: KeyedState | None = None
    own: Own = None


@dataclass(frozen=True)
class Processing(Step):
    """One input of a `Process` or `CoProcess`, and its context. ``key`` is None without keys."""

    key: KeyColumns | None
    context: Context
    side: tuple[tuple[str, pa.Schema], ...]


PreparedStep = Map | FlatMap | Filter | Reducing | Processing


def unhashable(uid: str, key: Any) -> UnhashableKeyError:
    kind = type(key).__name__
    return UnhashableKeyError(
        f"{uid!r} cannot use a {kind} as a key ({key!r:.100}): Python cannot hash it; "
        "key by a number, a string or a binary"
    )


Fused = Callable[
    [
        Sequence[Any],
        list[Any],
        list[int],
        Callable[[int, int, BaseException, int], None],
        Sequence[int] | None,
    ],
    None,
]
"""``loop(records, out, counts, fail, times)``: appends the results to ``out`` and how many each record has to
``counts``; a record whose functions raise has none, and ``fail(place, step, error, mark)`` is called for it. A record's
place is the length of ``counts`` when its turn comes, its mark what the length of the undo log was (0 without one).
``times``, by place, is for `Context.timestamp`."""

MAX_FUSED = 14
"""Functions in one loop: Python compiles at most 20 nested blocks; a flat_map is one, and a reduce takes two more."""


def is_one_to_one(steps: Sequence[PreparedStep]) -> bool:
    return not any(isinstance(step, Filter | FlatMap | Processing) for step in steps)


def fuse(
    steps: Sequence[PreparedStep], form: Form, *, checked: bool = False, log: UndoLog | None = None
) -> Fused:
    """Return the loop over ``steps``.

    With ``checked``, an `Exception` in the place of a record fails it as if the first function had raised it. With
    ``log`` the changes of a record that fails can be taken back before the next one's turn, by ``fail``, and a
    `StateSerializationError` goes through.
    """
    body = _Body(steps)
    single = is_one_to_one(steps)
    mark = "mark" if log is not None and body.is_stateful else "0"
    lines = [
        "def loop(records, out, counts, fail, times):",
        "    for r0 in records:",
        *([] if single else ["        before = len(out)"]),
        *(["        place = len(counts)"] if body.needs_place else []),
        *(["        mark = len(entries)"] if mark == "mark" else []),
        "        at = 0",
        "        try:",
        *(["            if isinstance(r0, Exception):", "                raise r0"] if checked else []),
        *body.lines,
        *([] if log is None else ["        except StateSerializationError:", "            raise"]),
        "        except BaseException as error:",
        *([] if single else ["            del out[before:]"]),
        # A generator is closed now: what it does on its way out belongs to this record.
        *(["            x = None"] if log is not None else []),
        f"            fail(len(counts), at, error, {mark})",
        *(["            counts.append(0)", "            continue"] if single else []),
        f"        counts.append({'1' if single else 'len(out) - before'})",
    ]
    names = {
        **body.names,
        "NAN": NAN,
        "StateSerializationError": StateSerializationError,
        "has_run": has_run,
        "entries": None if log is None else log.entries,
        "results": form.results,
        "results_of": results_of,
        "unhashable": unhashable,
    }
    exec(compile("\n".join(lines), __file__, "exec"), names)
    loop: Fused = names["loop"]
    return loop


def has_run(answer: object) -> bool:
    """Return True; TypeError for what a filter's function returns that has not run."""
    check_ran(answer, "the function")
    return True


class _Body:
    def __init__(self, steps: Sequence[PreparedStep]) -> None:
        self.names: dict[str, Any] = {}
        self.needs_place = False
        self.is_stateful = any(isinstance(step, Processing) for step in steps)
        self._before: list[str] = []
        self._after: list[str] = []
        self._indent = " " * 12
        self._record = "r0"
        self._steps = steps
        for number, step in enumerate(steps):
            self.names[f"f{number}"] = step.function
            if number:
                self._add(f"at = {number}")
            self._step(number, step)
        last = f"{self._indent}out.append({self._record})"
        # Last of all where nothing is nested: then there is nothing to take back if something raises.
        single = is_one_to_one(steps)
        after = self._after[::-1]
        self.lines = [*self._before, *after, last] if single else [*self._before, last, *after]

    def _step(self, number: int, step: PreparedStep) -> None:
        result = f"r{number + 1}"
        match step:
            case Filter():
                # Of what is true without being True, some was returned by an async function.
                self._add(f"if (x := f{number}({self._record})) is True or (x and has_run(x)):")
                self._indent += "    "
                return
            case FlatMap():
                self._loop_over(number, f"f{number}({self._record})", "results")
            case Reducing():
                self._reduce(number, step, result)
            case Processing():
                self._process(number, step)
            case _:
                self._add(f"{result} = f{number}({self._record})")
        self._record = result

    def _loop_over(self, number: int, call: str, results: str) -> None:
        self._add(f"for r{number + 1} in x if type(x := {call}) is list else {results}(x):")
        self._indent += "    "
        # What is still to come of an iterator is this step's to answer for.
        self._after.append(f"{self._indent}at = {number}")

    def _reduce(self, number: int, step: Reducing, result: str) -> None:
        self.names |= {f"u{number}": step.uid, f"n{number}": step.create}
        if isinstance(step.table, UndoValues):
            self.is_stateful = True
            self.names |= {f"t{number}": step.table.table, f"look{number}": logged_lookup(step.table)}
            found = f"look{number}(k{number})"
        else:
            self.names[f"t{number}"] = step.table
            found = f"t{number}[k{number}]"
        old, added = f"old{number}", f"{result} = f{number}(old{number}, {self._record})"
        begun = step.create is not None
        self._add(
            f"k{number} = {step.key.source(self._record)}",
            "try:",
            f"    {old} = {found}",
            "except KeyError:",
            f"    {old} = n{number}()" if begun else f"    {result} = {self._record}",
            "except TypeError:",
            f"    raise unhashable(u{number}, k{number}) from None",
            *([] if begun else ["else:"]),
            f"{'' if begun else '    '}{added}",
        )
        kept = result
        if step.own is not None:
            self.names |= {f"own{number}": step.own, "ATOMS": ATOMS}
            kept = f"kept{number}"
            self._add(f"{kept} = {result} if type({result}) in ATOMS else own{number}({result})")
        self._after.append(f"{self._indent}t{number}[k{number}] = {kept}")

    def _process(self, number: int, step: Processing) -> None:
        self.needs_place = True
        self.names |= {f"c{number}": step.context, f"u{number}": step.uid}
        if step.key is not None:
            self._add(
                f"k{number} = {step.key.source(self._record)}",
                "try:",
                f"    hash(k{number})",
                "except TypeError:",
                f"    raise unhashable(u{number}, k{number}) from None",
                f"c{number}.key = k{number}",
            )
        self._add(f"c{number}.timestamp = times[place]")
        if step.side:
            self._add(f"c{number}._place = place")
        self._loop_over(number, f"f{number}({self._record}, c{number})", "results_of")

    def _add(self, *lines: str) -> None:
        self._before += [self._indent + line for line in lines]
