"""What users write is checked as strictly as ftlayer is, and finds its types: nothing else runs `typed_programs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_type_checkers_take_what_runs_and_find_what_does_not() -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", "setup.cfg", "tests/typed_programs.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
