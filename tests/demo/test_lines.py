from __future__ import annotations

from pathlib import Path

import pytest

from ftlayer.cli.demo import programs as module
from ftlayer.cli.demo.programs import STEP, input_partitions, lines_read


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(module.time, "sleep", taken.append)
    return taken


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "marks").mkdir()
    for file in range(4):
        text = "".join(f"f{file}:{number}\tone\x0ctwo\n" for number in range(3 * STEP + 1))
        (tmp_path / f"part-{file:04}.txt").write_text(text, "utf-8", newline="\n")
    return tmp_path


def test_every_line_is_in_one_partition_and_comes_at_a_pace(directory: Path, pauses: list[float]) -> None:
    parts = input_partitions(directory, directory / "marks")
    found = [line.split(":")[0] for part in parts for line in part()]
    assert {name: found.count(name) for name in found} == dict.fromkeys(
        ["f0", "f2", "f1", "f3"], 3 * STEP + 1
    )
    assert [lines_read(mark) for mark in sorted((directory / "marks").iterdir())] == [2 * (3 * STEP + 1)] * 2
    assert len(pauses) == 4 * 4
    assert sum(pauses) == pytest.approx(4 * module.FILE_S)


def test_a_reader_that_begins_again_is_not_held_up_by_what_was_read(
    directory: Path, pauses: list[float]
) -> None:
    part = input_partitions(directory, directory / "marks")[0]
    assert lines_read(Path(part.mark)) == 0
    reading = part()
    first = [next(reading) for _ in range(2 * STEP + 1)]
    assert lines_read(Path(part.mark)) == 2 * STEP
    assert len(pauses) == 2
    again = part()
    assert [next(again) for _ in range(2 * STEP + 1)] == first
    assert len(pauses) == 2
    rest = list(again)
    assert len(first) + len(rest) == lines_read(Path(part.mark)) == 2 * (3 * STEP + 1)
