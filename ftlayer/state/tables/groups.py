"""Key groups of many keys at a time, computed as the edges by key compute them: from the key columns, as Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.errors import StateSerializationError
from ftlayer.functions.keyed import Key
from ftlayer.functions.values import NAN
from ftlayer.partitioning.key_groups import key_groups
from ftlayer.records.keyhash import spark_hash

U16Array = npt.NDArray[np.uint16]

KEYS_AT_ONCE = 1_000
"""Keys that are converted in one call, which keeps the interpreter to itself: well below a millisecond."""


class KeyGroups:
    """The key groups of one operator's keys, of ``max_parallelism``."""

    def __init__(self, uid: str, keys: pa.Schema, max_parallelism: int) -> None:
        """``keys``: the key columns' types, in order."""
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
