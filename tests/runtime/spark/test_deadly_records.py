"""A function that ends its process for some records: they alone die, and the job ends by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import FTLayer, JobState
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.spark.facade import list_records
from ftlayer.topology.connectors import partitions

pytestmark = pytest.mark.spark

RECORDS = 2_000
DEADLY = {123: "it called os._exit(3)", 1_777: "Segmentation fault"}


def rows(part: int) -> Any:
    return range(part, RECORDS, 2)


def explode(number: int) -> int:
    if number == 123:
        os._exit(3)
    if number == 1_777:
        os.kill(os.getpid(), signal.SIGSEGV)
    return number


@pytest.mark.parametrize("replay", ["store", pytest.param("source", marks=pytest.mark.campaign)])
def test_two_of_2000_records_end_their_process(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path, replay: str
) -> None:
    # Two attempts are what it takes until a record is suspected; the search itself uses up none.
    layer: FTLayer = connect()
    name = f"explosive-{replay}"
    env = environment(layer, name, restart=FixedDelay(attempts=3, delay="10ms"))
    source = env.source(partitions(rows(0), rows(1)), "n bigint", uid="numbers", replay=replay).key_by("n")
    source.map(explode, "n bigint", uid="explode").sink(logs_kit.Journal(tmp_path))
    began = time.monotonic()
    job = env.execute_async()
    seen = []
    while not job.over(0.1):
        with contextlib.suppress(IndexError):
            found = job.status().isolation
            if found is not None and (not seen or seen[-1] != found):
                seen.append(found)
    assert job.state is JobState.ENDED, job.exception()
    status = job.status()
    print(f"{status.restarts} losses in {time.monotonic() - began:.1f} s; {seen}")
    assert 6 <= status.restarts <= 2 + 2 * (11 + 2)
    assert max(its.suspects for its in seen) > 100
    assert max(its.found for its in seen) >= 1

    came = Counter(row[0] for row in logs_kit.Notes(tmp_path, "out").rows())
    assert came.keys() == set(range(RECORDS)) - DEADLY.keys()
    dead = {
        its.payload[0][0].as_py(): its
        for its in list_records(layer.client, "dead")
        if its.stream == f"{name}/numbers"
    }
    assert dead.keys() == DEADLY.keys()
    for number, letter in dead.items():
        assert letter.reason.endswith(f"ended while it ran this record and no other, twice: {DEADLY[number]}")
        assert letter.operator == "explode"
        assert letter.attempt == 1
