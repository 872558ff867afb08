"""A report on a checkpoint, as plain values for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.checkpoint.storage.files import open_files, raised
from ftlayer.checkpoint.storage.layout import LAST_REPORT, job_directory, join, last_name
from ftlayer.common.printable import shown_url
from ftlayer.errors import CheckpointDamagedError, CheckpointError, MalformedRequestError
from ftlayer.transport.codec import plain_codec
from ftlayer.transport.frames import pack, unpack_map
from ftlayer.vertex.calls import JobDetails

MOST_REPORTS = 200
"""The latest so many below a directory are read."""

_DETAILS = plain_codec(JobDetails)
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class LastReport:
    """What was said last of a job; ``location`` is the file."""

    location: str
    job: JobDetails


def put_report(directory: str, job: JobDetails) -> None:
    """Keep what is said of a job, in the place of what was said before. Raises `CheckpointStorageError`."""
    files = open_files(job_directory(directory, job.owner))
    files.publish(LAST_REPORT, pack({"format": _FORMAT, "job": _DETAILS.pack(job)}, "job"))


def find_reports(url: str, broken: Callable[[CheckpointError], None] = raised) -> list[LastReport]:
    """Return what was said last of all jobs whose directories are below ``url``, the latest first.

    ``broken`` is told of each file that is no report, or cannot be read. Raises `CheckpointStorageError`.
    """
    files = open_files(url)
    kept = [entry for entry in files.walk() if last_name(entry.path) == LAST_REPORT]
    kept.sort(key=lambda entry: entry.modified_ms, reverse=True)
    found = []
    for entry in kept[:MOST_REPORTS]:
        location = join(files.url, entry.path)
        try:
            found.append(LastReport(location, _read(location, files.read(entry.path))))
        except CheckpointError as error:
            # Its job may have removed it meanwhile.
            if not isinstance(error.__cause__, FileNotFoundError):
                broken(error)
    return sorted(found, key=lambda report: report.job.at_ms, reverse=True)


def _read(location: str, data: bytes) -> JobDetails:
    try:
        fields = unpack_map(data, "report", ("format", "job"))
        if fields["format"] != _FORMAT:
            raise MalformedRequestError(f"format {fields['format']!r}")
        job: JobDetails = _DETAILS.unpack(fields["job"], "job")
    except MalformedRequestError as error:
        raise CheckpointDamagedError(
            f"{shown_url(location)} is not what a job's driver has said last ({error}): it may be of a newer "
            "ftlayer, or damaged; remove the file to go on without it"
        ) from error
    return job


Facts = dict[str, Any]


def summary(checkpoint: Checkpoint) -> Facts:
    """Return one line of a list: bytes, milliseconds, wall clock in ms since 1970."""
    parts = checkpoint.subtasks
    pieces = sum(piece.length for part in parts for piece in part.pieces())
    items = sum(len(item) for part in parts for state in part.operators for item in state.items)
    return {
        "location": shown_url(checkpoint.location),
        "checkpoint": checkpoint.checkpoint,
        "kind": str(checkpoint.kind),
        "job": checkpoint.job,
        "run": checkpoint.run,
        "completed_ms": checkpoint.completed_ms,
        "duration_ms": checkpoint.completed_ms - checkpoint.started_ms,
        "state_bytes": pieces + items,
        "written_bytes": sum(part.written_bytes for part in parts),
        "unaligned": checkpoint.unaligned,
    }


def details(checkpoint: Checkpoint) -> Facts:
    """Return everything: the summary, sizes by operator, durations by subtask, positions of the sources."""
    return {
        **summary(checkpoint),
        "started_ms": checkpoint.started_ms,
        "max_parallelism": checkpoint.max_parallelism,
        "operators": [{**asdict(operator), "keys": list(operator.keys)} for operator in checkpoint.operators],
        "sizes": [
            _sizes(uid, [part for part in checkpoint.subtasks if part.uid == uid])
            for uid in dict.fromkeys(part.uid for part in checkpoint.subtasks)
        ],
        "subtasks": [
            {"chain": part.uid, "subtask": part.subtask, **asdict(part.times)} for part in checkpoint.subtasks
        ],
        "positions": [
            {"source": part.uid, "subtask": part.subtask, "partition": name, "position": _readable(position)}
            for part in checkpoint.subtasks
            for name, position in sorted(part.positions.items())
        ],
        "letters": _letters(checkpoint),
        "uncommitted": [
            {"sink": one.sink, "subtask": part.subtask, "checkpoint": one.checkpoint}
            for part in checkpoint.subtasks
            for one in part.committables
        ],
    }


def _letters(checkpoint: Checkpoint) -> list[Facts]:
    """Return by chain how many letters came back to it, and how many of earlier checkpoints are in no file yet."""
    back = Counter(part.uid for part in checkpoint.subtasks for _ in part.readmitted)
    unwritten = Counter(letter.chain for batch in checkpoint.letters for letter in batch.letters)
    return [
        {"chain": chain, "readmitted": back[chain], "unwritten": unwritten[chain]}
        for chain in sorted({*back, *unwritten})
    ]


def _sizes(chain: str, parts: list[SubtaskSnapshot]) -> Facts:
    """Return sizes of a chain. Keyed state of its operators lies in the same pieces, so it has one size."""
    keyed = [part.keyed for part in parts if part.keyed is not None]
    states: Counter[str] = Counter()
    for state in (each for part in parts for each in part.operators):
        states[state.operator] += sum(map(len, state.items))
    return {
        "chain": chain,
        "keyed_operators": sorted({table.operator for snapshot in keyed for table in snapshot.tables}),
        "keyed_tables": sorted({f"{table.operator}.{table.name}" for one in keyed for table in one.tables}),
        "keyed_bytes": sum(state.piece.length for snapshot in keyed for state in snapshot.pieces),
        "keyed_entries": sum(state.entries for snapshot in keyed for state in snapshot.pieces),
        "operator_state_bytes": dict(states),
        "in_flight_bytes": sum(channel.frames.length for part in parts for channel in part.channels),
        "in_flight_records": sum(channel.count for part in parts for channel in part.channels),
        "waiting_records": sum(part.waiting for part in parts),
        "written_bytes": sum(part.written_bytes for part in parts),
    }


def _readable(position: bytes) -> Any:
    """Return a position as its source has packed it; in hexadecimal digits where that is not known."""
    try:
        return _plain(msgpack.unpackb(position))
    except (ValueError, msgpack.UnpackException):
        return position.hex()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
