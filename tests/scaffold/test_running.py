"""Projects as a user meets them: made in an empty directory by an interpreter that is not activated, then run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

pytestmark = pytest.mark.spark

WAIT_S = 600
VARIANTS = {
    "query": (),
    "acker": ("--kind", "topology"),
    "barrier": ("--kind", "topology", "--mode", "barrier"),
}


def environment() -> dict[str, str]:
    """Return this process' variables, without what would help a program to find its interpreter."""
    left_out = (
        *("VIRTUAL_ENV", "PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"),
        "PYTHONSAFEPATH",  # It is these tests' own.
    )
    given = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**given, "PATH": "/usr/bin:/bin", "SPARK_LOCAL_IP": "127.0.0.1", "PYTEST_ADDOPTS": ""}


def run(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(params=VARIANTS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    said = run(tmp_path, "-m", "ftlayer.cli.main", "new", "shop", *VARIANTS[request.param])
    printed = said.partition("cd shop\n")[2].split()[0]
    assert os.path.samefile(printed, sys.executable)
    return tmp_path / "shop"


def test_its_own_tests_pass(shop: Path) -> None:
    said = run(shop, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in said
    assert "skipped" not in said


class Program:
    """The project's program; its log is gathered over its lives."""

    def __init__(self, shop: Path) -> None:
        self.shop = shop
        self.log = shop.parent / "log"
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shop"],
                cwd=self.shop,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def rows(self) -> list[dict[str, Any]]:
        """Return what is committed."""
        out = self.shop / "out"
        files = [str(path) for path in out.glob("*.parquet")]
        read: list[dict[str, Any]] = (
            ds.dataset(files, format="parquet").to_table().to_pylist() if files else []
        )
        return read

    def orders(self) -> set[str]:
        """Return the ids of what is committed."""
        return {row["order_id"] for row in self.rows()}

    def stop(self) -> None:
        """Stop it as systemd does, once it listens to signals."""
        self.until(lambda: self.log.read_text().count("runs; Ctrl-C") == self.lives)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0, self.log.read_text()

    def feed(self, number: int, count: int) -> None:
        text = run(self.shop, "-m", "shop.sample", str(count), str(number * 1_000_000))
        hidden = self.shop / "data" / ".new"
        hidden.write_text(text)
        hidden.rename(self.shop / "data" / f"orders-{number}.jsonl")


@pytest.fixture
def program(shop: Path) -> Iterator[Program]:
    program = Program(shop)
    yield program
    program.process.kill()
    program.process.wait()


@pytest.mark.campaign
def test_it_goes_on_behind_a_kill_and_behind_a_stop(program: Program) -> None:
    """Each order of the sample is there, in a query and in barrier mode once. SIGTERM is enough to stop it."""
    good = 5
    program.until(lambda: len(program.rows()) >= good)
    for number in range(2, 6):
        program.feed(number, 10_000)
    program.until(lambda: len(program.rows()) > good)
    program.process.kill()
    program.process.wait()
    program.start()
    good += 4 * 9_900
    program.until(lambda: len(program.orders()) >= good)
    program.stop()
    program.feed(6, 10_000)
    program.start()
    good += 9_900
    program.until(lambda: len(program.orders()) >= good)
    program.stop()

    rows = program.rows()
    assert len(program.orders()) == good
    has_totals = "total" in rows[0]
    if has_totals or (program.shop / "state" / "checkpoint").exists():  # All but acker mode.
        assert len(rows) == good
    if has_totals:
        for customer in {row["customer"] for row in rows}:
            of_customer = [row for row in rows if row["customer"] == customer]
            assert max(row["total"] for row in of_customer) == sum(row["cents"] for row in of_customer)
    log = program.log.read_text()
    assert "dead letter" in log
    assert log.count("stopped") == 2
