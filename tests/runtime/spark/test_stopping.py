"""Jobs that are drained or cancelled and started again under the same name, and what is shown of them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import JobState
from ftlayer.vertex.calls import GetJob, ListJobs

pytestmark = pytest.mark.spark


class Gate:
    """Fails for every third line until it is open, over all processes."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory / "open")

    def __call__(self, line: tuple[str, int, str]) -> tuple[str, int]:
        if len(line[2]) % 3 == 0 and not os.path.exists(self._path):
            raise ConnectionError("not yet")
        return line[0], line[1]


def build(env: Any, kit: ModuleType, directory: Path) -> None:
    lines = env.source(kit.Tail(directory), kit.LINE, uid="lines")
    gated = lines.map(Gate(directory), "file string, place bigint", uid="gate")
    gated.key_by("place").map(lambda it: it, "file string, place bigint").sink(kit.Journal(directory))


def test_what_was_pending_is_replayed_and_nothing_is_read_twice(
    environment: Any, connect: Any, logs_kit: ModuleType, real_lines: list[str], tmp_path: Path
) -> None:
    layer = connect(backoff="2s")
    logs = logs_kit.GrowingLogs(tmp_path, real_lines)
    out = logs_kit.Notes(tmp_path, "out")

    def start() -> Any:
        env = environment(layer, "stopped")
        build(env, logs_kit, tmp_path)
        return env.execute_async()

    # A third of the lines has failed, and waits.
    logs.grow(300)
    job = start()
    lines = logs_kit.lines_of(tmp_path)
    fails = {line[:2] for line in lines if len(line[2]) % 3 == 0}
    passes = {line[:2] for line in lines} - fails

    def is_settled() -> bool:
        """Whether the others are acknowledged: the sink may have had them, and the vertex not know of it yet."""
        it = job.status().vertex
        return bool(it) and it.waiting + it.due == len(fails) and not it.pending

    logs_kit.until(job, is_settled)

    def announced() -> Any:
        return next((each for each in layer.client.call(ListJobs()).jobs if each.job.run == job.job), None)

    # Tools see it, with what each subtask does: each slot says it once a second.
    logs_kit.until(
        job, lambda: (found := announced()) and {load.slot for load in found.job.subtasks} == {0, 1}
    )
    told = layer.client.call(GetJob(job.name)).job
    assert {node.uid for node in told.plan.nodes} >= {"lines", "gate"}
    assert (told.state, told.mode, told.counters["records_in"] >= 300) == ("running", "acker", True)
    assert {(load.uid, load.slot) for load in told.subtasks} >= {("lines", 0), ("lines", 1), ("gate", 0)}
    assert all(0 <= load.busy <= 1 and 0 <= load.back_pressured <= 1 for load in told.subtasks)
    assert job.cancel()
    assert job.state is JobState.CANCELLED
    assert {tuple(row) for row in out.rows()} == passes

    # Started again and drained: they come, and lines that are new.
    (tmp_path / "open").touch()
    logs.grow(300)
    job = start()
    everything = {line[:2] for line in logs_kit.lines_of(tmp_path)}
    logs_kit.until(job, lambda: {tuple(row) for row in out.rows()} >= everything - fails)
    assert job.drain(600)
    assert job.state is JobState.ENDED
    assert Counter(tuple(row) for row in out.rows()) == Counter(everything)

    # Once more: there is nothing to do.
    job = start()
    logs_kit.until(job, lambda: job.state is JobState.RUNNING)
    assert job.drain(600)
    assert job.status().counters["records_in"] == 0
    assert Counter(tuple(row) for row in out.rows()) == Counter(everything)
    assert set(Counter(tuple(row) for row in logs_kit.Notes(tmp_path, "reads").rows()).values()) == {1}


def test_execute_shows_progress_and_returns(
    environment: Any, logs_kit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = environment(name="followed", parallelism=1)
    numbers = env.source(range(1_000), "id bigint")
    numbers.map(lambda it: it, "id bigint").sink(logs_kit.Journal(tmp_path))
    job = env.execute()
    assert job.state is JobState.ENDED
    assert "1,000 in · 1,000 done · 0 dead" in capsys.readouterr().err
    assert len(logs_kit.Notes(tmp_path, "out").rows()) == 1_000


def test_execute_is_cancelled_by_ctrl_c(
    environment: Any, logs_kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftlayer.runtime import environment as progress

    env = environment(name="interrupted", parallelism=1)
    env.source(logs_kit.Tail(tmp_path), logs_kit.LINE).sink(print)
    monkeypatch.setattr(progress, "PLAIN_S", 0.0)
    shown: list[Any] = []

    def interrupt(line: progress.PlainLines, text: str) -> None:
        shown.append(text)
        if text.startswith("interrupted: running"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(progress.PlainLines, "show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        env.execute()
    assert shown[-1].startswith("interrupted: cancelled after")
