from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from ftlayer.cli.demo.choices import Engine, Kill, Kind, Mode, Victim, doomed, kind_of
from ftlayer.cli.demo.programs import PreparedInput
from ftlayer.cli.demo.run import ACCOUNTS, DemoOptions, explanation, faults, run_demo
from ftlayer.errors import ConfigError


@pytest.mark.parametrize(
    ("mode", "engine", "kind"),
    [
        (Mode.ACKER, None, Kind.QUERY),
        (Mode.ACKER, Engine.MICROBATCH, Kind.QUERY),
        (Mode.ACKER, Engine.CONTINUOUS, Kind.TRACKED),
        (Mode.BARRIER, None, Kind.CHECKPOINTED),
        (Mode.BARRIER, Engine.CONTINUOUS, Kind.CHECKPOINTED),
    ],
)
def test_modes_and_engines(mode: Mode, engine: Engine | None, kind: Kind) -> None:
    assert kind_of(mode, engine) is kind


@pytest.mark.parametrize(
    ("mode", "engine", "kill", "says"),
    [
        (
            Mode.BARRIER,
            Engine.MICROBATCH,
            Kill.ALL,
            "--engine microbatch, --mode barrier: .* leave --engine out",
        ),
        (Mode.BARRIER, None, Kill.VERTEX, "--kill vertex: barrier mode has no vertex; .* --mode acker"),
        (Mode.ACKER, None, Kill.SLOT, "--kill slot: .* no slots; .* --engine continuous"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(
    tmp_path: Path, mode: Mode, engine: Engine | None, kill: Kill, says: str
) -> None:
    options = DemoOptions(mode=mode, engine=engine, kill=kill, directory=tmp_path / "run")
    with pytest.raises(ConfigError, match=says):
        run_demo(options, Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_each_kind_loses_what_it_has() -> None:
    victims = {kind: [victim for victim, _ in doomed(kind, Kill.ALL)] for kind in Kind}
    assert victims[Kind.QUERY] == [Victim.VERTEX, Victim.DRIVER]
    assert victims[Kind.TRACKED] == [Victim.SLOT, Victim.VERTEX, Victim.DRIVER]
    assert victims[Kind.CHECKPOINTED] == [Victim.SLOT, Victim.SLOT, Victim.DRIVER]
    assert doomed(Kind.TRACKED, Kill.NONE) == ()
    assert [victim for victim, _ in doomed(Kind.TRACKED, Kill.VERTEX)] == [Victim.VERTEX]


def test_the_user_is_told_what_will_be_killed() -> None:
    prepared = PreparedInput("some text", 3, 1_000, 20)
    for kind in Kind:
        assert "SIGKILL" not in explanation(kind, prepared, [])
        assert "killed with SIGKILL" in explanation(kind, prepared, [Victim.DRIVER])
        assert "first_try" in ACCOUNTS[kind]
    assert "miscounted" in faults(Kind.CHECKPOINTED)
    assert "miscounted" not in faults(Kind.TRACKED)
