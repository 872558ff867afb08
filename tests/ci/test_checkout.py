"""What runs in a checkout behind a plain `pip install .`: its own ``ftlayer/`` has no C extension and comes first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import ftlayer

ROOT = Path(__file__).parents[2]

BENCHMARK = """
import subprocess, sys
import ftlayer._native, ftlayer.records.ids
TARGETS = {}
def run(quick):
    subprocess.run([sys.executable, "-m", "bench.probe"], check=True)
    return {"done": 1.0}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the sources as a clone has them, without what is built."""
    checkout = tmp_path / "checkout"
    for name in ("bench", "ftlayer"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "setup.py", checkout)
    return checkout


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The interpreter of an environment that ftlayer is installed in as by a plain ``pip install .``."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (site / "ftlayer").symlink_to(Path(ftlayer.__file__).parent)
    # Of a directory that a .pth file names, Python reads no .pth files: this installation's own is left out.
    (site / "others.pth").write_text("\n".join(entry for entry in sys.path if entry.endswith("-packages")))
    return str(tmp_path / "venv" / "bin" / "python")


def run(python: str, checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    return subprocess.run(
        [python, *arguments], cwd=checkout, env=env, capture_output=True, text=True, check=False
    )


def test_a_benchmark_and_its_processes_take_the_installed_package(python: str, checkout: Path) -> None:
    (checkout / "bench" / "probe.py").write_text(BENCHMARK)
    done = run(python, checkout, "-m", "bench", "probe")
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout


def test_a_program_in_the_checkout_is_told_what_to_do(python: str, checkout: Path) -> None:
    (checkout / "app.py").write_text("from ftlayer import FTLayer")
    done = run(python, checkout, "app.py")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"from its source directory {checkout.resolve()}, where the extension was not built" in last
    assert "run `pip install -e .` there" in last
