"""Finding, reading and checking whole checkpoints by their URL."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from hmac import compare_digest
from pathlib import Path
from typing import BinaryIO

from ftlayer.checkpoint.snapshots import Checkpoint, Piece
from ftlayer.checkpoint.storage.files import NAMED, Files, StoragePool, named, storage_errors
from ftlayer.checkpoint.storage.keys import Signer, key_of
from ftlayer.checkpoint.storage.layout import (
    METADATA,
    checkpoint_number,
    is_local,
    join,
    last_name,
    normal,
    parent,
    pieces_directory,
)
from ftlayer.checkpoint.storage.metadata import HEADER_BYTES, decode, read_header
from ftlayer.checkpoint.storage.remote_files import open_files
from ftlayer.common.printable import shown_url
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError, CheckpointError, CheckpointStorageError, ConfigError

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
    if files.size(METADATA) is None:
        raise CheckpointStorageError(not_there(location))
    base = location if checkpoint_number(last_name(location)) is None else parent(location)
    return decode(files.read(METADATA), location, Signer(key_of(base, key)))


def located(url: str) -> str:
    """Return the location of the checkpoint that a user has named: its directory's URL."""
    location = normal(url)
    return parent(location) if last_name(location) == METADATA else location


def find_checkpoints(url: str) -> list[str]:
    """Return the locations of all checkpoints and savepoints below a directory, the latest first.

    The latest is the one that was completed last. One whose metadata cannot be made out is put where the age of its
    file says. A directory without metadata is no checkpoint.
    """
    files = open_files(url)
    found: list[tuple[int, int, str]] = []
    for entry in files.walk():
        directory, _, name = entry.path.rpartition("/")
        if name != METADATA:
            continue
        try:
            header = read_header(files.read(entry.path, 0, HEADER_BYTES))
        except CheckpointDamagedError:
            # Deleted since it was listed.
            continue
        location = join(files.url, directory) if directory else files.url
        number = checkpoint_number(last_name(location)) or 0
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
            if open_files(location).size(METADATA) is not None:
                yield location, error


def verify_checkpoint(checkpoint: Checkpoint, key: bytes | None, crew: StoragePool) -> None:
    """Read all pieces; `CheckpointDamagedError` names those that are missing or do not fit.

    ``key``: as for `load_checkpoint`; with a checkpoint in driver memory it has to be given.
    """
    base = pieces_directory(checkpoint)
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
            raise CheckpointStorageError(
                f"checkpoint {checkpoint.checkpoint} is not published: {shown_url(join(files.url, path))} {there}; "
                "does something else remove files from there?"
            )


def paths_of(pieces: Iterable[Piece]) -> set[str]:
    return {piece.path for piece in pieces if piece.inline is None}


def all_pieces(checkpoint: Checkpoint) -> list[Piece]:
    """Return what a checkpoint refers to, a piece as often as it does."""
    return [piece for subtask in checkpoint.subtasks for piece in subtask.pieces()]


def files_of(checkpoints: Iterable[Checkpoint]) -> set[str]:
    """Return the paths of all files that checkpoints refer to."""
    return paths_of(piece for one in checkpoints for piece in all_pieces(one))


def _distinct(checkpoint: Checkpoint) -> list[Piece]:
    return list(dict.fromkeys(all_pieces(checkpoint)))


def check_directory(url: str) -> None:
    """Raise `ConfigError` for a directory of this machine that is not there; object stores know no empty ones."""
    location = located(url)
    if is_local(location) and not Path(location).is_dir():
        raise ConfigError(_no_directory(location))


def not_there(location: str) -> str:
    if is_local(location) and not Path(location).is_dir():
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
