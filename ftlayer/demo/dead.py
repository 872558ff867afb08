"""The vertex's dead letters, written down for the ledger before the driver ends."""

from __future__ import annotations

import json

from ftlayer import FTLayer
from ftlayer.demo.functions import split_record
from ftlayer.demo.layout import RunDirectory


def write_dead_letters(layer: FTLayer, directory: RunDirectory) -> None:
    """Write a line of JSON for each dead letter; the source's records are in a column ``value``."""
    with directory.dead.open("w", encoding="utf-8") as file:
        for letter in layer.list_dead():
            line, text = split_record(letter.payload.column("value")[0].as_py())
            entry = {
                "line": line,
                "reason": letter.reason,
                "operator": letter.operator,
                "attempts": len(letter.history),
                "text": text,
            }
            file.write(json.dumps(entry) + "\n")
