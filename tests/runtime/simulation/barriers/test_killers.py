"""Records that end the process that works on them, in whole jobs: they alone die, and everything else is exact."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer import FailurePolicy

KILLERS = frozenset({("a", 0, 17), ("a", 1, 5), ("a", 0, 40)})


def places(letters: Any) -> list[tuple[str, int, int]]:
    """Return which records are dead."""
    found = []
    for letter in letters:
        (row,) = pa.ipc.open_stream(letter.payload).read_all().to_pylist()
        found.append((row["source"], row["part"], row["n"]))
    return sorted(found)


def plan(runs: Any, name: str, seed: int, *events: tuple[int, str], **config: Any) -> Any:
    config = {"failures": FailurePolicy(), "interval": "10ms", **config}
    return runs.Plan(name, seed, events=events, config=config, deadly=KILLERS)


@pytest.mark.parametrize(("name", "mode"), [("union", "aligned"), ("forward", "unaligned")])
def test_killers_die_once_and_all_others_are_exact(runs: Any, name: str, mode: str) -> None:
    for seed in range(2):
        run = runs.Run(plan(runs, name, seed, **runs.MODES[mode])).run()
        letters = run.world.letters.values()
        assert places(letters) == sorted(KILLERS)
        assert {letter.operator for letter in letters} == {"passing-a"}
        assert all("twice: Segmentation fault" in letter.attempts[-1].reason for letter in letters)
        assert not run.world.boxes.all


def test_who_is_killed_from_outside_is_not_convicted(runs: Any) -> None:
    for seed in range(3):
        kills = [(90 + 41 * place + 13 * seed, "kill") for place in range(6)]
        run = runs.Run(plan(runs, "counting", seed, *kills)).run()
        assert places(run.world.letters.values()) == sorted(KILLERS)
