"""Each tutorial, followed from its first line to its last by `tutorial_reader`."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SUBMIT = "--conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2 pyspark-shell"

WITH_A_STORE = ("docs/start/ten-minutes.md", "docs/tutorials/dead-letters.md")


@pytest.fixture(scope="module")
def reader(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(Path(__file__).with_name("tutorial_reader.py"))


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A user's activated environment. Sockets are in its temporary directory, whose path has to be short."""
    settings = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_SUBMIT_ARGS": SUBMIT, "COLUMNS": "120"}
    settings["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{settings['PATH']}"
    settings["SPARK_SUBMIT_OPTS"] = re.sub(r"-Dspark\S+", "", settings["SPARK_SUBMIT_OPTS"])
    # A program finds what is beside it.
    settings.pop("PYTHONSAFEPATH", None)
    with tempfile.TemporaryDirectory(prefix="ft-", ignore_cleanup_errors=True) as temporary:
        yield settings | {"TMPDIR": temporary}


@pytest.mark.spark
@pytest.mark.parametrize(
    "page",
    [
        "docs/start/ten-minutes.md",
        "docs/tutorials/dead-letters.md",
        # They kill drivers, and start each of them again. The first one takes one and a half minutes.
        pytest.param("docs/tutorials/exact-state.md", marks=pytest.mark.campaign),
        pytest.param("docs/tutorials/webhook-to-postgres.md", marks=pytest.mark.faults),
    ],
)
def test_a_tutorial_goes_as_its_page_says(page: str, reader: ModuleType, environment: dict[str, str]) -> None:
    # Not pytest's own directory: sockets lie there, whose paths have to be short.
    work, logs = Path(environment["TMPDIR"], "work"), Path(environment["TMPDIR"], "logs")
    work.mkdir()
    logs.mkdir()
    if page in WITH_A_STORE:
        # Commands leave out what else runs on this machine, other tests.
        environment["FTLAYER_ADDRESS"] = str(work / "ft-store")
    seen = reader.Reader(work, environment, logs).follow((ROOT / page).read_text("utf-8"))
    assert seen >= 7
