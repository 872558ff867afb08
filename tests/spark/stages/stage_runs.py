"""Runs the task of a stage over batches of rows, and reads the pages that it leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.steps import Map
from ftlayer.spark.stages.task import RootGiver, StageTask

V = pa.schema([("v", pa.int64())])
ODD_FAILS = Map("odd", lambda r: {"v": 10 // (1 - r["v"] % 2)}, V)
PASS = Map("pass", dict, V)


def vs(values: Any) -> list[dict[str, int]]:
    return [{"v": value} for value in values]


def first(functions: Any = (), **options: Any) -> StageTask:
    giver = RootGiver("q", "run", "files", 0, 0, 1)
    return StageTask(tuple(functions), options.pop("giver", giver), **options)


def run(kit: SimpleNamespace, task: StageTask, *batches: pa.RecordBatch, partition: int = 0) -> list[Any]:
    return kit.read_pages(task.pages(iter(batches), partition))


def u64s(values: Any) -> Any:
    return np.array(list(values), np.uint64)
