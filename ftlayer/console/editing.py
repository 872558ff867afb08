"""Another payload for a dead letter, which is requeued with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ftlayer.console.asking import by
from ftlayer.console.login import Caller
from ftlayer.console.searching import Console
from ftlayer.errors import ConfigError
from ftlayer.monitor.plans import DEAD
from ftlayer.monitor.row_json import row_of_json
from ftlayer.vertex.calls import Changed, Edit, EditAndRequeue, RecordInfo


def check_editable(console: Console, info: RecordInfo) -> None:
    """Raise `ConfigError` for a record that is no dead letter, or whose payload is masked."""
    if console.options.mask_payloads:
        raise ConfigError("this console masks payloads: it edits none")
    if info.state != DEAD:
        raise ConfigError(f"this record is {info.state}: only dead letters are edited")


def parsed_payload(text: str, schema: pa.Schema) -> pa.RecordBatch:
    """Read a payload as a form gives it. Raises `ConfigError` that says where it is wrong."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"payload: this is not JSON: {error}") from None
    return row_of_json(values, schema)


def requeue_edited(
    console: Console, caller: Caller, vertex: str, info: RecordInfo, payload: pa.RecordBatch
) -> bool:
    """Give a letter this payload, and its attempts back; False where it was gone. Raises what the vertex raises."""
    call = EditAndRequeue((Edit(info.key, payload),), by(caller))
    changed = console.watch.client(vertex).call(call)
    assert isinstance(changed, Changed)
    console.watch.refresh()
    return changed.count == 1


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the columns that differ: name, what was there, what will be."""
    return [
        (name, json.dumps(before.get(name), ensure_ascii=False), json.dumps(value, ensure_ascii=False))
        for name, value in after.items()
        if before.get(name) != value
    ]
