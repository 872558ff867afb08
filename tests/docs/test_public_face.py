"""What a user may call is what the reference lists: no instance shows more, and none less."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.sql.types import StructType

from ftlayer.checkpoint.dead_letters.letter import DeadLetter
from ftlayer.checkpoint.storage.loading import JobResult
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.common.rules.restart import NoRestart
from ftlayer.config import FTStatus, ServeOptions, TopologyOptions, VertexOptions
from ftlayer.functions.current import CurrentRecord
from ftlayer.functions.keyed import StateTtl
from ftlayer.functions.process import Context, ProcessFunction
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.job_thread import JobThread
from ftlayer.runtime.driver.rules.job_status import ChainStatus, IsolationStatus, JobStatus
from ftlayer.runtime.environment import StreamEnvironment
from ftlayer.spark.deliveries.ingest_reader import IngestStream
from ftlayer.spark.facade import FTLayer
from ftlayer.spark.query.checkpoint import LogEnds
from ftlayer.spark.query.supervisor import QuerySupervisor, TrackedQuery
from ftlayer.spark.query.writer import TrackedWriter
from ftlayer.spark.tracked import TrackedStream
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.topology.streams.keyed_stream import ConnectedStreams
from ftlayer.topology.streams.windowed_stream import session
from ftlayer.vertex.calls import QueryStatus, StreamOptions, StreamStatus
from ftlayer.vertex.calls.jobs import (
    BatchDetails,
    CheckpointDetails,
    CheckpointSums,
    CheckpointTotals,
    EdgeDetails,
    Incident,
    SlotDetails,
    SubtaskCheckpointDetails,
    SubtaskDetails,
)

WAIT_S = 600

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SECTIONS = [
    section
    for page in sorted(REFERENCE.glob("*.md"))
    for section in re.split(r"^#+ (?=.*\n)", page.read_text("utf-8"), flags=re.MULTILINE)
]


def names_listed(*headings: str) -> set[str]:
    """Return the names in the first columns of the tables of methods and names below these headings."""
    found: set[str] = set()
    for heading in headings:
        (text,) = (each for each in SECTIONS if each.startswith(f"{heading}\n"))
        for rows in re.findall(
            r"^\| (?:method|name|field) \|.*\n\|[- |]+\n((?:\|.*\n)+)", text, re.MULTILINE
        ):
            for row in rows.splitlines():
                found.update(re.findall(r"`(?:[A-Z]\w+\.)?(\w+)(?:\([^`]*\))?`", row.split(" | ")[0]))
    return found


def names_shown(instance: object) -> set[str]:
    return {name for name in dir(instance) if not name.startswith("_")}


def a_query() -> TrackedQuery:
    """Return the handle of a query whose Spark query ends at once."""
    idle = QueryStatus(0, 0, 0, 0, 0, -1)
    supervisor = QuerySupervisor(
        "faces", lambda _: Mock(), lambda: idle, lambda: LogEnds(-1, -1), NoRestart(), bounded=True
    )
    assert supervisor.wait_until_ended(WAIT_S)
    return TrackedQuery(supervisor)


def a_layer() -> FTLayer:
    return FTLayer(VertexOptions("nowhere"), StreamOptions())


def an_environment() -> StreamEnvironment:
    return StreamEnvironment(Mock(), a_layer(), name="faces")


def numbers() -> DataStream:
    return GraphBuilder("faces", status=FTStatus.OFF).source([1], "n bigint")


def connected() -> ConnectedStreams:
    stream = numbers()
    return stream.connect(stream)


FACES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "FTLayer": (a_layer, ("Methods and properties",)),
    "IngestStream": (
        lambda: IngestStream("events", StructType().add("n", "long"), Mock()),
        ("IngestStream",),
    ),
    "StreamEnvironment": (an_environment, ("StreamEnvironment",)),
    "TrackedStream": (lambda: TrackedStream(Mock()), ("TrackedStream",)),
    "TrackedWriter": (lambda: TrackedWriter(Mock(), "checkpoint", "name", Mock()), ("TrackedWriter",)),
    "TrackedQuery": (a_query, ("TrackedQuery",)),
    "DataStream": (numbers, ("DataStream",)),
    "KeyedStream": (lambda: numbers().key_by("n"), ("DataStream", "KeyedStream")),
    "ConnectedStreams": (connected, ("ConnectedStreams",)),
    "IterativeStream": (lambda: numbers().iterate(), ("DataStream", "IterativeStream")),
    "WindowedStream": (lambda: numbers().key_by("n").window(session("1s")), ("WindowedStream",)),
    "ProcessFunction": (ProcessFunction, ("ProcessFunction",)),
    "Context": (lambda: Context("count", ()), ("Context",)),
    "Job": (lambda: Job(JobThread("job-1")), ("Job",)),
}


VALUES: dict[type, str] = {
    BatchDetails: "BatchDetails",
    ChainStatus: "ChainStatus",
    CheckpointDetails: "CheckpointDetails",
    CheckpointSums: "CheckpointSums",
    CheckpointTotals: "CheckpointTotals",
    CircuitStatus: "CircuitStatus",
    CurrentRecord: "The record that a function works on",
    DeadLetter: "DeadLetter",
    EdgeDetails: "EdgeDetails",
    Incident: "Incident",
    IsolationStatus: "IsolationStatus",
    JobResult: "JobResult",
    JobStatus: "JobStatus",
    QueryStatus: "QueryStatus",
    ServeOptions: "ServeOptions",
    SlotDetails: "SlotDetails",
    StreamOptions: "StreamOptions",
    StreamStatus: "StreamStatus",
    SubtaskCheckpointDetails: "SubtaskCheckpointDetails",
    SubtaskDetails: "SubtaskDetails",
    TopologyOptions: "Topology options",
    VertexOptions: "Vertex options",
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_has_what_the_reference_lists(kind: type) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    assert names_shown(kind) | fields == names_listed(VALUES[kind])


def test_a_time_to_live_shows_what_it_was_given() -> None:
    assert names_shown(StateTtl("1h")) == {"time", "refresh_on_read"}


@pytest.mark.parametrize("name", FACES)
def test_an_instance_shows_what_the_reference_lists(name: str) -> None:
    make, headings = FACES[name]
    instance = make()
    assert type(instance).__name__ == name
    assert names_shown(instance) == names_listed(*headings)


def shown_on_pages() -> Iterator[tuple[str, object]]:
    """Yield what the pages of docstrings show: objects and what is public of them, by name."""
    for page in sorted((REFERENCE / "api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.MULTILINE):
            shown = pkgutil.resolve_name(name)
            yield name, shown
            if inspect.ismodule(shown):
                names = getattr(shown, "__all__", None)
                members = {
                    each: member
                    for each, member in vars(shown).items()
                    if (each in names if names is not None else getattr(member, "__module__", "") == name)
                }
            else:
                members = dict(vars(shown)) if inspect.isclass(shown) else {}
            for each, member in members.items():
                if not each.startswith("_") and (
                    inspect.isclass(member)
                    or isinstance(member, property | classmethod | staticmethod)
                    or (inspect.isfunction(member) and member.__name__ == each)
                ):
                    yield f"{name}.{each}", member


def test_every_name_that_the_pages_show_has_a_docstring() -> None:
    names = dict(shown_on_pages())
    assert len(names) > 300
    assert [name for name, member in names.items() if not inspect.getdoc(member)] == []
