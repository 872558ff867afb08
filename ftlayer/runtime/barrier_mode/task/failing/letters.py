"""Dead letters that a chain has made, until a checkpoint that holds them is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.functions.conversion import concat, schema_text
from ftlayer.records.ipc import as_message, as_stream, has_dictionaries

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class OtherColumnsError(ValueError):
    """A row is not one of the input that it is to go into."""


class RowPacker:
    """Packs rows, one by one; rows of one schema behind each other take a third of the time."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._head: bytes | None = None

    def pack(self, row: pa.RecordBatch) -> bytes:
        """Return a row that owns its memory (`ftlayer.records.ipc`) as an IPC stream."""
        schema = row.schema
        if self._schema is None or not schema.equals(self._schema, check_metadata=True):
            self._schema, self._head = schema, _head_of(schema)
        if self._head is None:
            return bytes(as_stream(row))
        # A stream is its messages one behind the other: so it takes half the time of a writer.
        return self._head + bytes(as_message(row, dictionaries=False)) + _END_OF_STREAM


def rows_of(payloads: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of ``payloads``.

    Raises `OtherColumnsError` for one that does not have the columns of ``schema``, `pa.ArrowException`, `OSError` or
    `StopIteration` for one that cannot be read.
    """
    rows = _read_together(payloads, schema) or [_row_of(payload, schema) for payload in payloads]
    return concat(rows, schema)


def _read_together(payloads: Sequence[bytes], schema: pa.Schema) -> list[pa.RecordBatch] | None:
    """Return the rows of many payloads that differ in their rows alone: their messages make one stream."""
    head = None if len(payloads) < 2 else _head_of(schema)
    if head is None or not all(each.startswith(head) and each.endswith(_END_OF_STREAM) for each in payloads):
        return None
    messages = [payload[len(head) : -len(_END_OF_STREAM)] for payload in payloads]
    rows = list(pa.ipc.open_stream(b"".join([head, *messages, _END_OF_STREAM])))
    # A letter that a user has edited may be a stream of several; one without any was refused.
    return rows if len(rows) == len(payloads) else None


def _row_of(payload: bytes, schema: pa.Schema) -> pa.RecordBatch:
    row = pa.ipc.open_stream(payload).read_next_batch()
    if row.schema.names != schema.names or row.schema.types != schema.types:
        raise OtherColumnsError(
            f"it has other columns ({schema_text(row.schema)}) than its input has now ({schema_text(schema)})"
        )
    return pa.RecordBatch.from_arrays(row.columns, schema=schema)


def _head_of(schema: pa.Schema) -> bytes | None:
    """Return the message that begins a stream of rows alone; None if dictionaries come before them."""
    return None if has_dictionaries(schema) else bytes(schema.serialize())


class MadeLetters:
    """The letters of one subtask, and the names of those that came back to it. Not for several threads.

    Attributes:
        made: how many there ever were in this run.
    """

    def __init__(self) -> None:
        self.made = 0
        self._letters: list[ChainLetter] = []
        self._readmitted: dict[bytes, int] = {}

    def add(self, letter: ChainLetter) -> None:
        self.made += 1
        self._letters.append(letter)

    def readmit(self, name: bytes) -> bool:
        """A letter comes back; whether it is not here already."""
        if name in self._readmitted:
            return False
        self._readmitted[name] = 0
        return True

    def take(self) -> list[ChainLetter]:
        """Return, and forget, what was made: it goes on as records."""
        taken, self._letters = self._letters, []
        return taken

    def snapshot(self, checkpoint: int) -> tuple[tuple[ChainLetter, ...], tuple[bytes, ...]]:
        """Return what this checkpoint holds: all letters, and all names, that were not told to be complete."""
        self._letters = [
            letter if letter.checkpoint else replace(letter, checkpoint=checkpoint)
            for letter in self._letters
        ]
        self._readmitted = {name: first or checkpoint for name, first in self._readmitted.items()}
        return tuple(self._letters), tuple(self._readmitted)

    def completed(self, checkpoint: int) -> None:
        self._letters = [letter for letter in self._letters if not 0 < letter.checkpoint <= checkpoint]
        self._readmitted = {
            name: first for name, first in self._readmitted.items() if not 0 < first <= checkpoint
        }
