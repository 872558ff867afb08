"""A database that is down for a while under a whole topology: with a circuit breaker nothing dies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import current_record
from ftlayer.common.rules.circuit import CircuitState, Limit
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.vertex.calls import StreamOptions
from ftlayer.vertex.rules.state import TRIAL_ROWS

RETRY = StreamOptions(timeout_ms=30_000, max_attempts=3, backoff_ms=(100,), jitter=0.0)
DOWN_MS = 120_000
ROWS_A_BATCH = 20


class Database:
    """Something that answers so many look-ups, is down for `DOWN_MS`, and then answers again."""

    def __init__(self, healthy: int) -> None:
        self.healthy = healthy
        self.run: Any = None
        self.down_since: int | None = None
        self.refused = 0
        self.attempts: Counter[int] = Counter()

    def look_up(self, record: int) -> int:
        known = current_record()
        assert known is not None
        self.attempts[known.attempt] += 1
        if self.healthy > 0:
            self.healthy -= 1
            return record
        if self.down_since is None:
            self.down_since = self.run.mono
        if self.run.mono - self.down_since < DOWN_MS:
            self.refused += 1
            raise ConnectionError("the database is down")
        return record


def outage(
    simulate: Any, rows: int, seed: int, of_operator: Any, of_topology: Any, replay: str = "store"
) -> tuple[Any, Any, Any]:
    database, out = Database(rows // 5), Counter[int]()

    def keep(batch: pa.RecordBatch) -> None:
        out.update(batch.column(0).to_pylist())

    env = GraphBuilder("job", parallelism=2)
    numbers = env.source(partitions([0], [0]), "n bigint", uid="numbers", parallelism=2, replay=replay)
    numbers.map(database.look_up, uid="enrich", max_failing=of_operator).rebalance().sink(keep)
    limit = None if of_topology is None else Limit.of(of_topology, "layer")
    graph = job_graph(env.build(), retry=RETRY, limit=limit)
    values = list(range(rows))
    database.run = simulate(graph, {"numbers": [values[::2], values[1::2]]}, seed, rows_a_batch=ROWS_A_BATCH)
    database.run.run()
    return database, out, database.run


@pytest.mark.parametrize(
    ("of_operator", "of_topology", "replay"),
    [("5%", None, "store"), (None, "100/min", "store"), ("5%", None, "source")],
)
def test_a_database_that_is_down_for_a_while_kills_nothing(
    simulate: Any, of_operator: Any, of_topology: Any, replay: str
) -> None:
    database, out, run = outage(simulate, 10_000, 1, of_operator, of_topology, replay)
    assert set(out) == set(range(10_000))
    assert run.dead() == []
    assert run.status().drained
    (circuit,) = run.status().circuits.values()
    assert circuit.state is CircuitState.CLOSED
    # The pauses are 1, 2, 4, … s.
    assert 2 <= circuit.opened <= 12
    # What opens the breaker uses up an attempt of each; trials, and what was on its way, none.
    opens_at = 500 if of_operator else 100
    assert (
        sum(count for attempt, count in database.attempts.items() if attempt > 1) <= opens_at + ROWS_A_BATCH
    )
    assert max(database.attempts) == 2
    # Far from all records are tried while it is down.
    on_their_way = 50 * ROWS_A_BATCH
    assert database.refused <= opens_at + on_their_way + circuit.opened * TRIAL_ROWS


def test_without_a_breaker_they_die(simulate: Any) -> None:
    _, out, run = outage(simulate, 1_000, 1, None, None)
    assert len(run.dead()) == 800
    assert len(out) == 200
