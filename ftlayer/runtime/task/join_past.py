"""Rows of a join that nothing new can match: they are remembered for replays of the other side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ftlayer.runtime.protocol.elements import MIN_TIME_MS
from ftlayer.runtime.task.join_buffer import JoinBuffer, JoinRows

MAX_PAST_BYTES = 128 << 20
"""Payload that is remembered of one side; beyond it the oldest runs are forgotten early."""

STEPS = 16
"""Rows are forgotten in so many portions over the time they are remembered: each costs a look at all of them."""


class PastRows:
    """Acknowledged rows of one side. They are in ``buffer`` for ``remember_ms``, and up to 1/16 of it longer."""

    def __init__(self, remember_ms: int) -> None:
        self.buffer = JoinBuffer()
        self._remember_ms = remember_ms
        self._step_ms = max(remember_ms // STEPS, 1)
        self._next_ms = MIN_TIME_MS

    def add(self, rows: JoinRows, mono_ms: int) -> None:
        """Remember rows from now on."""
        if not len(rows):
            return
        until = -(-(mono_ms + self._remember_ms) // self._step_ms) * self._step_ms
        self.buffer.add(
            replace(
                rows,
                keep_until=np.full(len(rows), MIN_TIME_MS, np.int64),
                hold_until=np.full(len(rows), until, np.int64),
                owed=np.zeros_like(rows.owed) if rows.owed is not None else None,
            )
        )
        while self.buffer.payload_bytes > MAX_PAST_BYTES:
            self.buffer.drop_oldest_run()

    def forget(self, mono_ms: int) -> None:
        """Forget what was remembered long enough."""
        if mono_ms < self._next_ms:
            return
        self._next_ms = (mono_ms // self._step_ms + 1) * self._step_ms
        for _ in self.buffer.expire(MIN_TIME_MS + 1, mono_ms):
            pass
        self.buffer.tidy()
