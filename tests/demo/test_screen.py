from __future__ import annotations

import io

from rich.console import Console

from ftlayer.cli.demo.choices import Victim
from ftlayer.cli.demo.driver import Progress, Started, Starting
from ftlayer.cli.demo.run import Screen, TopologyTally
from ftlayer.cli.demo.supervisor import Happening, Killed

HAPPENINGS: list[Happening] = [
    Started(),
    Progress(50, 1, [7, 8], {"restores": 1}),
    Killed(Victim.SLOT, "when 50 lines had been read"),
]


def shown(*, terminal: bool) -> list[str]:
    console = Console(width=80, force_terminal=terminal, color_system=None, file=io.StringIO())
    with Screen(console, TopologyTally(), "what will happen", 100) as screen:
        for happening in HAPPENINGS:
            screen.show(happening)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_terminal_has_headings_figures_and_events() -> None:
    lines = shown(terminal=True)
    at = max(number for number, line in enumerate(lines) if line.split() == ["read", "restores"])
    assert lines[at + 1].split() == ["50", "1"]
    assert "slot killed (SIGKILL) when 50 lines had been read" in lines[at + 2]


def test_elsewhere_there_are_plain_lines() -> None:
    text = "\n".join(shown(terminal=False))
    assert "what will happen" in text
    assert "] 50 lines read, 1 restores" in text
    assert "] slot killed (SIGKILL) when 50 lines had been read" in text


def test_what_is_being_started_is_said_with_its_time() -> None:
    console = Console(width=80, force_terminal=False, color_system=None, file=io.StringIO())
    with Screen(console, TopologyTally(), "what will happen", 100) as screen:
        for happening in (Starting("Spark"), Starting("the vertex"), Started()):
            screen.show(happening)
    assert isinstance(console.file, io.StringIO)
    said = [
        line.partition("] ")[2] for line in console.file.getvalue().splitlines() if " started in " in line
    ]
    assert [line.partition(" started in ")[0] for line in said] == ["Spark", "the vertex"]
