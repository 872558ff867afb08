"""What a user may call is what the reference lists: no instance shows more, and none less."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.job_thread import JobThread

SECTIONS = re.split(
    r"^#+ (?=.*\n)",
    (Path(__file__).parents[2] / "docs" / "reference.md").read_text("utf-8"),
    flags=re.MULTILINE,
)


def names_listed(*headings: str) -> set[str]:
    """Return the names in the first columns of the tables of methods and names below these headings."""
    found: set[str] = set()
    for heading in headings:
        (text,) = (each for each in SECTIONS if each.startswith(f"{heading}\n"))
        for rows in re.findall(r"^\| (?:method|name) \|.*\n\|[- |]+\n((?:\|.*\n)+)", text, re.MULTILINE):
            for row in rows.splitlines():
                found.update(re.findall(r"`(\w+)(?:\([^`]*\))?`", row.split(" | ")[0]))
    return found


def names_shown(instance: object) -> set[str]:
    return {name for name in dir(instance) if not name.startswith("_")}


FACES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "Job": (lambda: Job(JobThread("job-1")), ("Job",)),
}


@pytest.mark.parametrize("name", FACES)
def test_an_instance_shows_what_the_reference_lists(name: str) -> None:
    make, headings = FACES[name]
    instance = make()
    assert type(instance).__name__ == name
    assert names_shown(instance) == names_listed(*headings)
