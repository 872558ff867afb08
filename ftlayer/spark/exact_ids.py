"""The single ids behind folded values, for a vertex that keeps every id (``tracker="exact"``)."""

from __future__ import annotations

from ftlayer.handler.exact_ids import IdBook
from ftlayer.layer.calls import EventIds
from ftlayer.spark.pages import U64


def event_ids(
    parents: U64, emitted_parents: U64, emitted_ids: U64, operator: str, *, own: bool = False
) -> EventIds:
    """List the ids that each of ``parents`` (distinct) stands for in one event.

    ``emitted_ids`` are those of the rows handed on under ``emitted_parents``, which ``operator`` owes; with
    ``own`` the event acknowledges the parents themselves, too.
    """
    book = IdBook()
    if len(emitted_ids):
        book.note(emitted_parents, emitted_ids, operator)
    return book.take(parents, own=own)
