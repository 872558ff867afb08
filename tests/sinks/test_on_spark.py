"""The sinks in a plain streaming query, whose batches are run again; and a job that a row blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ftlayer import CheckpointConfig, StreamEnvironment, partitions
from ftlayer.checkpoint.storage.loading import find_checkpoints
from ftlayer.cli.main import app
from ftlayer.errors import UncommittableError
from ftlayer.sinks import FileDataSource, PostgresDataSource, PostgresSink

pytestmark = pytest.mark.spark


def run(spark: Any, source: Path, checkpoint: Path, format: str, options: dict[str, str]) -> None:
    """Run what there is to run, and end."""
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
    writer = lines.writeStream.format(format).options(**options).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()


@pytest.mark.parametrize("kind", ["files", "postgres"])
def test_a_query_that_crashed_before_it_noted_its_commit(
    spark: Any, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text(f"{number}-a\n{number}-b\n")
    if kind == "files":
        spark.dataSource.register(FileDataSource)
        format, options = "ftlayer-files", {"path": str(tmp_path / "out"), "fileFormat": "json"}
    else:
        server = request.getfixturevalue("server")
        server.execute("CREATE TABLE IF NOT EXISTS spark_lines (value text PRIMARY KEY)")
        spark.dataSource.register(PostgresDataSource)
        format, options = "ftlayer-postgres", {"dsn": server.dsn, "table": "spark_lines"}

    def found() -> list[str]:
        if kind == "postgres":
            return [row[0] for row in server.execute("SELECT value FROM spark_lines ORDER BY value")]
        return sorted(row[0] for row in spark.read.json(options["path"]).collect())

    run(spark, source, checkpoint, format, options)
    expected = [f"{number}-{letter}" for number in range(3) for letter in "ab"]
    assert found() == expected
    # As if the driver had died between the sink's commit and Spark's note of it.
    for note in ("2", ".2.crc"):
        (checkpoint / "commits" / note).unlink()
    (source / "3.txt").write_text("3-a\n3-b\n")
    run(spark, source, checkpoint, format, options)
    assert found() == [*expected, "3-a", "3-b"]


def test_a_job_that_a_row_blocks_goes_on_without_it(server: Any, spark: Any, tmp_path: Path) -> None:
    """Two subtasks write the same key for one checkpoint: neither of them can know, the commit does."""
    server.execute("CREATE TABLE blocked (n bigint PRIMARY KEY, who text)")
    checkpoints = CheckpointConfig(
        interval="10h", directory=str(tmp_path / "checkpoints"), retention="retain-on-cancellation"
    )

    def execute() -> None:
        env = StreamEnvironment(spark, name="blocked", parallelism=2, checkpointing=checkpoints)
        made = partitions(*([(n, str(part)) for n in (part, part + 2, 100)] for part in range(2)))
        env.source(made, "n long, who string", uid="numbers").sink(
            PostgresSink(server.dsn, "blocked"), uid="table"
        )
        env.execute(restore_from="latest")

    for _ in range(2):
        with pytest.raises(
            UncommittableError, match=r"sink 'table': checkpoint 1 is complete.*'blocked_pkey'"
        ) as caught:
            execute()
    assert "ftlayer checkpoints refused" in str(caught.value)
    assert server.execute("SELECT * FROM blocked") == []

    def refused(*options: str, answer: str = "") -> str:
        path = find_checkpoints(str(tmp_path))[0]
        command = ["checkpoints", "refused", path, "--dsn", server.dsn, "--table", "blocked", *options]
        result = CliRunner().invoke(app, command, input=answer)
        assert result.exit_code == (1 if answer == "n\n" else 0), result.output
        return result.output

    (found,) = json.loads(refused("--json"))
    assert found["row"]["n"] == 100
    assert "23505" in refused()
    kept = tmp_path / "rows.jsonl"
    assert "Remove 1 rows of sink 'table'" in refused("--divert", str(kept), answer="n\n")
    assert not kept.exists()
    assert "removed 1 rows" in refused("--divert", str(kept), "--yes")
    (line,) = kept.read_text().splitlines()
    assert json.loads(line) == {"why": found["why"], "row": found["row"]}
    assert "no row that it has yet to commit" in refused()
    execute()
    numbers = [row[0] for row in server.execute("SELECT n FROM blocked ORDER BY n")]
    assert numbers == [0, 1, 2, 3, 100]
