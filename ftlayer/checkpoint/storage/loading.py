"""Finding, reading and checking whole checkpoints by their URL."""

from __future__ import annotations

import io
import json
import logging
import struct
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hmac import compare_digest
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgpack

from ftlayer import __version__
from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, Piece
from ftlayer.checkpoint.storage import layout
from ftlayer.checkpoint.storage.files import (
    NAMED,
    Files,
    StoragePool,
    named,
    open_files,
    raise_together,
    storage_errors,
)
from ftlayer.checkpoint.storage.keys import DIGEST_BYTES, Signer, key_of
from ftlayer.common.printable import described, shown_url
from ftlayer.config import MIB
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointStorageError,
    ConfigError,
    IncompatibleCheckpointError,
    MalformedRequestError,
    other_format,
)
from ftlayer.transport.codec import plain_codec

logger = logging.getLogger(__name__)


# The metadata file of a checkpoint: magic, version, number, time of completion, keyed checksum, msgpack.
#
# The numbers in front let a listing read the first bytes of each file alone. The checksum is over all the rest.


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
        _files(config.directory, result.name).publish(layout.RESULT, json.dumps(asdict(result)).encode())


def find_result(config: CheckpointConfig, name: str) -> JobResult | None:
    """Return the result of the last run of a job; None: it has not ended, or a new run was begun since.

    Raises `CheckpointStorageError`, and `CheckpointDamagedError` for what is no result.
    """
    if config.directory is None:
        return None
    files = _files(config.directory, name)
    if files.size(layout.RESULT) is None:
        return None
    try:
        return JobResult(**json.loads(files.read(layout.RESULT)))
    except (ValueError, TypeError) as error:
        where = shown_url(layout.join(files.url, layout.RESULT))
        raise CheckpointDamagedError(
            f"{where} is not a job's result ({error}): whether {name!r} has ended is not known. Remove the file to "
            "have the job go on from its latest checkpoint, or begin anew where there is none"
        ) from error


def forget_result(config: CheckpointConfig, name: str) -> None:
    if config.directory is not None:
        _files(config.directory, name).delete(layout.RESULT)


def _files(directory: str, name: str) -> Files:
    return open_files(layout.job_directory(directory, name))


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
    # Files that it names are read and deleted: they have to lie where pieces lie.
    for piece in all_pieces(checkpoint):
        if piece.inline is None and not _is_ours(piece.path, checkpoint.kind):
            raise CheckpointDamagedError(
                f"{shown_url(location)}: its metadata refers to {piece.path!r}, which is not in the checkpoint's "
                "directory"
            )
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


def _is_ours(path: str, kind: str) -> bool:
    parts = PurePosixPath(path).parts
    if ".." in parts or "." in path.split("/") or path.startswith("/"):
        return False
    if kind == SnapshotKind.SAVEPOINT:
        return len(parts) == 1
    return len(parts) == 2 and (parts[0] == layout.SHARED or layout.checkpoint_number(parts[0]) is not None)


IN_MEMORY_BYTES = 64 * MIB
"""Larger pieces are read from a temporary file."""


def open_piece(files: Files | None, piece: Piece, signer: Signer) -> BinaryIO:
    """Return a piece's bytes, which have all been checked. ``files`` None: it has to be inline.

    A large one is copied to an unnamed temporary file first: what was checked cannot change any more, and a value
    in it may be unpickled at once.
    """
    if piece.inline is not None or piece.length <= IN_MEMORY_BYTES:
        return io.BytesIO(b"".join(checked(files, piece, signer)))
    spool = tempfile.TemporaryFile()  # noqa: SIM115 - it is what is returned
    try:
        _copy(files, piece, signer, spool)
        spool.seek(0)
    except BaseException:
        spool.close()
        raise
    return spool


