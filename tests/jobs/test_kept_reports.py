"""Reports that are kept beside checkpoints: at first, from time to time, and at the end."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftlayer.checkpoint.storage.files import LocalFiles
from ftlayer.checkpoint.storage.report import find_reports
from ftlayer.errors import CheckpointDamagedError
from ftlayer.monitor.local_board import ReportKeeper
from ftlayer.vertex.calls import JobDetails

PAUSE = threading.Event()


@pytest.fixture
def keeper() -> Iterator[ReportKeeper]:
    keeper = ReportKeeper(every_s=0.01)
    yield keeper
    keeper.close()


def until(path: Path, state: str) -> JobDetails:
    while True:
        for report in find_reports(str(path)):
            if report.job.state == state:
                return report.job
        PAUSE.wait(0.01)


def test_a_job_is_kept_while_it_runs_and_with_its_end(
    keeper: ReportKeeper, telling: Any, tmp_path: Path
) -> None:
    keeper.add(telling, str(tmp_path))
    assert not until(tmp_path, "running").final
    telling.final = True
    assert until(tmp_path, "ended").final
    assert [report.location for report in find_reports(str(tmp_path))] == [str(tmp_path / "j" / "_last")]


def test_the_end_of_the_program_is_kept(telling: Any, tmp_path: Path) -> None:
    late = ReportKeeper(every_s=3_600)
    late.add(telling, str(tmp_path))
    telling.final = True
    late.close()
    assert find_reports(str(tmp_path))[0].job.final


def test_a_directory_that_is_full_ends_no_job_and_is_tried_again(
    keeper: ReportKeeper, telling: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "place"
    place.write_text("no directory")
    keeper.add(telling, str(place))
    while "cannot be announced now" not in caplog.text:
        PAUSE.wait(0.01)
    place.unlink()
    assert until(tmp_path, "running").counters["announcements_failed"] >= 1


def test_a_report_that_its_job_removes_meanwhile_hides_no_other(
    keeper: ReportKeeper, telling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.add(telling, str(tmp_path / "stays"))
    until(tmp_path / "stays", "running")
    shutil.copytree(tmp_path / "stays", tmp_path / "goes")
    read = LocalFiles.read

    def gone(files: LocalFiles, path: str) -> bytes:
        if path.startswith("goes"):
            raise CheckpointDamagedError(f"{path} is missing") from FileNotFoundError(path)
        return read(files, path)

    monkeypatch.setattr(LocalFiles, "read", gone)
    assert [report.location for report in find_reports(str(tmp_path))] == [
        str(tmp_path / "stays" / "j" / "_last")
    ]
