"""Which fixtures there are."""

from __future__ import annotations

import tarfile
from pathlib import Path

from write_fixtures import CHECKPOINTS

HERE = Path(__file__).parent
VERSIONS = sorted(path.parent.name for path in HERE.glob("*/heap.tar.xz"))
"""Versions of ftlayer that have written fixtures of everything."""

__all__ = ["CHECKPOINTS", "VERSIONS", "unpack"]


def unpack(version: str, name: str, target: Path) -> None:
    """Unpack a fixture into a directory."""
    with tarfile.open(HERE / version / f"{name}.tar.xz") as tar:
        tar.extractall(target)  # Of files of ours: they need no filter, which Python has since 3.11.4.
