"""The vertex's dead letters, and what people did to them, written down for the ledger before the driver ends."""

from __future__ import annotations

import json

from ftlayer import FTLayer
from ftlayer.demo.functions import split_record
from ftlayer.demo.layout import RunDirectory
from ftlayer.vertex.calls import AuditPage, ListAudit

NAMES = {"requeue": "requeued", "edit": "edited", "purge": "purged"}
"""Fields of `ftlayer.demo.ledger.HandChanges` by what the audit log calls a change."""


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
                "edited": bool(letter.edited_by),
                "text": text,
            }
            file.write(json.dumps(entry) + "\n")


def write_changes(layer: FTLayer, directory: RunDirectory) -> None:
    """Write how many letters were requeued, edited and purged, by anybody: the audit log has all of it."""
    changes = dict.fromkeys(NAMES.values(), 0)
    more = b""
    while True:
        page = layer.client.call(ListAudit(more))
        assert isinstance(page, AuditPage)
        for entry in page.entries:
            if entry.what in NAMES:
                changes[NAMES[entry.what]] += entry.count
        more = page.more
        if not more:
            break
    directory.changes.write_text(json.dumps(changes), "utf-8")
