"""Large local files are written behind, and hold what was written all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftlayer.checkpoint.storage import files as local_files
from ftlayer.checkpoint.storage.files import LocalFiles


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_what_is_written_behind_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.setattr(local_files, "BEHIND_BYTES", 4_096)
    if system == "darwin":
        monkeypatch.setattr("sys.platform", system)
        monkeypatch.delattr("os.posix_fadvise")
        monkeypatch.delattr("os.fdatasync")
    output = LocalFiles(str(tmp_path)).create("chk-1/file")
    expected = b""
    for number in range(60):
        chunk = bytes([number]) * (701 * (1 + number % 7))
        output.write(chunk)
        expected += chunk
        if number % 20 == 19:
            expected = expected[: len(expected) // 2]
            assert output.rewind(len(expected))
    assert output.sync()
    output.close()
    assert (tmp_path / "chk-1/file").read_bytes() == expected
