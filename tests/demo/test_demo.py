from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_demo(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftlayer.cli.main", "demo", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **environment},
    )


@pytest.mark.spark
@pytest.mark.faults
def test_vertex_and_driver_are_killed_and_every_line_is_accounted_for(tmp_path: Path) -> None:
    run, ledger = tmp_path / "run", tmp_path / "ledger.json"
    done = run_demo("--kill", "all", "--lines", 3_000, "--batches", 4, "--dir", run, "--json", ledger)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The ledger balances" in done.stdout
    assert f"ftlayer dead list --store {run / 'ft'} " in done.stdout
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
        "import sys\nif 'ftlayer.cli.demo.driver' in sys.orig_argv: sys.exit('no driver today')\n"
    )
    done = run_demo("--lines", 200, "--dir", tmp_path / "run", PYTHONPATH=str(site))
    assert done.returncode == 1
    assert done.stderr.startswith("ftlayer: the demo's driver ended with code 1; its log ")
    assert "no driver today" in done.stderr
