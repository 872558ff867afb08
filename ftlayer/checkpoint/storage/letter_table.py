"""A file of dead letters: a stream of Arrow batches that any reader of Arrow can read, with a checksum behind its end.

A batch is a *part*: letters of one chain, up to `PART_LETTERS` or `PART_BYTES` (a single letter may be larger), cut
the same way whenever the file is written. The schema's metadata says how many letters there are, so that a listing
reads the first bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from ftlayer import __version__
from ftlayer.checkpoint.letters import ChainLetter, FailedAttempt, LetterBatch, LetterKind
from ftlayer.checkpoint.storage.signing import DIGEST_BYTES, Signer, is_same
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError, IncompatibleCheckpointError, newer_format

PART_LETTERS = 1_000
PART_BYTES = 4 * MIB
HEAD_BYTES = 16 << 10
"""The schema is within the first so many bytes."""

_VERSION = 1
_VERSION_KEY, _LETTERS_KEY, _LASTING_KEY = b"ftlayer.letters", b"ftlayer.count", b"ftlayer.lasting"
_WRITER_KEY = b"ftlayer.version"
_TEXT_BYTES = 200
# What a letter takes beside its payload and its tracebacks, about.

ATTEMPT_TYPE = pa.struct(
    [
        ("number", pa.int32()),
        ("at_ms", pa.int64()),
        ("reason", pa.string()),
        ("operator", pa.string()),
        ("place", pa.string()),
        ("traceback", pa.string()),
    ]
)
LETTERS_SCHEMA = pa.schema(
    [
        pa.field("letter", pa.binary(), nullable=False),
        pa.field("checkpoint", pa.int64(), nullable=False),
        pa.field("chain", pa.string(), nullable=False),
        pa.field("subtask", pa.int32(), nullable=False),
        pa.field("input", pa.int32(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("operator", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("event_time_ms", pa.int64()),
        pa.field("attempts", pa.list_(ATTEMPT_TYPE), nullable=False),
        pa.field("first_failed_ms", pa.int64(), nullable=False),
        pa.field("died_ms", pa.int64(), nullable=False),
        pa.field("is_event_timer", pa.bool_(), nullable=False),
    ]
)
"""A letter is a row; ``payload`` is an IPC stream with one row."""


@dataclass(frozen=True, slots=True)
class LettersHead:
    """What the schema says of a file."""

    letters: int
    lasting: bool


def encode_letters(batch: LetterBatch, signer: Signer) -> bytes:
    """Return the file of a batch; one without letters is an emptied file."""
    metadata = {
        _VERSION_KEY: str(_VERSION).encode(),
        _WRITER_KEY: __version__.encode(),
        _LETTERS_KEY: str(len(batch.letters)).encode(),
        _LASTING_KEY: b"1" if batch.lasting else b"0",
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, LETTERS_SCHEMA.with_metadata(metadata)) as writer:
        for letters in parts_of(batch.letters):
            rows = [asdict(letter) for letter in letters]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=LETTERS_SCHEMA))
    data: bytes = sink.getvalue().to_pybytes()
    return data + signer.letters(batch.name, data)


def decode_letters(
    data: bytes, name: str, location: str, signer: Signer
) -> tuple[LettersHead, list[pa.RecordBatch]]:
    """Return what a file says of itself, and its parts; ``location`` is for messages.

    Raises `CheckpointDamagedError` for anything but what `encode_letters` with the same key gave for the same name,
    and `IncompatibleCheckpointError` for a format of a newer ftlayer.
    """
    body, mac = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if not is_same(mac, signer.letters(name, body)):
        raise CheckpointDamagedError(
            f"{location}: these dead letters were cut off or changed after they were written, or are signed with "
            "another key (see CheckpointConfig.key): give that key, or a copy of the file; remove it to go on without"
        )
    with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
        head = _head_of(reader.schema, location)
        return head, list(reader)


def read_head(data: bytes, location: str) -> LettersHead:
    """Return what the first `HEAD_BYTES` of a file say; they are not checked. Errors as `decode_letters`."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise CheckpointDamagedError(f"{location}: this is no file of dead letters: {error}") from error
    return _head_of(schema, location)


def letters_of(part: pa.RecordBatch) -> list[ChainLetter]:
    return [_letter(row) for row in part.to_pylist()]


def parts_of(letters: tuple[ChainLetter, ...]) -> Iterator[list[ChainLetter]]:
    """Cut letters into parts; they come chain by chain, and in their order within a chain."""
    by_chain: dict[str, list[ChainLetter]] = {}
    for letter in letters:
        by_chain.setdefault(letter.chain, []).append(letter)
    for chain in sorted(by_chain):
        part: list[ChainLetter] = []
        size = 0
        for letter in by_chain[chain]:
            own = _size(letter)
            if part and (len(part) >= PART_LETTERS or size + own > PART_BYTES):
                yield part
                part, size = [], 0
            part.append(letter)
            size += own
        yield part


def _size(letter: ChainLetter) -> int:
    texts = sum(len(attempt.traceback) + len(attempt.reason) for attempt in letter.attempts)
    return len(letter.payload) + len(letter.key) + texts + _TEXT_BYTES


def _head_of(schema: pa.Schema, location: str) -> LettersHead:
    said = schema.metadata or {}
    try:
        version = int(said[_VERSION_KEY])
        if version > _VERSION:
            raise IncompatibleCheckpointError(
                newer_format(location, version, _VERSION, said.get(_WRITER_KEY))
            )
        return LettersHead(int(said[_LETTERS_KEY]), said[_LASTING_KEY] == b"1")
    except (KeyError, ValueError) as error:
        raise CheckpointDamagedError(f"{location}: this is no file of dead letters: {error!r}") from error


def _letter(row: dict[str, Any]) -> ChainLetter:
    attempts = tuple(FailedAttempt(**attempt) for attempt in row["attempts"])
    return ChainLetter(**{**row, "kind": LetterKind(row["kind"]), "attempts": attempts})
