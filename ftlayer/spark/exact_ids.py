"""The single ids behind folded values, for a vertex that keeps every id (``tracker="exact"``)."""

from __future__ import annotations

import numpy as np

from ftlayer.layer.calls import EventIds
from ftlayer.spark.pages import U64


def event_ids(
    parents: U64, own: U64 | None, emitted_parents: U64, emitted_ids: U64, operator: str
) -> EventIds:
    """List the ids that each of ``parents`` (distinct) stands for in one event.

    ``own``, if given, are ids that the event itself acknowledges, one a parent; ``emitted_ids`` those of the
    rows handed on under ``emitted_parents``, which ``operator`` owes.
    """
    order = np.argsort(emitted_parents, kind="stable")
    ids = emitted_ids[order]
    starts = np.searchsorted(emitted_parents[order], parents, side="left")
    stops = np.searchsorted(emitted_parents[order], parents, side="right")
    lists = [ids[start:stop] for start, stop in zip(starts, stops, strict=True)]
    owners = [np.zeros(len(part), np.int32) for part in lists]
    if own is not None:
        lists = [np.concatenate([own[place : place + 1], part]) for place, part in enumerate(lists)]
        owners = [np.concatenate([np.array([-1], np.int32), part]) for part in owners]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in lists])]).astype(np.int32)
    return EventIds(
        np.concatenate([np.zeros(0, np.uint64), *lists]),
        offsets,
        np.concatenate([np.zeros(0, np.int32), *owners]),
        (operator,) if operator else (),
    )
