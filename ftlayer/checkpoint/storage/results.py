"""How jobs have ended, kept where their checkpoints were: so that one that is started again does not do all anew."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.layout import RESULT, job_directory, join
from ftlayer.checkpoint.storage.remote_files import open_files
from ftlayer.errors import CheckpointDamagedError
from ftlayer.printable import shown_url


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job in barrier mode that has ended by itself, or was stopped with a savepoint.

    Attributes:
        name: of the topology.
        run: unique name of the execution that has ended.
        ended_ms: when, in ms since 1970.
        checkpoint: the last one that was completed and committed.
        savepoint: where the savepoint lies that the job was stopped with, "" for none.
    """

    name: str
    run: str
    ended_ms: int
    checkpoint: int
    savepoint: str = field(default="", repr=False)

    def __str__(self) -> str:
        """Return it in a sentence, with what to do for a new run."""
        where = shown_url(self.savepoint)
        how = f"was stopped with savepoint {where}" if self.savepoint else "ended"
        goes_on = f"restore_from={where!r} goes on from there; " if self.savepoint else ""
        return (
            f"topology {self.name!r} {how} at {utc_text(self.ended_ms)} (run {self.run}, checkpoint "
            f"{self.checkpoint}), and everything is committed: restore_from='latest' finds nothing left to do. "
            f"{goes_on}restore_from=None runs it anew from the beginning, and so does another name"
        )


def utc_text(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def put_result(config: CheckpointConfig, result: JobResult) -> None:
    """Keep a job's result; without a directory there is no place for it. Raises `CheckpointStorageError`."""
    if config.directory is not None:
        _files(config.directory, result.name).publish(RESULT, json.dumps(asdict(result)).encode())


def find_result(config: CheckpointConfig, name: str) -> JobResult | None:
    """Return the result of the last run of a job; None: it has not ended, or a new run was begun since.

    Raises `CheckpointStorageError`, and `CheckpointDamagedError` for what is no result.
    """
    if config.directory is None:
        return None
    files = _files(config.directory, name)
    if files.size(RESULT) is None:
        return None
    try:
        return JobResult(**json.loads(files.read(RESULT)))
    except (ValueError, TypeError) as error:
        raise CheckpointDamagedError(
            f"{shown_url(join(files.url, RESULT))} is not a job's result ({error}): whether {name!r} has ended is "
            "not known. "
            "Remove the file to have the job go on from its latest checkpoint, or begin anew where there is none"
        ) from error


def forget_result(config: CheckpointConfig, name: str) -> None:
    if config.directory is not None:
        _files(config.directory, name).delete(RESULT)


def _files(directory: str, name: str) -> Files:
    return open_files(job_directory(directory, name))
