"""Which chains of a slot have suspects, and what is on the disk for it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import FailurePolicy
from ftlayer.functions.steps import Map
from ftlayer.runtime.barrier_mode.slot.shell import Suspecting
from ftlayer.runtime.barrier_mode.task.chain_suspects import row_digests
from ftlayer.runtime.protocol.messages import Conviction, Deploy
from ftlayer.runtime.task.contract import NO_SUSPECTS
from ftlayer.topology.job_graph import JobGraph, JobVertex

N = pa.schema([("n", pa.int64())])
ROWS = pa.record_batch([[1, 2, 3]], schema=N)


def chain(uid: str, policy: FailurePolicy | None) -> JobVertex:
    return JobVertex(uid, (Map(uid, abs, N),), 1, failures=policy)


def suspecting(directory: Path, policy: FailurePolicy | None = None) -> Suspecting:
    """Of a slot with one chain that has no policy, and another one."""
    graph = JobGraph("killed", (chain("plain", None), chain("careful", policy)), (), tracked=False)
    slot: Any = SimpleNamespace(order=SimpleNamespace(graph=graph, job="killed-1", slot=0), instance="a" * 32)
    return Suspecting(slot, str(directory))


def deploy(*, armed: bool, convicted: int | None = None) -> Deploy:
    digests = row_digests(ROWS, 0)
    convictions = (
        () if convicted is None else (Conviction("careful", digests[convicted], "it kills", "", "slot 0"),)
    )
    return Deploy(1, "run", (), armed=armed, convictions=convictions)


def test_of_a_job_without_a_policy_the_box_has_how_its_process_ends_alone(tmp_path: Path) -> None:
    slot = suspecting(tmp_path)
    assert slot.box.deaths() == ()
    slot.begin(deploy(armed=True))
    assert slot.of("plain") is slot.of("careful") is NO_SUSPECTS
    assert slot.box.chains == ()
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".box"]
    slot.box.close()
    assert [*tmp_path.glob("*/*")] == []


def test_chains_with_a_policy_are_armed_when_the_driver_says_so_and_the_box_goes_with_the_instance(
    tmp_path: Path,
) -> None:
    for armed in (False, True):
        slot = suspecting(tmp_path, FailurePolicy())
        assert slot.box.deaths() == ()
        slot.begin(deploy(armed=armed, convicted=1))
        assert slot.of("plain") is NO_SUSPECTS
        suspects = slot.of("careful")
        assert suspects.one_at_a_time == armed
        assert [(row, found.reason) for row, found in suspects.convicted(ROWS)] == [(1, "it kills")]
        assert [path.suffix for path in tmp_path.glob("*/*")] == [".box"]
        suspects.about_to(ROWS, 2)
        suspects.over()
        slot.box.close()
        slot.box.close()
        assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_kept_nobody_is_noted_and_convicts_stay_convicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.touch()
    slot = suspecting(path, FailurePolicy())
    assert slot.box.deaths() == ()
    with caplog.at_level(logging.WARNING):
        slot.begin(deploy(armed=True, convicted=0))
    assert "a record that ends its process would not be found" in caplog.text
    suspects = slot.of("careful")
    assert not suspects.one_at_a_time
    assert [row for row, _ in suspects.convicted(ROWS)] == [0]
    slot.box.close()


def test_what_cannot_be_kept_of_a_job_without_a_policy_is_how_its_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.touch()
    slot = suspecting(path)
    with caplog.at_level(logging.WARNING):
        slot.begin(deploy(armed=False))
    assert "slot 0: how its process ends would not be known" in caplog.text
    slot.box.close()
