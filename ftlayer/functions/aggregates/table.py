"""The running aggregates of many keys, in the C extension's memory, and from there in a table of keyed state.

Keyed state is a table of Python objects, which snapshots read. The aggregates are looked up in it once for a key, and
written back before a snapshot reads it, and when many have changed: so they cost Python objects for a key that has
changed since, not for a record.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.functions.aggregates.per_record import AggregatePlan, given_as, held_as
from ftlayer.functions.conversion import VALUES, array_of
from ftlayer.functions.keyed import NAN, Key
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.records.kernels import native


@dataclass(frozen=True)
class KeyedAggregate:
    """Built-in aggregates a key: emits for every record its key, and what they are then. ``schema`` is the plan's."""

    uid: str
    plan: AggregatePlan
    keys: tuple[str, ...]
    schema: pa.Schema
    volatile_state: bool = False
    rules: RetryRules = NO_RULES


I32 = npt.NDArray[np.int32]

MOST_CHANGED = 20_000
"""Keys that have changed before they are written back without a snapshot, which would have to wait for it."""

MOST_BYTES = 64 << 20
"""What is kept beside the table; beyond it all of it is written back, and looked up again."""

_SEED = secrets.randbits(64)
_ABSENT = object()

Kept = tuple[native.Accumulators, bytes]
"""What the changes of one batch have replaced."""


class KeyNumbers:
    """The keys of one operator by their numbers (slots), which are given in the order in which keys come."""

    def __init__(self) -> None:
        self._index = native.KeyIndex(_SEED)
        # By slot, one behind the other; each is larger than the next, so that there are few of them.
        self._chunks: list[pa.RecordBatch] = []

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        chunks = sum(int(chunk.nbytes) for chunk in self._chunks)
        return self._index.nbytes + chunks

    def find(self, keys: pa.RecordBatch) -> tuple[I32, list[Key]]:
        """Return the slot of each row's key, int32[n], and the keys that are new: they have the last slots."""
        known = len(self._index)
        slots = np.empty(keys.num_rows, np.int32)
        schema, array = keys.__arrow_c_array__()
        if self._index.find(schema, array, slots) == known:
            return slots, []
        rows = np.flatnonzero(slots >= known)
        _, first = np.unique(slots[rows], return_index=True)
        new = keys.take(pa.array(rows[first]))
        self._append(new)
        return slots, python_keys(new)

    def _append(self, new: pa.RecordBatch) -> None:
        chunks = self._chunks
        chunks.append(new)
        while len(chunks) > 1 and chunks[-2].num_rows <= 2 * chunks[-1].num_rows:
            chunks[-2:] = [pa.concat_batches(chunks[-2:])]

    def of(self, slots: I32) -> list[Key]:
        """Return the keys of slots, which ascend, as state is looked up by them."""
        first = 0
        found: list[Key] = []
        for chunk in self._chunks:
            begin, end = np.searchsorted(slots, [first, first + chunk.num_rows])
            if begin < end:
                found += python_keys(chunk.take(pa.array(slots[begin:end] - first)))
            first += chunk.num_rows
        return found


def python_keys(keys: pa.RecordBatch) -> list[Key]:
    """Return keys as state is looked up by them: bare values, or tuples of several columns; one not-a-number."""
    found = list(VALUES.read(keys))
    if not any(pa.types.is_floating(field.type) for field in keys.schema):
        return found
    if keys.num_columns == 1:
        return [NAN if key != key else key for key in found]
    return [tuple(NAN if part != part else part for part in key) for key in found]


