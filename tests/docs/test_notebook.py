"""The example notebook: all its cells run, in an empty directory, and show what it has kept of them."""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "notebook.ipynb"
SUBMIT = "--conf spark.ui.enabled=false pyspark-shell"
CELL_S = 300


@pytest.fixture(scope="module")
def kept() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture
def environment() -> Any:
    """A user's activated environment. Sockets are in its temporary directory, whose path has to be short."""
    settings = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_SUBMIT_ARGS": SUBMIT}
    settings["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{settings['PATH']}"
    settings["SPARK_SUBMIT_OPTS"] = re.sub(r"-Dspark\S+", "", settings["SPARK_SUBMIT_OPTS"])
    with tempfile.TemporaryDirectory(prefix="ft-", ignore_cleanup_errors=True) as temporary:
        yield settings | {"TMPDIR": temporary, "IPYTHONDIR": temporary}


def tables(notebook: Any) -> list[str]:
    """Return the results of all cells as text: tables and numbers, which are the same in every run."""
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.data["text/plain"] for output in shown if output.output_type == "execute_result"]


@pytest.mark.spark
def test_the_notebook_runs_and_shows_what_it_has_kept(
    kept: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    notebook = copy.deepcopy(kept)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    client = NotebookClient(
        notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)
    without_names = [re.sub(r"0x[0-9a-f]+", "…", text) for text in tables(notebook)]
    assert without_names == [re.sub(r"0x[0-9a-f]+", "…", text) for text in tables(kept)]
    assert len(without_names) >= 8
