from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest


def run_demo(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftlayer.cli.main", "demo", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **environment},
    )


def watched(link: str, demo: subprocess.Popen[str], store: str) -> dict[str, str]:
    """Return the job of the demo's vertex as the console's API shows it while the demo runs."""
    where, _, token = link.partition("/login?token=")
    request = Request(f"{where}/api/v1/overview", headers={"Authorization": f"Bearer {token}"})
    while demo.poll() is None:
        with urlopen(request, timeout=60) as answer:
            overview = json.load(answer)
        vertices = {vertex["vertex"] for vertex in overview["vertices"] if vertex["path"] == store}
        for job in overview["jobs"]:
            if job["vertex"] in vertices:
                return {name: job[name] for name in ("name", "kind", "mode")}
        time.sleep(0.5)
    return {}


@pytest.mark.spark
def test_vertex_and_driver_are_killed_and_every_line_is_accounted_for(tmp_path: Path) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.json"
    done = run_demo("--kill", "all", "--lines", 3_000, "--batches", 4, "--dir", run, "--json", ledger)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The ledger balances" in done.stdout
    values = json.loads(ledger.read_text())
    assert values["balanced"]
    assert values["records_in"] == 3_000
    assert (
        values["done_first_try"] + values["done_after_replay"] + sum(values["dead_letters"].values()) == 3_000
    )
    assert values["dead_letters"]
    assert [recovery["victim"] for recovery in values["recoveries"]] == ["vertex", "driver"]
    listed = subprocess.run(
        [
            sys.executable,
            "-m",
            "ftlayer.cli.main",
            "inspect",
            str(run / "ft"),
            "--list",
            "dead",
            "--limit",
            "10000",
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert f"{sum(values['dead_letters'].values()):,} listed" in listed.stdout


@pytest.mark.spark
def test_a_tracked_topology_loses_no_line_and_is_seen_in_the_console(tmp_path: Path) -> None:
    ledger, run = tmp_path / "ledger.json", tmp_path / "run"
    arguments = ["--engine", "continuous", "--lines", 3_000, "--batches", 6, "--json", ledger, "--dir", run]
    with subprocess.Popen(
        [sys.executable, "-m", "ftlayer.cli.main", "demo", "--console", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        link = next(line for line in demo.stdout if line.startswith("Open the console: ")).split()[-1]
        seen = watched(link, demo, str(run / "ft"))
        said, _ = demo.communicate(timeout=900)
    assert demo.returncode == 0, said
    assert "The ledger balances" in said
    assert seen == {"name": "demo", "kind": "topology", "mode": "acker"}
    values = json.loads(ledger.read_text())
    assert values["balanced"]
    assert sum(values[f"done_{how}"] for how in ("first_try", "after_replay", "repeated")) == 3_000 - sum(
        values["dead_letters"].values()
    )
    assert values["dead_letters"]
    assert [recovery["victim"] for recovery in values["recoveries"]] == ["slot", "vertex", "driver"]


@pytest.mark.spark
def test_a_topology_with_checkpoints_has_every_line_once_and_exact_counts(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    done = run_demo("--mode", "barrier", "--lines", 3_000, "--batches", 6, "--json", ledger)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The ledger balances" in done.stdout
    values = json.loads(ledger.read_text())
    assert values["balanced"]
    assert values["lost"] == values["duplicated"] == values["miscounted"] == 0
    assert values["done_first_try"] + sum(values["dead_letters"].values()) == 3_000
    assert [recovery["victim"] for recovery in values["recoveries"]] == ["slot", "slot", "driver"]
    assert values["restores"] >= 3
    checkpoints = values["last_checkpoints"]
    assert checkpoints[-1]["kind"] == "final checkpoint"
    assert {row["outcome"] for row in checkpoints} == {"completed"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mode", "barrier", "--engine", "microbatch"), "--engine microbatch, --mode barrier"),
        (("--mode", "barrier", "--kill", "vertex"), "barrier mode has no vertex"),
        (("--kill", "slot"), "a micro-batch query has no slots"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(arguments: tuple[str, ...], said: str) -> None:
    done = run_demo(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("ftlayer: --")
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.spark
def test_a_driver_that_fails_by_itself_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\nif 'ftlayer.demo.driver' in sys.orig_argv: sys.exit('no driver today')\n"
    )
    done = run_demo("--lines", 200, "--dir", tmp_path / "run", PYTHONPATH=str(site))
    assert done.returncode == 1
    assert done.stderr.startswith("ftlayer: the demo's driver ended with code 1; its log ")
    assert "no driver today" in done.stderr