class AggregateValues:
    """Accumulators of the C extension, and their values as Python has them.

    Attributes:
        accumulators: by slot.
    """

    def __init__(self, plan: AggregatePlan) -> None:
        self._plan = plan
        codes, kinds = (
            b"".join(part) for part in zip(*[(a.code, a.kind) for a in plan.aggregates], strict=True)
        )
        self.accumulators = native.Accumulators(codes, kinds, bytes(a.digits for a in plan.aggregates))

    def add(
        self, slots: I32, batch: pa.RecordBatch, *, results: bool, undo: bool
    ) -> tuple[list[pa.Array], list[tuple[int, int]], Kept | None]:
        """Add rows, the slot of each row's key given.

        Returns:
            A column for each aggregate, with what it is behind each row (if ``results``); pairs of a row, and the
            aggregate that cannot take it (such a row changes nothing); and for `restore` what was (if ``undo``).
        """
        taken = self._plan.taken(batch)
        schema, array = taken.__arrow_c_array__()
        columns, failures, kept = self.accumulators.add(slots, schema, array, results, undo)
        found = [
            given_as(array_of(each.held, len(slots), column), each.result)
            for each, column in zip(self._plan.aggregates, columns or (), strict=bool(columns))
        ]
        return found, failures, None if kept is None else (self.accumulators, kept)

    def load(self, slots: I32, values: list[Any]) -> None:
        plan = self._plan
        parts = [values] if len(plan.state) == 1 else zip(*values, strict=True)
        columns = [
            held_as(pa.array(part, given.type), held.type)
            for part, given, held in zip(parts, plan.state, plan.state_held, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=plan.state_held)
        schema, array = batch.__arrow_c_array__()
        self.accumulators.load(slots, schema, array)

    def state_of(self, slots: I32) -> list[Any]:
        plan = self._plan
        columns = [
            given_as(array_of(held.type, len(slots), column), given.type)
            for held, given, column in zip(
                plan.state_held, plan.state, self.accumulators.export(slots), strict=True
            )
        ]
        return list(VALUES.read(pa.RecordBatch.from_arrays(columns, schema=plan.state)))

    def take_changed(self) -> I32:
        """Return the slots that have changed since the last time, ascending."""
        return np.sort(np.frombuffer(self.accumulators.take_dirty(), np.int32))


class AggregateState(Protocol):
    def get(self, key: Key, default: Any, /) -> Any:
        """Return a key's aggregates, or the default."""

    def update(self, pairs: Iterable[tuple[Key, Any]], /) -> None:
        """Set the aggregates of keys."""


class AggregateTable:
    """The running aggregates of an operator's keys: `ftlayer.functions.keyed.StateCache`.

    Attributes:
        plan: which these are.
    """

    def __init__(self, plan: AggregatePlan, table: AggregateState) -> None:
        """``table`` is the keyed state; values are written into it by `write_back`."""
        self.plan = plan
        self._table = table
        self._begin()

    def _begin(self) -> None:
        self._keys = KeyNumbers()
        self._values = AggregateValues(self.plan)

    def add(
        self, batch: pa.RecordBatch, *, undo: bool
    ) -> tuple[list[pa.Array], list[tuple[int, int]], Kept | None]:
        slots, _ = self.number(self.plan.key_columns(batch))
        return self._values.add(slots, batch, results=True, undo=undo)

    def number(self, columns: list[pa.Array]) -> tuple[I32, npt.NDArray[np.bool_]]:
        """Return the slot of each row's key, int32[n], and of the keys that are new whether the state had them.

        New keys have the last slots, in the order in which they come.
        """
        keys = pa.RecordBatch.from_arrays(columns, names=[str(place) for place in range(len(columns))])
        slots, new = self._keys.find(keys)
        self._values.accumulators.reserve(len(self._keys))
        return slots, self._look_up(new)

    def _look_up(self, new: list[Key]) -> npt.NDArray[np.bool_]:
        get = self._table.get
        found = [get(key, _ABSENT) for key in new]
        there = np.array([value is not _ABSENT for value in found], np.bool_)
        if there.any():
            slots = np.arange(len(self._keys) - len(new), len(self._keys), dtype=np.int32)
            self._values.load(slots[there], [value for value in found if value is not _ABSENT])
        return there

    def compact(self) -> None:
        """Give memory of texts back that were replaced. Not while a batch may be taken back."""
        self._values.accumulators.compact()

    def restore(self, kept: Kept, _: object) -> None:
        """Take the changes of a batch back, the latest first."""
        accumulators, before = kept
        assert accumulators is self._values.accumulators, "a batch is in its undo log and was written back"
        accumulators.restore(before)

    def write_back(self) -> None:
        changed = self._values.take_changed()
        if len(changed):
            self._table.update(zip(self._keys.of(changed), self._values.state_of(changed), strict=True))

    def tend(self) -> None:
        """Write back what is many, and give up what is large. Not while a batch may be taken back."""
        accumulators = self._values.accumulators
        if accumulators.dirty > MOST_CHANGED:
            self.write_back()
        if accumulators.nbytes + self._keys.nbytes > MOST_BYTES:
            self.write_back()
            self._begin()
