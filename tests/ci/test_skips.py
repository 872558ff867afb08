"""With CI set, a skipped test that is not on the list fails the run; failures are named as they come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LISTED = "test_a_full_file_system_refuses_intake_and_not_deletes"


def run(directory: Path, *, body: str, ci: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Run a test file under the project's conftest."""
    for name in ("conftest.py", "draws.py", "programs.py", "spark_home.py"):
        (directory / name).write_text((TESTS / name).read_text("utf-8"), "utf-8")
    (directory / "test_it.py").write_text(f"import pytest\n{body}\n")
    (directory / "test_another.py").write_text("def test_passes(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(processes), str(directory)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=directory, env={**os.environ, "CI": ci}, check=False
    )


UNLISTED = "@pytest.mark.parametrize('n', [1])\ndef test_unlisted(n): pytest.skip('no such thing here')"
OF_A_MODULE = "import pytest\npytest.importorskip('no_such_module')"


@pytest.mark.parametrize("processes", [0, 1])
def test_an_unlisted_skip_fails(tmp_path: Path, processes: int) -> None:
    """One in a test, and one of a module."""
    (tmp_path / "test_module.py").write_text(OF_A_MODULE)
    done = run(tmp_path, body=UNLISTED, ci="true", processes=processes)
    assert "test_it.py::test_unlisted[1] was skipped" in done.stdout
    assert "test_module.py was skipped" in done.stdout
    assert "ALLOWED_SKIPS in tests/conftest.py" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    ("body", "ci"),
    [(UNLISTED, ""), (f"def {LISTED}(): pytest.skip('root')", "true")],
    ids=["elsewhere", "listed"],
)
def test_others_do_not(tmp_path: Path, body: str, ci: str) -> None:
    done = run(tmp_path, body=body, ci=ci, processes=0)
    assert done.returncode == 0, done.stdout
    assert "was skipped" not in done.stdout


def test_the_list_names_tests_that_there_are() -> None:
    assert any(f"def {LISTED}(" in path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))


def test_a_failed_test_is_named_when_it_fails(tmp_path: Path) -> None:
    """One whose process dies, too."""
    (tmp_path / "test_zero.py").write_text("def test_zero(): assert [] == [0]")
    done = run(tmp_path, body="import os\ndef test_dies(): os._exit(3)", ci="", processes=1)
    said = done.stdout.partition("= FAILURES =")[0]
    assert "test_it.py::test_dies: worker 'gw0' crashed" in said
    assert "test_zero.py::test_zero: " in said
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
