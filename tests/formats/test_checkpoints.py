"""Checkpoints and savepoints that versions have written are restored, and the job's results are right."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import CheckpointConfig, FailurePolicy, NoRestart, Retention, StreamEnvironment
from ftlayer.checkpoint.storage.dead_letters import stored_letters
from ftlayer.checkpoint.storage.loading import load_checkpoint
from ftlayer.records.ipc import read_one_batch
from ftlayer.runtime.environment import LATEST

from fixture_versions import CHECKPOINTS, VERSIONS, unpack  # isort: skip

KINDS = [*CHECKPOINTS, "savepoint"]


def restored_from(directory: Path, kind: str) -> str:
    """Return where the checkpoint of a fixture lies."""
    if kind == "savepoint":
        return str(directory / "savepoint")
    (metadata,) = directory.glob("checkpoints/fixture/*/chk-2/_metadata")
    return str(metadata.parent)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_what_it_is_a_fixture_of(tmp_path: Path, version: str, kind: str) -> None:
    """A fixture that lacks what it is to show shows nothing."""
    unpack(version, kind, tmp_path)
    found = load_checkpoint(restored_from(tmp_path, kind))
    assert found.written_by == version
    assert found.unaligned is (kind == "unaligned")
    parts = found.subtasks
    assert Counter(part.uid for part in parts if part.waiting) == Counter({"judged": 2})
    assert sum(part.waiting for part in parts) == 4
    assert any(part.channels for part in parts) is (kind == "unaligned")
    assert {operator.name for part in parts for operator in part.operators} == {"some", "all", "known"}
    assert sum(len(part.committables) for part in parts) > 0
    tables = {(info.operator, info.kind) for part in parts if part.keyed for info in part.keyed.tables}
    assert {("remembering", each) for each in ("value", "list", "map", "timers")} < tables
    assert {("hours", "map"), ("hours", "timers"), ("totals", "value")} < tables
    pieces = [piece for part in parts if part.keyed for piece in part.keyed.pieces]
    written_at = {piece.checkpoint for piece in pieces}
    assert len(written_at) == (2 if kind in ("incremental", "changelog") else 1)
    assert ("lmdb" in {piece.format for piece in pieces}) is (kind in ("lmdb", "incremental"))


@pytest.mark.parametrize("version", VERSIONS)
def test_letters_are_read(tmp_path: Path, version: str) -> None:
    unpack(version, "heap", tmp_path)
    letters = [
        letter for stored in stored_letters(str(tmp_path / "checkpoints")) for _, letter in stored.letters()
    ]
    rows = [read_one_batch(letter.payload).to_pylist()[0] for letter in letters]
    assert sorted((row["key"], row["partition"], row["number"]) for row in rows) == [
        ("k2", 0, 7),
        ("k2", 1, 7),
    ]
    for letter, row in zip(letters, rows, strict=True):
        assert (letter.chain, letter.operator, len(letter.attempts)) == ("judged", "judged", 1)
        assert letter.attempts[0].reason == f"{row['partition']}/7 dies"
        assert "in __call__" in letter.attempts[0].traceback


@pytest.mark.spark
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_job_goes_on(spark: Any, programs: ModuleType, tmp_path: Path, version: str, kind: str) -> None:
    """Every state of every key, each timer, window and waiting record has its part in what comes out."""
    unpack(version, kind, tmp_path)
    config = CheckpointConfig(
        interval="1h",
        directory=str(tmp_path / "checkpoints"),
        retention=Retention.RETAIN_ON_CANCELLATION,
        failures=FailurePolicy(max_attempts=3, backoff="10ms"),
        **CHECKPOINTS.get(kind, {}),
    )
    env = StreamEnvironment(spark, name="fixture", parallelism=2, checkpointing=config, restart=NoRestart())
    due_ms = int((tmp_path / "due_ms").read_text())
    while time.time() * 1_000 < due_ms:  # A fixture that was written just now.
        time.sleep(1)
    programs.build(env, tmp_path / "out", due_ms=due_ms)
    env.execute(restore_from=str(tmp_path / "savepoint") if kind == "savepoint" else LATEST)
    programs.check_outputs(tmp_path / "out")
