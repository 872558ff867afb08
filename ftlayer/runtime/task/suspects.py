"""Which rows and timers of a chain end, or may end, the process that works on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from ftlayer.runtime.protocol.messages import Conviction


class Suspects(Protocol):
    """One subtask's. Rows are of the chain's input with the number ``input``, as they came."""

    @property
    def one_at_a_time(self) -> bool:
        """Whether rows go through the chain and its outlet one by one, each between `about_to` and `over`.

        So do timers, by `fires`.
        """

    def convicted(self, payload: pa.RecordBatch, input: int = 0) -> Sequence[tuple[int, Conviction]]:
        """Return the rows that must not come to user code again, ascending: the caller makes them dead letters.

        Asked again for the same rows, it says the same.
        """

    def about_to(self, payload: pa.RecordBatch, row: int = 0, input: int = 0) -> None:
        """This row is next to go to user code."""

    @property
    def looks_at_timers(self) -> bool:
        """Whether `fires` is to be asked of each timer."""

    def fires(self, operator: str, kind: str, key: Any, time_ms: int) -> Conviction | None:
        """This timer is next to be fired; a convicted one must not be."""

    def over(self) -> None:
        """The row, or the timer, has passed, or failed."""

    def snapshot(self, checkpoint: int) -> tuple[bytes, ...]:
        """Return the digests of rows that `convicted` has named: this checkpoint is going to hold them as dead.

        Those that are left out are in a checkpoint that is known to be complete.
        """

    def completed(self, checkpoint: int) -> None:
        """A checkpoint is complete."""


class _NoSuspects:
    """`Suspects` of a chain without a failure policy, and of a job in which nothing is suspected."""

    one_at_a_time = False

    def convicted(self, payload: pa.RecordBatch, input: int = 0) -> Sequence[tuple[int, Conviction]]:
        return ()

    def about_to(self, payload: pa.RecordBatch, row: int = 0, input: int = 0) -> None:
        """Nothing is noted."""

    looks_at_timers = False

    def fires(self, operator: str, kind: str, key: Any, time_ms: int) -> Conviction | None:
        return None

    def over(self) -> None:
        """Nothing was."""

    def snapshot(self, checkpoint: int) -> tuple[bytes, ...]:
        return ()

    def completed(self, checkpoint: int) -> None:
        """It means nothing."""


NO_SUSPECTS: Suspects = _NoSuspects()
