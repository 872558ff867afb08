"""Bytes of a snapshot: where they lie, and how they are checked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """Who may refer to a piece: EXCLUSIVE one checkpoint alone, SHARED later ones too."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes, in a file or inline.

    Attributes:
        digest: keyed checksum (BLAKE2b, 32 bytes) of exactly these bytes.
        length: how many.
        inline: the bytes themselves; None if they lie in a file.
        path: the file, relative to the job's directory ("shared/…", "chk-7/…"), or to the savepoint's.
        offset: where in the file they begin.
        scope: see `Scope`.
    """

    digest: bytes
    length: int
    inline: bytes | None = None
    path: str = ""
    offset: int = 0
    scope: Scope = Scope.EXCLUSIVE
