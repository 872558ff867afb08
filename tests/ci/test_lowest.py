"""The lowest versions that are tested are those that `setup.cfg` says."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TOOLS = {"test", "docs", "bench", "bench-flink"}
"""Extras of those who work on ftlayer: CI has the newest."""


def required() -> dict[str, Version]:
    """Return the lower bound of each dependency in setup.cfg, extras for users among them."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    lists = [config["options"]["install_requires"]]
    lists += [text for extra, text in config["options.extras_require"].items() if extra not in TOOLS]
    bounds: dict[str, Version] = {}
    for line in "\n".join(lists).split("\n"):
        if line.strip():
            one = Requirement(line)
            (lowest,) = (each.version for each in one.specifier if each.operator in (">=", "=="))
            assert bounds.setdefault(one.name, Version(lowest)) == Version(lowest), one.name
    return bounds


def test_each_lower_bound_is_what_is_installed() -> None:
    text = (ROOT / ".ci" / "lowest.txt").read_text("utf-8")
    pinned = {
        name: Version(version) for name, version in re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE)
    }
    assert pinned == required()
