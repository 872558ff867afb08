"""Each sample of README and docs, as it is there, in an empty directory: it ends by itself, and shows something.

A snippet that only names things (a broker, a cluster, what a program has already) is marked ``python fragment``.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WAIT_S = 600


def samples() -> Iterator[tuple[str, str]]:
    """Yield page and line, and the code, of every snippet that is a program."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            yield f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 2}", found[1]


SAMPLES = list(samples())


class Programs:
    """A process that runs snippets; what they print is in ``output``."""

    def __init__(self, directory: Path) -> None:
        self.output = directory / "output"
        work = directory / "work"
        work.mkdir()
        settings = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_SUBMIT_ARGS": SUBMIT}
        # As users have it: no daemon of ours has imported anything yet.
        settings["SPARK_SUBMIT_OPTS"] = re.sub(r"-Dspark\S+", "", settings["SPARK_SUBMIT_OPTS"])
        reading, writing = os.pipe()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(RUNNER), str(writing)],
                cwd=work,
                env=settings,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                text=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def run(self, name: str, code: str) -> tuple[str, str]:
        """Return the error of a snippet, "" for none, and what was printed meanwhile."""
        begin = self.output.stat().st_size
        assert self.process.stdin is not None
        assert self.process.poll() is None, f"the process of the samples has ended\n{self.output.read_text()}"
        self.process.stdin.write(json.dumps({"name": name, "code": code}) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], WAIT_S)
        line = self._answers.readline() if ready else ""
        said = self.output.read_bytes()[begin:].decode("utf-8", "replace")
        if not line:
            self.process.kill()
            return f"no answer: it has not ended within {WAIT_S} s, or its process has", said
        return str(json.loads(line)["error"]), said

    def close(self) -> None:
        """End the process, with whatever a sample has left running; its JVM and its vertices end with it."""
        self.process.kill()
        self.process.wait()
        self._answers.close()


RUNNER = Path(__file__).with_name("run_snippets.py")
SUBMIT = "--conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2 pyspark-shell"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], tuple[str, str]]]:
    programs = Programs(tmp_path_factory.mktemp("snippets"))
    yield programs.run
    programs.close()


@pytest.mark.parametrize(("name", "code"), SAMPLES, ids=[name for name, _ in SAMPLES])
def test_a_sample_runs_as_it_is(name: str, code: str, run: Callable[[str, str], tuple[str, str]]) -> None:
    error, said = run(name, code)
    assert not error, f"{error}\n{said[-4_000:]}"
    assert said.strip(), "it shows nothing"
