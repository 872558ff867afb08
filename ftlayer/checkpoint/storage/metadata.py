"""The metadata file of a checkpoint: magic, version, number, time of completion, keyed checksum, msgpack.

The numbers in front let a listing read the first bytes of each file alone. The checksum is over all the rest.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hmac import compare_digest
from pathlib import PurePosixPath

import msgpack

from ftlayer import __version__
from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.keys import DIGEST_BYTES, Signer
from ftlayer.checkpoint.storage.layout import RESULT, SHARED, checkpoint_number, job_directory, join
from ftlayer.checkpoint.storage.remote_files import open_files
from ftlayer.common.printable import described, shown_url
from ftlayer.errors import (
    CheckpointDamagedError,
    IncompatibleCheckpointError,
    MalformedRequestError,
    other_format,
)
from ftlayer.transport.codec import plain_codec


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


MAGIC = b"FTLCHKPT"
VERSION = 1
_HEADER = struct.Struct(">8sHQQ")
"""Magic, version of the format, checkpoint, completed_ms."""
HEADER_BYTES = _HEADER.size

NO_SENSE = (MalformedRequestError, ValueError, msgpack.UnpackException)
"""What reading a body raises that is none of a checkpoint."""


@dataclass(frozen=True, slots=True)
class MetadataHeader:
    """The part that a listing needs. Not checked by the checksum yet."""

    version: int
    checkpoint: int
    completed_ms: int


def encode(checkpoint: Checkpoint, signer: Signer) -> bytes:
    """Return the file's content. ``location`` is left out: it is where the file is."""
    header = _HEADER.pack(MAGIC, VERSION, checkpoint.checkpoint, checkpoint.completed_ms)
    written = replace(checkpoint, written_by=__version__, location="")
    body: bytes = msgpack.packb(plain_codec(Checkpoint).pack(written))
    return header + signer.metadata(header + body) + body


def read_header(data: bytes) -> MetadataHeader | None:
    """Return what the first `HEADER_BYTES` say; None: this is no metadata file, or is cut off."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, checkpoint, completed_ms = _HEADER.unpack_from(data)
    return MetadataHeader(version, checkpoint, completed_ms) if magic == MAGIC else None


def decode(data: bytes, location: str, signer: Signer) -> Checkpoint:
    """Read a metadata file that lies in ``location``.

    Raises `IncompatibleCheckpointError` for a format of a later ftlayer, `CheckpointDamagedError` for anything
    but what `encode` with the same key gave.
    """
    header = read_header(data)
    if header is None:
        raise CheckpointDamagedError(
            f"{shown_url(location)}: its metadata is cut off, or was not written by ftlayer ({len(data):,} bytes)"
        )
    if header.version > VERSION:
        raise IncompatibleCheckpointError(other_format(location, header.version, VERSION, _writer_of(data)))
    mac, body = data[HEADER_BYTES : HEADER_BYTES + DIGEST_BYTES], data[HEADER_BYTES + DIGEST_BYTES :]
    if not compare_digest(mac, signer.metadata(data[:HEADER_BYTES] + body)):
        raise CheckpointDamagedError(
            f"{shown_url(location)}: its metadata was cut off or changed after it was written, or is signed with "
            "another key (see CheckpointConfig.key)"
        )
    try:
        checkpoint = _unpack(body)
    except NO_SENSE as error:
        raise CheckpointDamagedError(
            f"{shown_url(location)}: its metadata makes no sense: {described(error)}"
        ) from error
    _check_paths(checkpoint, location)
    return replace(checkpoint, location=location)


def remains(data: bytes, location: str) -> Checkpoint | None:
    """Return what damaged metadata seems to say, which is not checked and good for messages alone; None: nothing."""
    try:
        return replace(_unpack(data[HEADER_BYTES + DIGEST_BYTES :]), location=location)
    except NO_SENSE:
        return None


def _unpack(body: bytes) -> Checkpoint:
    checkpoint: Checkpoint = plain_codec(Checkpoint).unpack(msgpack.unpackb(body), "checkpoint")
    return checkpoint


def _writer_of(data: bytes) -> object:
    """Return which ftlayer wrote a file of a later format, if that is still said where it is today."""
    try:
        return msgpack.unpackb(data[HEADER_BYTES + DIGEST_BYTES :])["written_by"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def _check_paths(checkpoint: Checkpoint, location: str) -> None:
    """Files that the metadata names are read and deleted: they have to lie where pieces lie."""
    for subtask in checkpoint.subtasks:
        for piece in subtask.pieces():
            if piece.inline is None and not _is_ours(piece.path, checkpoint.kind):
                raise CheckpointDamagedError(
                    f"{shown_url(location)}: its metadata refers to {piece.path!r}, which is not in the "
                    "checkpoint's directory"
                )


def _is_ours(path: str, kind: str) -> bool:
    parts = PurePosixPath(path).parts
    if ".." in parts or "." in path.split("/") or path.startswith("/"):
        return False
    if kind == SnapshotKind.SAVEPOINT:
        return len(parts) == 1
    return len(parts) == 2 and (parts[0] == SHARED or checkpoint_number(parts[0]) is not None)
