"""A program with a module beside it: a wrapped query, and a topology in the same session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helper
from pyspark.sql import SparkSession

from ftlayer import FTLayer, StreamEnvironment


def write(rows: Any, batch: int) -> None:
    Path("doubled").write_text(" ".join(str(row.n) for row in rows.sort("n").collect()))


def keep(batch: Any) -> None:
    with Path("negative").open("a") as file:
        file.writelines(f"{n} " for n in batch.column(0).to_pylist())


Path("numbers").mkdir()
Path("numbers/1").write_text("1\n2\n3\n")
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.log.level", "ERROR").getOrCreate()
with FTLayer.embedded("ft") as layer:
    stream = layer.source(spark.readStream.text("numbers"), name="numbers").map(helper.double, "n int")
    query = stream.sink(write, checkpoint="checkpoint").trigger(availableNow=True).start()
    query.awaitTermination()
    env = StreamEnvironment(spark, layer, name="negative")
    env.source([1, 2, 3], "n long").map(helper.negative).sink(keep)
    env.execute()
