"""What the loop is busy with, for other threads to see."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.handler.lineage import Lineage
from ftlayer.records.ids import U64Array
from ftlayer.runtime.task.contract import Task


@dataclass(frozen=True, slots=True)
class Working:
    """What the loop is busy with: a chain, its task, the roots of its batch, and since when (monotone, ms).

    ``lineage`` says which of the batch's rows has which roots; None where there is no batch.
    """

    uid: str
    task: Task
    roots: tuple[U64Array, ...]
    since_ms: int
    lineage: Lineage | None = None
