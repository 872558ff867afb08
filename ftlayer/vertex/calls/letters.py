"""Calls of jobs in barrier mode, whose dead letters come from their checkpoints, and go back into them.

A letter lives with the job until its checkpoint is complete; then its driver sends it, file by file. A requeued one
waits here until the driver has read it and says that a checkpoint holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from ftlayer.vertex.calls.operating import Attempt

MAX_LETTERS = 10_000
"""So many letters may a call have."""


@dataclass(frozen=True, slots=True)
class KeptLetter:
    """A record that a job has given up: one row, and its failed attempts, one or more, the oldest first.

    ``letter`` names it. ``facts`` is what else the job wants back with it: the vertex does not look into that.
    """

    letter: bytes
    facts: bytes
    payload: pa.RecordBatch
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class KeepLetters:
    """Put letters among the dead ones of a stream, unless this ``part`` of this ``file`` of its job was kept before.

    The name of the file is remembered until `ForgetLetters`. Refused with `ProtocolError` by a store that takes no
    records in.
    """

    stream: str
    file: str
    part: int
    letters: tuple[KeptLetter, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class LettersKept:
    """Reply to `KeepLetters` and `ForgetLetters`: how many letters (parts) that were, 0 for what was done before."""

    count: int


@dataclass(frozen=True, slots=True)
class ForgetLetters:
    """Forget the name of a file of a job: it will not be sent again."""

    job: str
    file: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class GetRequeued:
    """Which letters of a job were requeued? ``after`` pages on; up to ``limit`` of them."""

    job: str
    after: bytes = b""
    limit: int = 500
    owner: str = ""


@dataclass(frozen=True, slots=True)
class RequeuedLetter:
    """A letter on its way back: see `KeptLetter`; ``key`` names it in the vertex. ``edited``: its payload was."""

    key: bytes
    stream: str
    letter: bytes
    facts: bytes
    payload: pa.RecordBatch
    attempts: tuple[Attempt, ...]
    edited: bool = False


@dataclass(frozen=True, slots=True)
class RequeuedLetters:
    """Reply to `GetRequeued`; ``more`` is the ``after`` of the next page, b"" at the end."""

    letters: tuple[RequeuedLetter, ...]
    more: bytes


@dataclass(frozen=True, slots=True)
class Readmitted:
    """A checkpoint of the job holds these requeued letters (by key): delete them. Answered by `Changed`."""

    job: str
    keys: tuple[bytes, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ReturnLetters:
    """These requeued letters (by key) cannot go back into the job: they are dead again, with this reason.

    Answered by `Changed`.
    """

    job: str
    keys: tuple[bytes, ...]
    reason: str
    owner: str = ""
