"""Real lines for the fault tests, the job that gets killed, and the check of what it leaves."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import children_of

from ftlayer.spark.facade import list_records
from ftlayer.spark.tracked import plan_of

MOST_FILES = 8
"""A kill at each of the seven steps, each in a batch of its own, and one more batch."""
LINES_A_FILE = 150


def _load(name: str) -> ModuleType:
    """Load a script of this directory, which is no package."""
    spec = importlib.util.spec_from_file_location(f"faults_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Load a script of this directory by its name."""
    return _load


@pytest.fixture(scope="session")
def job_script() -> ModuleType:
    """The module `driver_job`."""
    return _load("driver_job")


@pytest.fixture(scope="session")
def log_lines(real_lines: list[str]) -> list[str]:
    """The lines of the largest job; equal ones among them."""
    return real_lines[: MOST_FILES * LINES_A_FILE]


def _write_files(lines: list[str], directory: Path, files: int) -> None:
    """Write the lines to ``files`` files of a new directory."""
    directory.mkdir(parents=True)
    now = int(time.time())
    size = -(-len(lines) // files)
    for number in range(files):
        part = lines[number * size : (number + 1) * size]
        file = directory / f"{number:03}.txt"
        file.write_text("".join(f"{line}\n" for line in part))
        # Spark reads the oldest first; these would be of one age.
        os.utime(file, (now - files + number,) * 2)


@pytest.fixture(scope="session")
def write_files() -> Callable[[list[str], Path, int], None]:
    """Write lines to a number of files in a new directory."""
    return _write_files


class JobRun:
    """One job: its directory, its lives, and the check at the end. A batch is a file."""

    def __init__(self, script: ModuleType, directory: Path, lines: list[str], files: int) -> None:
        self.script = script
        self.directory = directory
        self.lines = lines[: files * LINES_A_FILE]
        _write_files(self.lines, directory / "input", files)

    def job(self, **fields: Any) -> Any:
        return self.script.Job(str(self.directory), **fields)

    def launch(self, job: Any) -> subprocess.Popen[bytes]:
        """Start a life of the job."""
        (self.directory / "started").unlink(missing_ok=True)
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, self.script.__file__, str(job.save())], stdout=log, stderr=log
            )

    def run(self, job: Any, timeout_s: float = 900) -> int:
        """Run a life to its end; return the exit code."""
        process = self.launch(job)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job did not end within {timeout_s} s\n{self.log()}")
        finally:
            process.kill()
            process.wait()

    def log(self) -> str:
        """Return the end of what the job printed."""
        return (self.directory / "log").read_text("utf-8", "replace")[-6_000:]

    def has_said(self, text: str) -> bool:
        """Whether a life has printed ``text``; ``log()`` may end with tracebacks of other threads."""
        return text in (self.directory / "log").read_text("utf-8", "replace")

    def result(self) -> dict[str, Any]:
        file = self.directory / "result.json"
        assert file.exists(), self.log()
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    def await_started(self, process: subprocess.Popen[bytes], timeout_s: float = 900) -> None:
        """Wait until a life has started its queries."""
        deadline = time.monotonic() + timeout_s
        while not (self.directory / "started").exists():
            assert process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)

    def kill_jvm(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the JVM of a life with SIGKILL."""
        (jvm,) = children_of(process.pid, called="java")
        os.kill(jvm, signal.SIGKILL)

    def kills(self) -> int:
        """Return how often the job has been killed so far."""
        return len((self.directory / "kills").read_text().split())

    def sink_calls(self) -> Counter[tuple[str, int]]:
        """Return how often the sink was called for each (query, batch); what is committed is not run again."""
        calls: Counter[tuple[str, int]] = Counter()
        committed: set[tuple[str, int]] = set()
        for _, query, batch, step in self.script.read_journal(self.directory):
            if step == "sealed":
                calls[query, batch] += 1
            elif step == "committed":
                committed.add((query, batch))
            assert step != "run" or (query, batch) not in committed
        return calls

    def check(self) -> dict[str, Any]:
        """Check sinks and dead letters against the recount; return the job's result."""
        result = self.result()
        rows, dead = self.script.expected(self.lines)
        assert dead, "lines that fail for good belong to the test"
        for kind in self.script.SINKS:
            letters = [letter[1:] for letter in result["dead"] if letter[0] == kind]
            found = Counter(line for _, line, _ in letters)
            missing, extra = dead - found, found - dead
            histories = [letter for letter in letters if letter[1] in extra]
            assert not missing, (kind, missing, extra, histories)
            assert not extra, (kind, histories)
            # No attempt is used up by what was killed.
            assert {len(history) for _, _, history in letters} == {self.script.MAX_ATTEMPTS}
            status = {
                name: count for name, count in result["status"][kind].items() if name != "next_due_in_ms"
            }
            assert status == dict.fromkeys(status, 0) | {"dead": sum(dead.values())}
            content = self.script.written(self.directory / kind)
            self._check_sink(kind, rows, content)
        return result

    def _check_sink(self, kind: str, rows: Counter[str], content: dict[str, Counter[str]]) -> None:
        calls = self.sink_calls()
        if kind == "append":
            # A batch may be there once for each call of the sink, and no more; its first time is what counts.
            by_batch: dict[int, list[Counter[str]]] = {}
            for name, part in content.items():
                by_batch.setdefault(int(name.split("-")[0]), []).append(part)
            for batch, parts in by_batch.items():
                assert len(parts) <= calls[kind, batch]
            doubled = {batch for batch, parts in by_batch.items() if len(parts) > 1}
            assert doubled <= {batch for (query, batch), n in calls.items() if query == kind and n > 1}
            content = {str(batch): parts[0] for batch, parts in by_batch.items()}
        found: Counter[str] = sum(content.values(), Counter())
        missing, extra = rows - found, found - rows
        assert not missing, (kind, missing, extra)
        assert not extra, (kind, extra)


@pytest.fixture
def make_job(job_script: ModuleType, tmp_path: Path, log_lines: list[str]) -> Callable[[int], JobRun]:
    """Return ``make_job(files)``: a job over the real lines, in the test's directory."""
    return lambda files: JobRun(job_script, tmp_path, log_lines, files)


class Written:
    """A sink in the driver's memory: its calls in order, each (batch, rows as `Counter` of values)."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Counter[Any]]] = []

    def __call__(self, rows: Any, batch: int) -> None:
        self.calls.append((batch, Counter(tuple(row) for row in rows.collect())))

    @property
    def rows(self) -> Counter[Any]:
        """Return what a sink that overwrites by batch id would hold."""
        return sum(dict(self.calls).values(), Counter())


class Wrapped:
    """Runs wrapped queries in this process over one embedded vertex."""

    MAX_ATTEMPTS = 3

    def __init__(self, spark: Any, directory: Path) -> None:
        from ftlayer.spark.facade import FTLayer

        self.spark = spark
        self._directory = directory
        self._names = iter(range(1_000))
        self.layer = FTLayer.embedded(
            directory / "store", max_attempts=self.MAX_ATTEMPTS, backoff="50ms", jitter=0.0
        )

    def source(self, lines: list[str], files: int) -> Any:
        """Wrap a new source of ``files`` files; a batch reads one."""
        name = f"lines{next(self._names)}"
        _write_files(lines, self._directory / name, files)
        frame = self.spark.readStream.format("text").option("maxFilesPerTrigger", 1)
        return self.layer.source(frame.load(str(self._directory / name)), name=name)

    def writer(self, stream: Any, sink: Any) -> Any:
        """End the stream in ``sink``, to be run to its end."""
        checkpoint = self._directory / f"checkpoint-{plan_of(stream).source.name}"
        return stream.sink(sink, checkpoint=str(checkpoint)).trigger(availableNow=True)

    def finish(self, writer: Any, timeout_s: float = 900) -> Any:
        """Start the query and wait for its end; return its handle."""
        query = writer.start()
        try:
            assert query.awaitTermination(timeout_s), f"it has not ended; {query.last_failure}"
        finally:
            query.stop()
        return query

    def dead(self, stream: Any) -> dict[str, Any]:
        """Return the dead letters of a stream by the line they hold."""
        letters = [
            letter
            for letter in list_records(self.layer.client, "dead")
            if letter.stream.endswith(f"/{plan_of(stream).source.name}")
        ]
        return {letter.payload[0][0].as_py(): letter for letter in letters}


@pytest.fixture(scope="module")
def wrapped(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wrapped]:
    """Wrapped queries on the shared session."""
    wrapped = Wrapped(spark, tmp_path_factory.mktemp("wrapped"))
    yield wrapped
    wrapped.layer.close()


@pytest.fixture
def written() -> Written:
    """A sink in memory."""
    return Written()
