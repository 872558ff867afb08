"""Programs that tests need and pip does not bring, and which processes run.

A test without its program is skipped, and CI refuses skips.
"""

from __future__ import annotations

import os
import pty
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PACKAGES = {"promtool": "prometheus", "systemd-analyze": "systemd"}
"""Debian's package of a program that is not called as the program is."""


def find_program(name: str, *others: str) -> str:
    """Return where a program of one of these names is. Without one the test is skipped, which says what to install.

    Paths are taken too. Programs of this environment come first, activated or not.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    for each in (name, *others):
        if found := shutil.which(each, path=path):
            return found
    called = Path(name).name
    pytest.skip(f"{called} is not installed: apt-get install {PACKAGES.get(called, called)}")


def open_terminal() -> tuple[int, int]:
    """Return the descriptors of a new terminal: what reads and writes it, and what a program gets."""
    try:
        return pty.openpty()
    except OSError as error:
        pytest.skip(f"there are no terminals here ({error}): mount -t devpts devpts /dev/pts")


def children_of(pid: int, called: str = "") -> list[int]:
    """Return the processes that a process has started and that still run; or those of them with a program's name."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # A thread may end between these two lines.
            found += (task / "children").read_text().split()
    return [child for child in map(int, found) if is_running(child, called)]


def is_running(pid: int, called: str = "") -> bool:
    """Return whether there is such a process. One that has ended and was not waited for does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    name, _, rest = stat.partition("(")[2].rpartition(") ")
    return rest[0] not in "ZX" and called in ("", name)
