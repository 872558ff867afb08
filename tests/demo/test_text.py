from __future__ import annotations

from pathlib import Path

import pytest

from ftlayer.cli.demo.programs import FILES_A_BATCH, prepare, prepared_files
from ftlayer.errors import ConfigError


def records(directory: Path) -> list[str]:
    return [record for _, part in prepared_files(directory) for record in part]


def test_each_line_with_text_is_a_record_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.log").write_bytes(b"one\r\n\n  two\tparts\n\xff\x0cthree\rfour")
    (tmp_path / "y.log").write_text("five\n\t\n")
    prepared = prepare(f"{tmp_path}/**/*.log", tmp_path / "in", max_lines=100, batches=4)
    assert records(tmp_path / "in") == [
        "a/x.log:1\tone",
        "a/x.log:3\t  two\tparts",
        "a/x.log:4\t�\x0cthree\rfour",
        "y.log:1\tfive",
    ]
    assert (prepared.sources, prepared.lines, prepared.batches) == (2, 4, 2)


def test_python_s_own_sources_by_default(tmp_path: Path) -> None:
    prepared = prepare(None, tmp_path / "in", max_lines=1_000, batches=5)
    found = records(tmp_path / "in")
    assert prepared.lines == len(found) == len({record.split("\t")[0] for record in found}) == 1_000
    parts = [len(part) for _, part in prepared_files(tmp_path / "in")]
    assert len(parts) == 5 * FILES_A_BATCH
    assert max(parts) - min(parts) <= 1


def test_no_file_and_no_text_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file matches"):
        prepare(f"{tmp_path}/*.log", tmp_path / "in", max_lines=100, batches=4)
    (tmp_path / "x.log").write_text("\n\n")
    with pytest.raises(ConfigError, match="too few"):
        prepare(f"{tmp_path}/*.log", tmp_path / "in", max_lines=100, batches=4)
