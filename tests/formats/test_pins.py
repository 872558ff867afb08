"""A format does not change without a new number: what its numbers are, and what classes it is made of."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage import dead_letters as letter_table
from ftlayer.checkpoint.storage import loading as metadata
from ftlayer.checkpoint.storage import report as last_reports
from ftlayer.checkpoint.storage.loading import JobResult
from ftlayer.connectors import queue_stream as spool
from ftlayer.connectors.at_least_once import SentMessage
from ftlayer.connectors.delta import DeltaMessage
from ftlayer.connectors.files.listing import FilePieces
from ftlayer.connectors.files.sink import FileMessage
from ftlayer.connectors.iceberg import IcebergMessage
from ftlayer.connectors.kafka.client import KafkaMessage
from ftlayer.connectors.logs import LogRange
from ftlayer.connectors.nats.sink import NatsMessage
from ftlayer.connectors.postgres.sink import PostgresMessage
from ftlayer.connectors.redis import RedisMessage
from ftlayer.runtime.protocol import channel_frames
from ftlayer.spark.query import checkpoint as mark
from ftlayer.state.snapshots import serializer
from ftlayer.vertex.calls import Attempt, JobDetails
from ftlayer.vertex.rules import board as entries
from ftlayer.vertex.rules import dedupe
from ftlayer.vertex.rules import source_ranges as ranges
from ftlayer.vertex.service import directory
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store import lmdb_store as lmdb_environment
from ftlayer.vertex.store import rows, streams

SHAPES = Path(__file__).with_name("shapes.txt")
PAGE = Path(__file__).parents[2] / "docs" / "project" / "versions.md"

NUMBERS = {
    "store": lmdb_environment.FORMAT_VERSION,
    "store: rows": rows._FORMAT,
    "store: failed record": failed._FORMAT,
    "store: sealed batch": streams._BATCH_FORMAT,
    "store: ranges of a source": ranges._FORMAT,
    "store: job on the board": entries._JOB_FORMAT,
    "vertex": directory._FORMAT,
    "checkpoint and savepoint": metadata.VERSION,
    "state": serializer.VERSION,
    "records in flight": channel_frames.VERSION,
    "dead letters of checkpoints": letter_table._VERSION,
    "last report of a job": last_reports._FORMAT,
    "mark of a query": mark.FORMAT_VERSION,
    "spool": spool._FORMAT,
}

PARTS: dict[str, list[Any]] = {
    "checkpoint and savepoint": [Checkpoint],
    "dead letters of checkpoints": [ChainLetter, Attempt],
    "last report of a job, and job on the board": [JobDetails],
    "result of a job": [JobResult],
    "store: rows and sealed batches": [
        rows.StoredAttempt,
        failed.KeptName,
        streams.StoredEmit,
        ranges.StoredPartition,
    ],
    "store: replies": list(dedupe._KINDS),
    "pickles of sinks, in checkpoints": [
        DeltaMessage,
        FileMessage,
        IcebergMessage,
        KafkaMessage,
        NatsMessage,
        PostgresMessage,
        RedisMessage,
        SentMessage,
    ],
    "pickles of sources, in checkpoints": [FilePieces, LogRange],
}


def classes_in(hint: Any) -> Iterator[Any]:
    """Yield the dataclasses and named tuples that a type hint names."""
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        yield hint
    for argument in typing.get_args(hint):
        yield from classes_in(argument)


def text_of(hint: Any) -> str:
    """Return a type hint without the modules of its names."""
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"\b(\w+\.)+(?=\w)", "", text)


def shape(kind: Any, hints: dict[str, Any]) -> str:
    """Return a class with its fields, in their order; "=" is behind those that may be missing in what is read."""
    optional = getattr(kind, "_field_defaults", {}) or {
        field.name
        for field in (dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ())
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    fields = (f"{name}: {text_of(hint)}{' =' if name in optional else ''}" for name, hint in hints.items())
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(fields)})"


def shapes() -> str:
    """Return all parts of all formats as text."""
    lines = []
    for part, kinds in PARTS.items():
        lines.append(f"# {part}")
        seen, left = set(), list(kinds)
        while left:
            kind = left.pop(0)
            if kind in seen:
                continue
            seen.add(kind)
            names = (
                kind._fields if hasattr(kind, "_fields") else [each.name for each in dataclasses.fields(kind)]
            )
            known = typing.get_type_hints(kind)
            hints = {name: known[name] for name in names}
            lines.append(shape(kind, hints))
            left += [found for hint in hints.values() for found in classes_in(hint)]
    return "\n".join(lines) + "\n"


def test_a_class_that_is_written_does_not_change() -> None:
    """Anything but a field more with a default needs a new number of its format.

    A field more needs the number too: an older ftlayer refuses fields that it does not know, and without the number it
    calls the file damaged. Between versions nothing of that holds. ``python tests/formats/test_pins.py`` writes
    `shapes.txt` anew.
    """
    assert shapes() == SHAPES.read_text("utf-8"), test_a_class_that_is_written_does_not_change.__doc__


def test_the_page_has_the_numbers() -> None:
    table = PAGE.read_text("utf-8").split("| format | number | where |")[1].split("\n\n")[0]
    cells = ([cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:])
    assert {name: int(number) for name, number, _ in cells} == NUMBERS


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*/*.tar.xz")), ids=lambda path: path.name)
def test_fixtures_are_small(path: Path) -> None:
    assert path.stat().st_size < 20_000


if __name__ == "__main__":
    SHAPES.write_text(shapes(), "utf-8")
