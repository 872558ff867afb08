"""Lists of ids: checked against the values they explain, and as they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftlayer.errors import MalformedRequestError
from ftlayer.vertex.calls import U64, EventIds


def check_event_ids(ids: EventIds | None, values: U64, where: str) -> None:
    """Raise `MalformedRequestError` naming the field unless ``ids`` are what ``values`` were folded from."""
    if ids is None:
        return
    count = len(ids.ids)
    if ids.ids.dtype != np.uint64 or ids.ids.ndim != 1:
        raise MalformedRequestError(f"{where}.ids: expected a one-dimensional uint64 array")
    for name, array in (("offsets", ids.offsets), ("owners", ids.owners)):
        if array.dtype != np.int32 or array.ndim != 1:
            raise MalformedRequestError(f"{where}.{name}: expected a one-dimensional int32 array")
    if not ids.ids.all():
        raise MalformedRequestError(f"{where}.ids[{int(np.flatnonzero(ids.ids == 0)[0])}]: 0 is never an id")
    if len(ids.owners) != count:
        raise MalformedRequestError(
            f"{where}.owners: expected {count} items, one for each id, got {len(ids.owners)}"
        )
    if count and not -1 <= int(ids.owners.min()) <= int(ids.owners.max()) < len(ids.operators):
        raise MalformedRequestError(
            f"{where}.owners: expected -1 or positions in {where}.operators, which has {len(ids.operators)}"
        )
    offsets = ids.offsets
    if (
        len(offsets) != len(values) + 1
        or offsets[0] != 0
        or offsets[-1] != count
        or (offsets[1:] < offsets[:-1]).any()
    ):
        raise MalformedRequestError(
            f"{where}.offsets: expected {len(values) + 1} numbers rising from 0 to {count}, the number of ids"
        )
    wrong = np.flatnonzero(_folded(ids) != values)
    if len(wrong):
        raise MalformedRequestError(
            f"{where}: the XOR of list {int(wrong[0])} is not values[{int(wrong[0])}]; send the lists that "
            "the values were folded from"
        )


def plain_event_ids(ids: EventIds | None) -> list[Any] | None:
    if ids is None:
        return None
    return [ids.ids.tobytes(), ids.offsets.tobytes(), ids.owners.tobytes(), list(ids.operators)]


def stored_event_ids(plain: list[Any] | None) -> EventIds | None:
    """Return what `plain_event_ids` was given; arrays are read-only."""
    if plain is None:
        return None
    ids, offsets, owners, operators = plain
    return EventIds(
        np.frombuffer(ids, np.uint64),
        np.frombuffer(offsets, np.int32),
        np.frombuffer(owners, np.int32),
        tuple(operators),
    )


def _folded(ids: EventIds) -> U64:
    running = np.concatenate([np.zeros(1, np.uint64), np.bitwise_xor.accumulate(ids.ids)])
    folded: U64 = running[ids.offsets[1:]] ^ running[ids.offsets[:-1]]
    return folded
