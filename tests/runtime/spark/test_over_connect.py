"""Topologies of both modes over Spark Connect, with a server of Spark's own in the same machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftlayer import FTLayer

pytestmark = pytest.mark.spark


def test_topologies_run_over_connect(vertex: FTLayer, real_lines: list[str], tmp_path: Path) -> None:
    """The script compares what comes out with the recounts."""
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    token, lines, log = tmp_path / "token", tmp_path / "lines", tmp_path / "log"
    assert vertex.token is not None
    token.write_text(vertex.token)
    lines.write_text("\n".join(real_lines[:1_000]))
    script = Path(__file__).with_name("connect_topologies.py")
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, script, tmp_path, vertex.address, token, lines],
            stdout=output,
            stderr=output,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, log.read_text("utf-8", "replace")[-8_000:]
