"""A reader source, a writer's sink, and all that is between them in barrier mode, through crashes at any point.

Everything is real but threads, channels, the rules of the coordinator, and what is outside: a broker that forgets what
its reader has committed, and plans every range otherwise each time, and a table that takes each id once.
"""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_each_record_is_in_the_table_once(
    once: ModuleType, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    once.Walk(seed, monkeypatch).run(400)
