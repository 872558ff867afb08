"""Where orders come from: files of JSON lines, and those that come later."""

from __future__ import annotations

import os
from typing import Any

from ftlayer import StreamEnvironment
from ftlayer.sources import FilesSource

from .functions import Order, parse
from .settings import STATE


def add_source(env: StreamEnvironment) -> Any:
    """Begin the topology with the lines of the files."""
    path = os.environ.get("SOURCE_PATH", "data/*.jsonl")
    source = FilesSource(path, "text", journal=STATE / "journal")
    return env.source(source, uid="source")


def order_of(row: tuple[Any, ...]) -> Order:
    """Make an order of a line: path, offset and text."""
    return parse(row[2])
