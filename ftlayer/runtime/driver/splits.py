"""Who reads which split of a reader source: the rules. No I/O, no threads, no clock.

A source is read range by range. The splits of the open range are spread over the subtasks, split i to subtask
i modulo parallelism, so that what comes from one partition of the broker stays in order. The next range is
opened when all splits are done. A subtask that is lost is assigned its splits again when it is back, from where
the vertex has accepted them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.runtime.connectors.positions import RangeProgress
from ftlayer.runtime.protocol.messages import AssignSplits, Split, SplitDone


@dataclass(frozen=True)
class PlannedRange:
    """A range with its splits. ``payloads`` are sealed, ``digest`` is that of the partition objects."""

    number: int
    start: str
    end: str
    digest: bytes
    payloads: tuple[bytes, ...]


class SplitPlanner:
    """The open range of one source, and the subtasks that are up."""

    def __init__(self, source: str, parallelism: int) -> None:
        self._source = source
        self._parallelism = parallelism
        self._up: set[int] = set()
        self._range: PlannedRange | None = None
        self._done: set[int] = set()
        self._ended = False

    @property
    def reading(self) -> bool:
        """Whether a range is open and not all of its splits are done."""
        return self._range is not None and len(self._done) < len(self._range.payloads)

    @property
    def range(self) -> PlannedRange | None:
        """The range that was opened last; None for none yet."""
        return self._range

    @property
    def ended(self) -> bool:
        """Whether there are no more ranges."""
        return self._ended

    def is_up(self, split: int) -> bool:
        """Whether the subtask runs that reads the splits of this number."""
        return split % self._parallelism in self._up

    def restart(self) -> None:
        """Forget the ranges and their end. The subtasks stay as they are: down, if they start again."""
        self._range = None
        self._done = set()
        self._ended = False

    def open(self, planned: PlannedRange, progress: RangeProgress | None) -> list[AssignSplits]:
        """Open a range, the one before being complete; ``progress`` is what the vertex knows of it."""
        assert not self.reading, f"range {self._range} of {self._source!r} is still read"
        self._range = planned
        self._done = set()
        return self._assign(self._up, progress)

    def slot_up(self, subtask: int, progress: RangeProgress | None) -> list[AssignSplits]:
        """A new instance runs this subtask: it knows of no splits yet."""
        self._up.add(subtask)
        if self._ended:
            return [self._end_of(subtask)]
        return self._assign({subtask}, progress)

    def slot_down(self, subtask: int) -> None:
        """The subtask is lost: its splits wait for the next instance."""
        self._up.discard(subtask)

    def split_done(self, message: SplitDone) -> None:
        """A split is accepted to its end. Messages of other ranges are of no interest."""
        planned = self._range
        if planned is not None and message.range == planned.number and message.split < len(planned.payloads):
            self._done.add(message.split)

    def end(self) -> list[AssignSplits]:
        """There are no more ranges: tell all subtasks, and those that come."""
        assert not self.reading, f"range {self._range} of {self._source!r} is still read"
        self._ended = True
        return [self._end_of(subtask) for subtask in sorted(self._up)]

    def _assign(self, subtasks: set[int], progress: RangeProgress | None) -> list[AssignSplits]:
        planned = self._range
        if planned is None:
            return []
        rows: dict[int, int] = {}
        if progress is not None and progress.number == planned.number:
            rows = dict(enumerate(progress.rows))
            # Accepted to the end by an instance that did not live to say so.
            self._done |= {split for split, done in enumerate(progress.done) if done}
        messages = []
        for subtask in sorted(subtasks):
            mine = tuple(
                Split(split, payload, rows.get(split, 0))
                for split, payload in enumerate(planned.payloads)
                if split % self._parallelism == subtask and split not in self._done
            )
            if mine:
                messages.append(
                    AssignSplits(
                        self._source,
                        subtask,
                        planned.number,
                        planned.start,
                        planned.end,
                        planned.digest,
                        len(planned.payloads),
                        mine,
                    )
                )
        return messages

    def _end_of(self, subtask: int) -> AssignSplits:
        number, end = (self._range.number, self._range.end) if self._range is not None else (0, "null")
        return AssignSplits(self._source, subtask, number, end, end, b"", 0, ())
