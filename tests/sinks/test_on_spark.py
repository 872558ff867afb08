"""The sinks in a plain streaming query: a batch that Spark runs again after a crash adds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftlayer.sinks import FileDataSource, PostgresDataSource

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
