"""The JVM of the driver dies, its Python process does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(2_400)]


def test_topologies_end_when_the_jvm_is_gone(tmp_path: Path) -> None:
    script, log = Path(__file__).with_name("lost_session.py"), tmp_path / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, script, tmp_path], stdout=output, stderr=output, timeout=1_200, check=False
        )
    text = log.read_text("utf-8", "replace")
    assert done.returncode == 0, text[-8_000:]
    assert "tracked: " in text
    assert "checked: " in text
