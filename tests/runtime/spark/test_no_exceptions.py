"""What a function raises that is no `Exception` costs its record alone; a mistake in a sink ends a first batch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import CheckpointConfig, FailurePolicy, FixedDelay, FTLayer, StreamEnvironment
from ftlayer.errors import QueryError

pytestmark = pytest.mark.spark


class PanicException(BaseException):
    """No `Exception`."""


RAISED = {
    7: PanicException("index out of bounds"),
    8: SystemExit(3),
    9: KeyboardInterrupt(),
    10: MemoryError(),
}


def raises(number: int) -> int:
    if number in RAISED:
        raise RAISED[number]
    return number


@pytest.mark.parametrize("mode", ["acker", "barrier"])
def test_its_record_alone_fails(spark: Any, tmp_path: Path, mode: str) -> None:
    out = tmp_path / "out"

    def write(rows: pa.RecordBatch) -> None:
        with out.open("a") as file:
            file.write("".join(f"{number}\n" for number in rows.column(0).to_pylist()))

    checkpointing = CheckpointConfig(
        interval="100ms",
        directory=str(tmp_path / "checkpoints"),
        state_directory=str(tmp_path / "local"),
        failures=FailurePolicy(max_attempts=1),
    )
    with ExitStack() as stack:
        layer = None
        if mode == "acker":
            layer = stack.enter_context(FTLayer.embedded(str(tmp_path / "store"), max_attempts=1))
        env = StreamEnvironment(
            spark,
            layer,
            name="panics",
            parallelism=1,
            restart=FixedDelay(attempts=1, delay="10ms"),
            checkpointing=checkpointing if layer is None else None,
        )
        env.source(lambda: iter(range(20)), "n long", uid="s").map(raises, "n long", uid="m").sink(
            write, uid="k"
        )
        assert env.execute().status().restarts == 0
    assert {int(line) for line in out.read_text().split()} == set(range(20)) - RAISED.keys()


def test_a_mistake_in_a_sink_ends_a_query_at_its_first_batch(spark: Any, tmp_path: Path) -> None:
    with FTLayer.embedded(str(tmp_path / "store")) as layer:
        frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
        rows = layer.source(frame, name="numbers").map(lambda row: row, frame.schema)
        query = rows.sink(lambda rows, batch: rows.wirte.save("x"), checkpoint=str(tmp_path / "ck")).start()
        with pytest.raises(QueryError, match="Attribute `wirte` is not supported"):
            query.awaitTermination(600)
        assert query.restarts == 0
