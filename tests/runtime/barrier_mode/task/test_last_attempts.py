"""Which attempts may be a record's last, so that their failures are to have tracebacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import FailurePolicy
from ftlayer.runtime.barrier_mode.task.failing.attempts import Given, RecordAttempts


def given(*attempts: int) -> Given:
    waiting: list[Any] = [SimpleNamespace(attempt=attempt) for attempt in attempts]
    return Given(0, pa.record_batch({"v": [1, 2]}), None, 0, waiting)


@pytest.mark.parametrize(
    ("most", "attempts", "may_end"),
    [(5, (), False), (5, (2, 4), False), (5, (2, 5), True), (1, (), True), (None, (90,), False)],
)
def test_the_last_attempt_a_policy_gives(most: int | None, attempts: tuple[int, ...], may_end: bool) -> None:
    parts: Any = SimpleNamespace(inputs=())
    made = RecordAttempts(("op", 0), FailurePolicy(max_attempts=most), parts, parts, parts, "here")
    assert made.may_end(given(*attempts)) is may_end
    made.is_last = True
    assert made.may_end(given(*attempts))
