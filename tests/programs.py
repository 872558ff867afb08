"""Programs that tests need and pip does not bring. A test without one is skipped, and CI refuses skips."""

from __future__ import annotations

import pty
import shutil
from pathlib import Path

import pytest

PACKAGES = {"promtool": "prometheus", "systemd-analyze": "systemd"}
"""Debian's package of a program that is not called as the program is."""


def find_program(name: str, *others: str) -> str:
    """Return where a program of one of these names is. Without one the test is skipped, which says what to install.

    Paths are taken too.
    """
    for each in (name, *others):
        if found := shutil.which(each):
            return found
    called = Path(name).name
    pytest.skip(f"{called} is not installed: apt-get install {PACKAGES.get(called, called)}")


def open_terminal() -> tuple[int, int]:
    """Return the descriptors of a new terminal: what reads and writes it, and what a program gets."""
    try:
        return pty.openpty()
    except OSError as error:
        pytest.skip(f"there are no terminals here ({error}): mount -t devpts devpts /dev/pts")
