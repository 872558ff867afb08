"""What a job's driver has said last of it, kept beside its checkpoints: it can be read when the driver is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ftlayer.checkpoint.storage.files import Files, raised
from ftlayer.checkpoint.storage.layout import LAST_REPORT, job_directory, join, last_name
from ftlayer.checkpoint.storage.remote_files import open_files
from ftlayer.errors import CheckpointDamagedError, CheckpointError, MalformedRequestError
from ftlayer.printable import shown_url
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
            data = _data(files, entry.path)
            if data is not None:
                found.append(LastReport(location, _read(location, data)))
        except CheckpointError as error:
            broken(error)
    return sorted(found, key=lambda report: report.job.at_ms, reverse=True)


def _data(files: Files, path: str) -> bytes | None:
    """Return what a file holds; None where its job has removed it meanwhile."""
    try:
        return files.read(path)
    except CheckpointDamagedError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _read(location: str, data: bytes) -> JobDetails:
    try:
        fields = unpack_map(data, "report", ("format", "job"))
        if fields["format"] != _FORMAT:
            raise MalformedRequestError(f"format {fields['format']!r}")
        job = _DETAILS.unpack(fields["job"], "job")
    except MalformedRequestError as error:
        raise CheckpointDamagedError(
            f"{shown_url(location)} is not what a job's driver has said last ({error}): it may be of a newer "
            "ftlayer, or damaged; remove the file to go on without it"
        ) from error
    assert isinstance(job, JobDetails)
    return job
