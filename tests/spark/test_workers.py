"""`python app.py` by an environment's interpreter, not activated, from a directory that is not the script's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftlayer.spark.sessions import own_paths, prepare_workers

WAIT_S = 600


def session(master: str, environment: dict[str, str], **conf: str) -> Any:
    settings = {"spark.master": master, **conf}
    context = SimpleNamespace(environment=environment, pythonExec="python3")
    return SimpleNamespace(
        conf=SimpleNamespace(get=lambda name, default=None: settings.get(name, default)), sparkContext=context
    )


def test_workers_of_a_local_session_run_as_the_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(sys, "path", ["", "/scripts", *sys.path])
    environment = {"PYTHONPATH": "/given"}
    spark = session("local[2]", environment)
    prepare_workers(spark)
    prepare_workers(spark)
    assert spark.sparkContext.pythonExec == sys.executable
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == [os.getcwd(), "/scripts"]
    assert paths[-1] == "/given"
    assert len(set(paths)) == len(paths)


def test_of_the_path_only_what_comes_before_the_standard_library_goes_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", ["/scripts", *[path for path in sys.path if "lib/python" in path]])
    assert own_paths() == ["/scripts"]


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://host"])
def test_workers_on_other_machines_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    environment: dict[str, str] = {}
    spark = session(master, environment)
    prepare_workers(spark)
    assert spark.sparkContext.pythonExec == "python3"
    assert not environment


def test_an_interpreter_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    spark = session("local", {}, **{"spark.pyspark.python": "/opt/python"})
    prepare_workers(spark)
    assert spark.sparkContext.pythonExec == "python3"
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    spark = session("local", {})
    prepare_workers(spark)
    assert spark.sparkContext.pythonExec == "python3"


@pytest.mark.spark
def test_a_script_with_a_module_beside_it_runs_without_activation(tmp_path: Path) -> None:
    wrong = tmp_path / "bin"
    wrong.mkdir()
    (wrong / "python3").write_text(
        "#!/bin/sh\necho 'this is not the interpreter of the program' >&2\nexit 1\n"
    )
    (wrong / "python3").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "PYTHON"))
    }
    # As users have it: no daemon of ours has imported anything yet.
    settings["SPARK_SUBMIT_OPTS"] = re.sub(r"-Dspark\S+", "", settings["SPARK_SUBMIT_OPTS"])
    settings |= {"PATH": f"{wrong}{os.pathsep}{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    app = Path(__file__).with_name("script") / "app.py"
    done = subprocess.run(
        [sys.executable, str(app)],
        cwd=work,
        env=settings,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    assert (work / "doubled").read_text() == "2 4 6"
    assert sorted((work / "negative").read_text().split()) == ["-1", "-2", "-3"]
