"""Records that end the process that works on them, in barrier mode: they alone die, and all other counts are exact."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import CheckpointConfig, FailurePolicy, FixedDelay, StreamEnvironment
from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.storage.dead_letters import stored_letters

pytestmark = pytest.mark.spark

COUNT = 3_000
"""Records of each of two partitions; the campaign has more."""
KILLERS = {(0, 700): "Segmentation fault", (1, 1_900): "it called os._exit(3)"}
EXITS = (1, 2_500)


def explode(record: Any) -> Any:
    match record[1:]:
        case (0, 700):
            os.kill(os.getpid(), signal.SIGSEGV)
        case (1, 1_900):
            os._exit(3)
        case (1, 2_500):
            sys.exit("it is a failure like others")
    return record


@pytest.fixture(scope="module")
def kit(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("barrier_job")


@pytest.mark.parametrize("count", [COUNT, pytest.param(50_000, marks=pytest.mark.campaign)])
def test_two_records_end_their_process(spark: Any, kit: ModuleType, tmp_path: Path, count: int) -> None:
    env = StreamEnvironment(
        spark,
        name="killers",
        parallelism=2,
        # One failure of each until it is looked for; the search itself uses up none.
        restart=FixedDelay(attempts=len(KILLERS), delay="10ms"),
        checkpointing=CheckpointConfig(
            interval="100ms",
            directory=str(tmp_path / "checkpoints"),
            state_directory=str(tmp_path / "local"),
            failures=FailurePolicy(max_attempts=1),
        ),
    )
    kit.build(env, tmp_path, count=count, function=explode)
    job = env.execute_async()
    try:
        assert job.wait(600)
    finally:
        job.cancel()
    # Two deaths convict a record, and the first of a search says nothing of any. Both may kill at once.
    assert 3 <= job.status().restarts <= 3 * len(KILLERS)
    ledger = kit.Ledger(tmp_path, count=count)
    ledger.expected = {each for each in ledger.expected if each[1:] not in {*KILLERS, EXITS}}
    ledger.check()
    assert list((tmp_path / "local").iterdir()) == []

    (stored,) = stored_letters(str(tmp_path / "checkpoints"))
    letters = [each for file in stored.found() for part in stored.read(file.name) for each in part]
    dead = {_place(letter): letter for letter in letters}
    assert len(letters) == len(dead)
    assert dead.keys() == {*KILLERS, EXITS}
    assert {letter.operator for letter in letters} == {"passing"}
    for place, cause in KILLERS.items():
        attempt = dead[place].attempts[-1]
        assert attempt.reason.endswith(f"ended while it ran this record and no other, twice: {cause}")
        assert attempt.place in ("slot 0", "slot 1")
    assert "in explode" in dead[0, 700].attempts[-1].traceback
    assert dead[EXITS].attempts[-1].reason == "SystemExit: it is a failure like others"


def _place(letter: ChainLetter) -> tuple[int, int]:
    """Return partition and number of a dead record."""
    (row,) = pa.ipc.open_stream(letter.payload).read_all().to_pylist()
    return row["partition"], row["number"]
