"""An intake for what no source gives again: many threads, a killed vertex, back-pressure, one reader."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import CodecError, IntakeTimeoutError, StaleOwnerError
from ftlayer.spark.facade import FTLayer

pytestmark = pytest.mark.spark

SCHEMA = "thread int, n bigint"


def test_threads_put_while_the_vertex_is_killed(
    spark: Any, tmp_path: Path, kept: Any, tools: Any, once: Any
) -> None:
    def flaky(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] % 10 == 0 and once.first((record["thread"], record["n"])):
            raise RuntimeError("try again")
        return record

    with FTLayer.embedded(tmp_path / "ft", backoff="20ms", jitter=0) as layer:
        clicks = layer.ingest("clicks", SCHEMA)

        def put(thread: int) -> None:
            for n in range(40):
                if n % 4 == 0:
                    clicks.put_many([{"thread": thread, "n": n + i} for i in range(4)])
                if thread == 0 and n == 20:
                    assert layer.vertex is not None
                    layer.vertex.kill()

        threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
        stream = layer.source(clicks).map(flaky, SCHEMA)
        query = stream.sink(kept, checkpoint=tools.checkpoint).trigger(processingTime="0 seconds").start()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(600)
            wanted = Counter((thread, n) for thread in range(4) for n in range(40))
            tools.until(lambda: len(set(map(tuple, kept.rows))) == len(wanted), "all clicks")
            assert query.await_drained(600)
        finally:
            query.stop()
        assert Counter(map(tuple, kept.rows)) == wanted
        assert tools.dead_of(layer, "clicks") == []


def test_batches_and_what_does_not_fit(layer: FTLayer, kept: Any, tools: Any) -> None:
    intake = layer.ingest("batches", "n bigint, at timestamp, tags array<string>")
    with pytest.raises(CodecError, match=r"a column 'm', the schema not"):
        intake.put({"m": 1})
    with pytest.raises(CodecError, match=r"does not fit the schema"):
        intake.put_many([{"n": 1}, {"n": "two"}])
    with pytest.raises(CodecError, match=r"expected columns"):
        intake.put_batch(pa.record_batch({"n": [1]}))
    rows = [{"n": n, "at": None, "tags": ["a"] * (n % 3)} for n in range(50)]
    intake.put_many(rows)
    intake.put_many([])
    tools.run(layer.source(intake), kept)
    assert sorted((row.asDict() for row in kept.rows), key=lambda row: row["n"]) == rows


def test_back_pressure_ends_in_a_clear_error_and_in_nothing_half_done(
    connect: Callable[..., FTLayer], kept: Any, tools: Any, spark: Any
) -> None:
    layer = connect(max_pending=10)
    intake = layer.ingest("narrow", "n bigint")
    for n in range(10):
        intake.put({"n": n})
    with pytest.raises(IntakeTimeoutError, match=r"max_pending.*nothing was stored"):
        intake.put({"n": 10})
    assert layer.deliveries(spark).where("stream = 'ingest/narrow'").count() == 10
    tools.run(layer.source(intake), kept)
    intake.put({"n": 11})
    tools.run(layer.source(intake), kept)
    assert sorted(kept.column("n")) == [*range(10), 11]


def test_an_ingest_has_one_query(layer: FTLayer, kept: Any, tools: Any, tmp_path: Path) -> None:
    intake = layer.ingest("claimed", "n bigint")
    intake.put({"n": 1})
    tools.run(layer.source(intake), kept)
    second = layer.source(intake).sink(kept, checkpoint=str(tmp_path / "second"))
    with pytest.raises(
        StaleOwnerError, match=r"'ingest/claimed' belongs to query '[0-9a-f]+'.*read by one query"
    ):
        second.start()
    assert kept.column("n") == [1]
