"""Pieces are checked before anybody gets to see them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ftlayer.checkpoint.pieces import Piece
from ftlayer.checkpoint.storage.files import Files, storage_errors
from ftlayer.checkpoint.storage.signing import Signer, is_same
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError

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


def check_piece(files: Files | None, piece: Piece, signer: Signer) -> None:
    """Read a piece; `CheckpointDamagedError` if it is not what was written."""
    for _ in checked(files, piece, signer):
        pass


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
    if not is_same(hasher.digest(), piece.digest):
        raise CheckpointDamagedError(
            f"{place(files, piece)}: its checksum does not fit: it was changed after it was written, or is signed "
            "with another key (see CheckpointConfig.key)"
        )


def place(files: Files | None, piece: Piece) -> str:
    """Return where a piece is, for messages."""
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
