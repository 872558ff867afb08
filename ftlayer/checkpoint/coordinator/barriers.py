"""The barriers of one execution: what each checkpoint asks of the tasks, under an id that was never used."""

from __future__ import annotations

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig, CheckpointingMode


class BarrierFactory:
    """Makes them."""

    def __init__(self, config: CheckpointConfig, highest: int) -> None:
        self._config = config
        self._last = highest

    def checkpoint(self, wall_ms: int, *, final: bool, full: bool) -> Barrier:
        """Return the next checkpoint's.

        The final one lets every record that is before it come to its end, so it is never unaligned: nothing would
        work off what it has overtaken.
        """
        self._last += 1
        alignment, timeout_ms = self._alignment(final)
        return Barrier(self._last, wall_ms, alignment, timeout_ms, final=final, full=full)

    def savepoint(self, wall_ms: int, location: str, *, final: bool) -> Barrier:
        """Return the next savepoint's."""
        self._last += 1
        return Barrier(
            self._last,
            wall_ms,
            Alignment.ALIGNED,
            kind=SnapshotKind.SAVEPOINT,
            final=final,
            location=location,
        )

    def _alignment(self, final: bool) -> tuple[Alignment, int | None]:
        if self._config.mode is CheckpointingMode.AT_LEAST_ONCE:
            return Alignment.AT_LEAST_ONCE, None
        if not self._config.unaligned or final:
            return Alignment.ALIGNED, None
        timeout_ms = self._config.aligned_timeout_ms
        return (Alignment.ALIGNED, timeout_ms) if timeout_ms else (Alignment.UNALIGNED, None)
