"""Sides that run in turn, their ratios, and what the benchmarks' command line takes."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench.__main__ as command
from bench import harness
from bench.harness import Run, Target, compared, in_turn, spread
from bench.sides import RATIOS, SIDES


def test_rounds_have_every_side_once_and_every_second_one_is_backwards() -> None:
    order: list[str] = []

    def side(name: str) -> Run:
        order.append(name)
        return Run(float(len(order)))

    runs = in_turn({name: lambda name=name: side(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(order) == "abccbaabc"
    assert {name: [run.rate for run in each] for name, each in runs.items()} == {
        "a": [1, 6, 7],
        "b": [2, 5, 8],
        "c": [3, 4, 9],
    }


rates = st.floats(0.1, 1e7)


@given(st.lists(st.tuples(rates, rates, rates, rates), min_size=1, max_size=9))
def test_a_ratio_is_that_of_two_runs_of_one_round(rounds: list[tuple[float, ...]]) -> None:
    runs = {
        "ours": [Run(rate, cpu) for rate, _, cpu, _ in rounds],
        "theirs": [Run(rate, cpu) for _, rate, _, cpu in rounds],
        "unmeasured": [Run(1.0) for _ in rounds],
    }
    found = compared(
        runs,
        {"vs": ("ours", "theirs"), "vs_none": ("ours", "absent"), "vs_unmeasured": ("ours", "unmeasured")},
    )
    ratios = sorted(ours / theirs for ours, theirs, _, _ in rounds)
    assert (found["vs_lowest"], found["vs_highest"]) == (ratios[0], ratios[-1])
    assert found["vs"] == statistics.median(ratios)
    assert found["vs_by_cpu"] == statistics.median(theirs / ours for _, _, ours, theirs in rounds)
    assert found["records_per_s_theirs"] == statistics.median(rate for _, rate, _, _ in rounds)
    assert found["cpu_us_ours"] == statistics.median(cpu for _, _, cpu, _ in rounds)
    assert "vs_none" not in found
    assert "vs_unmeasured" in found
    assert not {"vs_unmeasured_by_cpu", "cpu_us_unmeasured"} & found.keys()


def test_every_ratio_of_the_engines_is_over_sides_that_there_are() -> None:
    assert {side for sides in RATIOS.values() for side in sides} <= set(SIDES)
    assert len(set(SIDES)) == len(SIDES)


def test_what_the_command_line_offers_can_be_run_and_has_targets() -> None:
    for name in command.names():
        found = importlib.util.find_spec(f"bench.{name}")
        assert found is not None
        text = Path(found.origin or "").read_text("utf-8")
        assert "\ndef run(quick: bool" in text, name
        assert "\nTARGETS" in text, name


def test_a_range_stands_beside_its_median(capsys: pytest.CaptureFixture[str]) -> None:
    harness.report("probe", {**spread("vs", [3.0, 1.0, 2.0]), "alone": 7.0}, {"vs": Target(at_least=2.5)})
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "│ vs" in line)
    assert "1 to 3" in row
    assert "✗" in row
    assert "lowest" not in said


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A benchmark that says how it was called; its name is `acker`."""
    module = types.ModuleType("bench.acker")

    def run(quick: bool, pairs: int) -> dict[str, float]:
        return {"quick": quick, "pairs": pairs}

    module.TARGETS, module.run = {}, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.acker", module)
    monkeypatch.setattr(harness, "_notes", [])
    monkeypatch.setattr(harness, "_kept", {})
    return module


@pytest.mark.parametrize(
    ("arguments", "pairs", "few"),
    [
        ([], 7, False),
        (["--quick"], 1, True),
        (["--quick", "--pairs", "9"], 9, False),
        (["--pairs=3"], 3, True),
    ],
)
def test_fewer_pairs_than_seven_are_said_to_be_few(
    probe: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    pairs: int,
    few: bool,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "acker", *arguments])
    command.main()
    said = " ".join(capsys.readouterr().out.split())
    assert f"the median of {pairs} interleaved pair" in said
    assert ("fewer than the 7" in said) is few
    assert harness._kept == {"pairs": pairs}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--pairs", "0"], "--pairs: expected 1 or more, got 0"),
        (["--pyflink"], "acker takes no --pyflink"),
        (["slots"], "acker has no slots; it has no parts"),
    ],
)
def test_what_a_benchmark_does_not_take_is_said(
    probe: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    error: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "acker", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert error in capsys.readouterr().err
