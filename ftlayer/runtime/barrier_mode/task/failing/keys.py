"""The keys that records have at the head of a chain."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.chains.prepared import KeyColumns
from ftlayer.functions.conversion import VALUES, records_in_form
from ftlayer.functions.keyed import Key
from ftlayer.functions.values import NAN
from ftlayer.partitioning.key_groups import key_groups
from ftlayer.records.keyhash import spark_hash
from ftlayer.topology.facts import keys_of
from ftlayer.topology.operators import Operator


class _NoKey:
    """Hashable, as keys are."""


NO_KEY: Key = _NoKey()
"""In the place of a key that a record should have, and cannot be read."""

DRAWN_KEY = pa.schema([("number", pa.int64())])
"""The type of the keys of records in a chain whose head has no key."""


DRAWN_AT_ONCE = 64


class DrawnKeys:
    """Numbers in the place of keys, whose key groups are the subtask's own: state of other groups is not restored."""

    def __init__(self, groups: range, max_parallelism: int) -> None:
        """``groups`` are the subtask's, of ``max_parallelism``."""
        self._groups = groups
        self._max_parallelism = max_parallelism
        self._drawn: list[int] = []

    def draw(self) -> int:
        while not self._drawn:
            numbers = np.frombuffer(secrets.token_bytes(8 * DRAWN_AT_ONCE), np.int64)
            found = key_groups(spark_hash([pa.array(numbers)]), self._max_parallelism)
            mine = (found >= self._groups.start) & (found < self._groups.stop)
            self._drawn = numbers[mine].tolist()
        return self._drawn.pop()


class HeadKeys:
    """See the module.

    Attributes:
        inputs: the schemas of what the chain takes.
        are_columns: records have keys of their own; False: a number is drawn for each.
    """

    def __init__(self, head: Operator | None, inputs: Sequence[pa.Schema], drawn: DrawnKeys) -> None:
        """``head`` is the first operator of the chain that is a function, if there is one."""
        self._drawn = drawn
        self.inputs = tuple(inputs)
        columns = [()] * len(inputs) if head is None else keys_of(head)
        self._keys = [
            _reader(KeyColumns.of("", names, schema)) if names else None
            for names, schema in zip(columns, inputs, strict=True)
        ]
        self.are_columns = any(key is not None for key in self._keys)

    def of(self, rows: pa.RecordBatch, input: int) -> list[Key]:
        """Return the keys of rows that came by an input; `NO_KEY` for one that cannot be read, or hashed."""
        read = self._keys[input]
        if read is None:
            return [self.drawn() for _ in range(rows.num_rows)]
        return [_key_of(record, read) for record in records_in_form(rows, VALUES)]

    def drawn(self) -> int:
        """Return a number for a record without a key."""
        return self._drawn.draw()


def _key_of(record: Any, read: Callable[[Any], Any]) -> Key:
    if isinstance(record, Exception):
        return NO_KEY
    key: Key = read(record)
    return key if _is_hashable(key) else NO_KEY


def _is_hashable(key: Any) -> bool:
    if not isinstance(key, Hashable):
        return False
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _reader(columns: KeyColumns) -> Callable[[Any], Any]:
    """Return a function of a record in the form VALUES."""
    read: Callable[[Any], Any] = eval(f"lambda record: {columns.source('record')}", {"NAN": NAN})
    return read
