"""Records far larger than usual."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

pytestmark = pytest.mark.spark


def test_records_of_16_mib(layer: Any, rows: Any, kept: Any, tools: Any, once: Any, spark: Any) -> None:
    size = 16 << 20
    table = pa.table({"n": [1, 2, 3], "body": pa.array([bytes([n]) * size for n in (1, 2, 3)], pa.binary())})

    def heavy(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] == 3:
            raise ValueError("never")
        if once.first(record["n"]):
            raise RuntimeError("try again")
        body = record["body"]
        return {"n": record["n"], "size": len(body), "same": body == body[:1] * len(body)}

    stream = layer.source(rows.add(table).stream("n bigint, body binary"), name="heavy")
    query = tools.run(stream.map(heavy, "n int, size bigint, same boolean"), kept)
    assert sorted(map(tuple, kept.rows)) == [(1, size, True), (2, size, True)]
    assert query.restarts == 0, query.last_failure
    (dead,) = tools.dead_of(layer, "heavy")
    assert dead.payload.column("body")[0].as_py() == b"\3" * size
    layer.purge([dead.key])
