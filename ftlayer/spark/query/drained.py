"""When a query is drained: all that its source had when it was asked for is through, and no record waits.

The vertex alone cannot say it: of rows that Spark has not read, or has in a batch without a verdict, it knows nothing.
Rules only; Spark and the vertex are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.vertex.calls import QueryStatus


@dataclass(frozen=True, slots=True)
class LogEnds:
    """The ends of the two logs in Spark's checkpoint: the last batch planned, the last one committed (-1: none)."""

    planned: int
    committed: int


class Drain:
    """The progress of a drain since it was asked for, or waited for."""

    def __init__(self) -> None:
        self._last: int | None = None

    @property
    def source_read(self) -> bool:
        """Whether Spark has come to the end of the source since."""
        return self._last is not None

    def source_ended(self, log: LogEnds) -> None:
        """Spark has asked the source for more, and it had none: all that it had is in the batches planned by now.

        Spark says so by a run that ends by itself, or by `processAllAvailable` of one that goes on.
        """
        if self._last is None:
            self._last = log.planned

    def reached(self, log: LogEnds, records: QueryStatus) -> bool:
        """Whether those batches are committed, and no record of the query waits, is in delivery or pending.

        Rows that the source has got since do not count.
        """
        return self._last is not None and log.committed >= self._last and records.drained
