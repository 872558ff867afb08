"""Checkpoints and savepoints that lie in directories, whether a driver runs or not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.loading import check_directory, find_checkpoints, load_checkpoint, read_each
from ftlayer.checkpoint.storage.report import summary
from ftlayer.console.rendering import console_of, page
from ftlayer.errors import CheckpointError, ConfigError
from ftlayer.monitor.facts import Facts, iso, seconds

MOST_STORED = 200
"""The latest so many of a directory are read."""

router = APIRouter(include_in_schema=False)


@router.get("/checkpoints")
def checkpoints_page(request: Request) -> Response:
    """Show what lies in the directories that the console was given."""
    found = stored_checkpoints(console_of(request).options.checkpoints)
    return page(request, "stored.html", here="/checkpoints", found=found)


@dataclass(frozen=True, slots=True)
class StoredCheckpoints:
    """What was found below ``url``, the latest first; ``failure`` says why nothing could be."""

    url: str
    items: list[Facts]
    failure: str = ""


def stored_checkpoints(urls: tuple[str, ...]) -> list[StoredCheckpoints]:
    """Read what lies below each of ``urls``; one that cannot be read is said so."""
    return [_below(url) for url in urls]


def _below(url: str) -> StoredCheckpoints:
    try:
        check_directory(url)
        each = read_each(islice(find_checkpoints(url), MOST_STORED), load_checkpoint)
        return StoredCheckpoints(url, [_facts(location, read) for location, read in each])
    except (CheckpointError, ConfigError) as error:
        return StoredCheckpoints(url, [], str(error))


def _facts(location: str, read: Checkpoint | CheckpointError) -> Facts:
    if isinstance(read, CheckpointError):
        return {"location": location, "failure": str(read)}
    found = summary(read)
    return {
        "location": location,
        "failure": "",
        "checkpoint": found["checkpoint"],
        "kind": found["kind"],
        "job": found["job"],
        "completed": iso(found["completed_ms"]),
        "duration_seconds": seconds(found["duration_ms"]),
        "state_bytes": found["state_bytes"],
        "written_bytes": found["written_bytes"],
        "restore": f"env.execute(restore_from={location!r})",
    }