def fetch_piece(files: Files | None, piece: Piece, signer: Signer, path: Path) -> None:
    """Write a piece into a new file; the file is there only if the piece fits."""
    with storage_errors(str(path), "", "written"):
        target = path.open("xb")
    try:
        with target:
            _copy(files, piece, signer, target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def checked(files: Files | None, piece: Piece, signer: Signer) -> Iterator[bytes]:
    """Return a piece in parts. They are good only when all of them came: the last thing it does is to compare."""
    hasher = signer.hasher()
    length = 0
    for chunk in _chunks(files, piece):
        hasher.update(chunk)
        length += len(chunk)
        yield chunk
    if length != piece.length:
        raise CheckpointDamagedError(
            f"{place(files, piece)}: {piece.length:,} bytes were written, {length:,} are there"
        )
    if not compare_digest(hasher.digest(), piece.digest):
        raise CheckpointDamagedError(
            f"{place(files, piece)}: its checksum does not fit: it was changed after it was written, or is signed "
            "with another key (see CheckpointConfig.key)"
        )


def place(files: Files | None, piece: Piece) -> str:
    if piece.inline is not None:
        return "a piece inside the metadata"
    return f"{'' if files is None else files.url + '/'}{piece.path} at {piece.offset:,}"


def _chunks(files: Files | None, piece: Piece) -> Iterator[bytes]:
    if piece.inline is not None:
        return iter((piece.inline,))
    if files is None:
        raise CheckpointDamagedError(f"{piece.path}: it is not known in which directory it lies")
    return files.chunks(piece.path, piece.offset, piece.length)


def _copy(files: Files | None, piece: Piece, signer: Signer, target: BinaryIO) -> None:
    for chunk in checked(files, piece, signer):
        with storage_errors(tempfile.gettempdir(), "", "written"):
            target.write(chunk)


def load_checkpoint(url: str, key: bytes | None = None) -> Checkpoint:
    """Read the checkpoint or savepoint at ``url``: its directory, or the metadata file in it.

    ``key``: `CheckpointConfig.key` of the job that took it; None: the key is the one that is kept with it.
    Raises `CheckpointStorageError` if there is none (and says which ones there are below ``url``), or no key;
    `CheckpointDamagedError`; `IncompatibleCheckpointError` if a newer ftlayer wrote it.
    """
    location = located(url)
    files = open_files(location)
    if files.size(layout.METADATA) is None:
        raise CheckpointStorageError(not_there(location))
    is_savepoint = layout.checkpoint_number(layout.last_name(location)) is None
    base = location if is_savepoint else layout.parent(location)
    return decode(files.read(layout.METADATA), location, Signer(key_of(base, key)))


def located(url: str) -> str:
    """Return the location of the checkpoint that a user has named: its directory's URL."""
    location = layout.normal(url)
    return layout.parent(location) if layout.last_name(location) == layout.METADATA else location


def find_checkpoints(url: str) -> list[str]:
    """Return the locations of all checkpoints and savepoints below a directory, the latest first.

    The latest is the one that was completed last. One whose metadata cannot be made out is put where the age of its
    file says. A directory without metadata is no checkpoint.
    """
    files = open_files(url)
    found: list[tuple[int, int, str]] = []
    for entry in files.walk():
        directory, _, name = entry.path.rpartition("/")
        if name != layout.METADATA:
            continue
        try:
            header = read_header(files.read(entry.path, 0, HEADER_BYTES))
        except CheckpointDamagedError:
            # Deleted since it was listed.
            continue
        location = layout.join(files.url, directory) if directory else files.url
        number = layout.checkpoint_number(layout.last_name(location)) or 0
        if header is None:
            found.append((entry.modified_ms, number, location))
        else:
            found.append((header.completed_ms, header.checkpoint, location))
    return [location for _, _, location in sorted(found, reverse=True)]


def read_each(
    locations: Iterable[str], read: Callable[[str], Checkpoint]
) -> Iterator[tuple[str, Checkpoint | CheckpointError]]:
    """Yield each with what is read of it, or why it cannot be; not those that are gone since they were listed.

    A job that runs removes its older checkpoints while others look.
    """
    for location in locations:
        try:
            yield location, read(location)
        except CheckpointError as error:
            if open_files(location).size(layout.METADATA) is not None:
                yield location, error


def verify_checkpoint(checkpoint: Checkpoint, key: bytes | None, crew: StoragePool) -> None:
    """Read all pieces; `CheckpointDamagedError` names those that are missing or do not fit.

    ``key``: as for `load_checkpoint`; with a checkpoint in driver memory it has to be given.
    """
    base = layout.pieces_directory(checkpoint)
    if not base and key is None:
        raise CheckpointStorageError("a checkpoint in driver memory cannot be checked without its key")
    files = open_files(base) if base else None
    signer = Signer(key_of(base, key))

    def damage(piece: Piece) -> CheckpointDamagedError | None:
        try:
            for _ in checked(files, piece, signer):
                pass
        except CheckpointDamagedError as error:
            return error
        return None

    damages = [error for error in crew.map(damage, _distinct(checkpoint)) if error is not None]
    if damages:
        name = checkpoint.location or f"checkpoint {checkpoint.checkpoint} in driver memory"
        raise CheckpointDamagedError(f"{name} is damaged: {named(damages)}") from damages[0]


def check_present(files: Files, checkpoint: Checkpoint, crew: StoragePool) -> None:
    """Raise `CheckpointStorageError` unless all files that it refers to are there in their full length."""
    ends: dict[str, int] = {}
    for piece in _distinct(checkpoint):
        if piece.inline is None:
            ends[piece.path] = max(ends.get(piece.path, 0), piece.offset + piece.length)
    sizes = crew.map(files.size, ends)
    for (path, end), size in zip(ends.items(), sizes, strict=True):
        if size is None or size < end:
            there = "is not there any more" if size is None else f"has {size:,} bytes, {end:,} were written"
            where = shown_url(layout.join(files.url, path))
            raise CheckpointStorageError(
                f"checkpoint {checkpoint.checkpoint} is not published: {where} {there}; does something else remove "
                "files from there?"
            )


def paths_of(pieces: Iterable[Piece]) -> set[str]:
    return {piece.path for piece in pieces if piece.inline is None}


def all_pieces(checkpoint: Checkpoint) -> list[Piece]:
    """Return what a checkpoint refers to, a piece as often as it does."""
    return [piece for subtask in checkpoint.subtasks for piece in subtask.pieces()]


def files_of(checkpoints: Iterable[Checkpoint]) -> set[str]:
    return paths_of(piece for one in checkpoints for piece in all_pieces(one))


def _distinct(checkpoint: Checkpoint) -> list[Piece]:
    return list(dict.fromkeys(all_pieces(checkpoint)))


def check_directory(url: str) -> None:
    """Raise `ConfigError` for a directory of this machine that is not there; object stores know no empty ones."""
    location = located(url)
    if layout.is_local(location) and not Path(location).is_dir():
        raise ConfigError(_no_directory(location))


def not_there(location: str) -> str:
    if layout.is_local(location) and not Path(location).is_dir():
        return _no_directory(location)
    below = find_checkpoints(location)
    if not below:
        return f"{shown_url(location)}: there is no checkpoint or savepoint here, nor below"
    latest = ", ".join(map(shown_url, below[:NAMED]))
    return f"{shown_url(location)} is no checkpoint itself; name one of those below it, the latest first: {latest}"


def _no_directory(location: str) -> str:
    return (
        f"{shown_url(location)} is a file, not a directory"
        if Path(location).exists()
        else f"{shown_url(location)} does not exist"
    )


IsAlive = Callable[[str], bool]


def is_settled(path: str, latest: int) -> bool:
    """Whether no checkpoint that is still under way can refer to a shared file that none refers to now.

    ``latest``: the last completed checkpoint; all that began before it are complete or given up. The file may have
    got pieces for checkpoints up to the one in its name.
    """
    name = layout.parse_file_name(path.rpartition("/")[2])
    return name is not None and 0 < name.last <= latest


def is_bound(path: str, checkpoint: int) -> bool:
    """Whether a shared file got pieces for this checkpoint alone."""
    name = layout.parse_file_name(path.rpartition("/")[2])
    return name is not None and name.first == name.last == checkpoint


def orphans(
    paths: Iterable[str], used: Collection[str], completed: Collection[int], latest: int, is_alive: IsAlive
) -> list[str]:
    """Return those of a run's ``paths`` that can be removed.

    ``used``: those that completed checkpoints refer to; ``completed``: the numbers of those that are kept, ``latest``
    the last one; ``is_alive``: whether an instance may still write.
    """
    return [path for path in paths if path not in used and _is_orphan(path, completed, latest, is_alive)]


def _is_orphan(path: str, completed: Collection[int], latest: int, is_alive: IsAlive) -> bool:
    directory, _, file = path.rpartition("/")
    number = layout.checkpoint_number(directory)
    name = layout.parse_file_name(file)
    if directory == layout.SHARED:
        # Files of others than slots are left alone.
        return name is not None and (name.last <= latest or not is_alive(name.instance))
    if number is None:
        return False
    if file == layout.METADATA:
        return number not in completed and number <= latest
    if name is None:
        # A metadata file that was being written is the driver's own.
        return file.startswith(".") and number <= latest
    return number <= latest or not is_alive(name.instance)


def _unreferenced(paths: Iterable[str], kept: Collection[Checkpoint]) -> list[str]:
    """Return what none of the ``kept`` checkpoints of a run that is over needs, of ``paths`` in its directory."""
    completed = {one.checkpoint for one in kept}
    return orphans(paths, files_of(kept), completed, layout.NEVER, lambda _instance: False)


def delete_checkpoint(url: str, key: bytes | None = None) -> str:
    """Remove a checkpoint of a run that is over, damaged or not, and what is unreferenced then; returns where it was.

    Raises `ConfigError` for a savepoint, `CheckpointStorageError` if there is no checkpoint or something cannot be
    removed, `CheckpointDamagedError` if another checkpoint of the run cannot be read: what it needs is unknown.
    ``key``: as for `load_checkpoint`.
    """
    location = _checked(url, is_savepoint=False)
    base = layout.parent(location)
    others = []
    beside = (other for other in find_checkpoints(base) if other != location)
    for other, found in read_each(beside, lambda each: load_checkpoint(each, key)):
        if isinstance(found, CheckpointDamagedError):
            raise CheckpointDamagedError(
                f"{shown_url(location)} is kept, as it cannot be known which files {shown_url(other)} shares "
                f"with it; delete that one first: {found}"
            ) from found
        if isinstance(found, CheckpointError):
            raise found
        others.append(found)
    files, crew = open_files(base), StoragePool()
    try:
        errors = delete_directory(files, layout.last_name(location), crew)
        left = _unreferenced((entry.path for entry in files.walk()), others)
        errors += crew.delete(files, left)
    finally:
        crew.close()
    for name in (*sorted({layout.parent(path) for path in left}), layout.SHARED, ""):
        files.delete_empty(name)
    raise_together(errors, location)
    return location


def sweep_earlier_runs(directory: str, job: str, run: str, key: bytes | None = None) -> Iterator[str]:
    """Remove what drivers that were killed have left of other runs than ``run``; yields their URLs.

    For the owner of the job's directory: what a driver before it would still publish, it finds missing, and fails.
    Checkpoints stay, with all that they refer to, and runs of which a checkpoint cannot be read stay as they are.
    """
    files = open_files(layout.job_directory(directory, job))
    found, unknown = left_behind(files, key, except_run=run)
    for name, error in unknown.items():
        logger.warning("what the run %s has left behind stays: %s", name, error)
    yield from remove_left(files, found)


def job_directories(url: str) -> list[Files]:
    """Return the directories of all jobs at or below ``url``, which are those that drivers have claimed."""
    files = open_files(located(url))
    owners = {layout.parent(entry.path) for entry in files.walk()}
    names = sorted({layout.parent(each) for each in owners if layout.last_name(each) == layout.OWNERS})
    return [open_files(layout.join(files.url, name) if name else files.url) for name in names]


def job_above(url: str) -> str | None:
    run = layout.parent(located(url))
    above = (each for each in (run, layout.parent(run)) if layout.last_name(each))
    return next((each for each in above if open_files(each).walk(layout.OWNERS)), None)


def left_behind(
    files: Files, key: bytes | None = None, *, except_run: str = ""
) -> tuple[dict[str, int], dict[str, CheckpointError]]:
    """Return what no checkpoint of a job needs, with sizes; and runs of which that is not known, with the reason.

    ``files``: the job's directory. While a driver of it runs that is not ``except_run`` it may still need some of it.
    """
    # Before it is known what checkpoints refer to: a file that comes later is left alone.
    by_run: dict[str, dict[str, int]] = {}
    for entry in files.walk():
        name, _, path = entry.path.partition("/")
        file = layout.last_name(path)
        is_slots = file[:1] == "." or layout.parse_file_name(file) is not None
        if name not in (layout.part(except_run), layout.OWNERS) and is_slots:
            by_run.setdefault(name, {})[path] = entry.size
    found: dict[str, int] = {}
    unknown: dict[str, CheckpointError] = {}
    for name, sizes in by_run.items():
        kept = []
        there = find_checkpoints(layout.join(files.url, name))
        for _, read in read_each(there, lambda each: load_checkpoint(each, key)):
            if isinstance(read, CheckpointError):
                unknown[name] = read
            else:
                kept.append(read)
        if name not in unknown:
            found.update((layout.join(name, path), sizes[path]) for path in _unreferenced(sizes, kept))
    return found, unknown


def remove_left(files: Files, paths: Iterable[str]) -> Iterator[str]:
    """Remove these files of a job, and directories that are empty then; yields their URLs. For the job's owner."""
    above: set[str] = set()
    for path in paths:
        files.delete(path)
        above |= {layout.parent(path), path.partition("/")[0]}
        yield layout.join(files.url, path)
    for empty in sorted(above, reverse=True):
        files.delete_empty(empty)


def dispose_savepoint(url: str) -> str:
    """Remove a savepoint, damaged or not; returns where it was.

    Raises `ConfigError` for a checkpoint, `CheckpointStorageError` if there is none or something cannot be removed.
    """
    location = _checked(url, is_savepoint=True)
    crew = StoragePool()
    try:
        raise_together(delete_savepoint(open_files(location), crew), location)
    finally:
        crew.close()
    return location


def discard_checkpoint(checkpoint: Checkpoint, keep: Iterable[Checkpoint], crew: StoragePool) -> None:
    """Remove a checkpoint of a run that is over, or a savepoint; errors as `DriverStorage.discard`."""
    location = checkpoint.location
    if checkpoint.kind == SnapshotKind.SAVEPOINT:
        raise_together(delete_savepoint(open_files(location), crew), location)
        return
    base = layout.pieces_directory(checkpoint)
    files = open_files(base)
    used = files_of(one for one in keep if layout.pieces_directory(one) == base)
    errors = delete_directory(files, layout.last_name(location), crew)
    errors += crew.delete(files, shared_paths(all_pieces(checkpoint)) - used)
    files.delete_empty(layout.SHARED)
    files.delete_empty("")
    raise_together(errors, location)


def delete_directory(files: Files, name: str, crew: StoragePool) -> list[CheckpointStorageError]:
    """Remove a checkpoint's own directory; returns what could not be removed."""
    errors = crew.delete(files, (layout.join(name, layout.METADATA),))
    try:
        errors += crew.delete(files, (entry.path for entry in files.walk(name)))
        files.delete_empty(name)
    except CheckpointStorageError as error:
        errors.append(error)
    return errors


def delete_savepoint(files: Files, crew: StoragePool) -> list[CheckpointStorageError]:
    """Remove a savepoint's directory, as far as the files in it are a savepoint's."""
    errors = crew.delete(files, (layout.METADATA,))
    try:
        names = [entry.path for entry in files.walk()]
        ours = [
            name
            for name in names
            if name == layout.KEY or name[:1] == "." or layout.parse_file_name(name) is not None
        ]
        errors += crew.delete(files, ours)
        if len(ours) == len(names):
            files.delete_empty("")
    except CheckpointStorageError as error:
        errors.append(error)
    return errors


def shared_paths(pieces: Iterable[Piece]) -> set[str]:
    return {path for path in paths_of(pieces) if layout.parent(path) == layout.SHARED}


def _checked(url: str, *, is_savepoint: bool) -> str:
    location = located(url)
    if open_files(location).size(layout.METADATA) is None:
        raise CheckpointStorageError(not_there(location))
    if (layout.checkpoint_number(layout.last_name(location)) is None) != is_savepoint:
        kind, command = ("checkpoint", "delete") if is_savepoint else ("savepoint", "dispose")
        raise ConfigError(f"{shown_url(location)} is a {kind}: use `ftlayer checkpoints {command}`")
    return location
