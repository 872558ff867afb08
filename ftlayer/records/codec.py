"""Tracked batches as bytes: an Arrow IPC stream of one record batch, which any Arrow reader can open.

The user's columns come first, then those tracked columns that have to be written row by row; the schema's
metadata holds the `Rules` of the others. There is no checksum: bytes that were changed and still make a valid
batch are not noticed.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ftlayer.errors import CodecError, ConfigError
from ftlayer.records.batch import RootRun, TrackedBatch, key_hash_column, key_hashes_of, numbers_of
from ftlayer.records.ids import I32Array, U64Array, initial_record_ids
from ftlayer.records.ipc import UNREADABLE, read_one_batch
from ftlayer.records.rules import Rules

RULES_KEY = b"ftlayer.tracked"
"""The key of the rules in the metadata of the schema."""

MAX_ROWS = 1 << 22
"""At most this many rows a batch. Rows may cost no bytes, so a few bytes could claim any number."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def encode(batch: TrackedBatch) -> pa.Buffer:
    """Return ``batch`` as bytes that `decode` reads; CodecError if it has more than `MAX_ROWS` rows."""
    if batch.num_rows > MAX_ROWS:
        raise CodecError(f"a batch of {batch.num_rows} rows is too large; split it ({MAX_ROWS} at most)")
    rules = _rules_of(batch)
    columns = _columns_of(batch, rules)
    schema = batch.payload.schema
    metadata = {**(schema.metadata or {}), RULES_KEY: rules.pack()}
    written = batch.payload.replace_schema_metadata(metadata)
    if columns:
        for name, column in columns.items():
            schema = schema.append(pa.field(name, column.type, nullable=False))
        schema = schema.with_metadata(metadata)
        written = pa.RecordBatch.from_arrays([*batch.payload.columns, *columns.values()], schema=schema)
    # A stream that only counts comes first: growing a buffer would copy the payload several times.
    counter = pa.MockOutputStream()
    _write_stream(counter, written)
    encoded = pa.allocate_buffer(counter.size())
    _write_stream(pa.FixedSizeBufferWriter(encoded), written)
    return encoded


def decode(data: bytes | pa.Buffer) -> TrackedBatch:
    """Read what `encode` wrote; the columns are views of ``data``.

    Bytes from anywhere are safe to decode: the result is a batch whose buffers are sound, or an error.
    Memory is not bounded by their length: Arrow unpacks compressed bodies, though `encode` writes none.

    Raises:
        CodecError: truncated or malformed bytes, another version, or tracked columns that make no sense.
    """
    written = _read_stream(pa.py_buffer(data))
    metadata = dict(written.schema.metadata or {})
    rules = Rules.unpack(metadata.pop(RULES_KEY, b""))
    stored = rules.stored_columns()
    users = written.num_columns - len(stored)
    if users < 0 or written.schema.names[users:] != stored:
        raise CodecError(f"the last columns must be {stored}; there are {written.schema.names}")
    payload = written.select(list(range(users))).replace_schema_metadata(metadata or None)
    return _assemble(payload, rules, dict(zip(stored, written.columns[users:], strict=True)))


def payload_schema_bytes(batch: TrackedBatch) -> bytes:
    """Return the schema of the user's columns as an Arrow IPC message."""
    return bytes(batch.payload.schema.serialize())


# ---------------------------------------------------------------- writing


def _rules_of(batch: TrackedBatch) -> Rules:
    roots = batch.source_record_id
    return Rules(
        batch.root_run,
        _record_id_rule(batch),
        _constant_row(batch.key_hash, batch.selectors),
        (_constant_row(batch.attempt, 1) or (None,))[0],
        "root" if batch.origin is roots or np.array_equal(batch.origin, roots) else None,
    )


def _record_id_rule(batch: TrackedBatch) -> str | None:
    roots, records = batch.source_record_id, batch.record_id
    if batch.root_run is not None:
        return "initial"
    if np.array_equal(records, roots):
        return "root"
    # One row tells nearly always; deriving all of them would double the cost of a batch of children.
    if records[0] == initial_record_ids(roots[:1])[0] and np.array_equal(records, initial_record_ids(roots)):
        return "initial"
    return None


def _constant_row(values: I32Array, width: int) -> tuple[int, ...] | None:
    """Return the row that all rows are equal to, if there is one; no rows are all 0."""
    if not len(values):
        return (0,) * width
    if not (values == values[0]).all():
        return None
    return tuple(np.atleast_1d(values[0]).tolist())


def _write_stream(sink: pa.NativeFile, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _columns_of(batch: TrackedBatch, rules: Rules) -> dict[str, pa.Array]:
    """Return the tracked columns that have to be written, in order."""
    return {
        name: key_hash_column(batch.key_hash) if name == "key_hash" else pa.array(getattr(batch, name))
        for name in rules.stored_columns()
    }


# ---------------------------------------------------------------- reading


def _read_stream(data: pa.Buffer) -> pa.RecordBatch:
    """Read the one batch of an IPC stream and check all its values; CodecError if that fails."""
    if data.size < len(_END_OF_STREAM) or data[-len(_END_OF_STREAM) :].to_pybytes() != _END_OF_STREAM:
        raise CodecError(f"{data.size} bytes do not end as an Arrow stream does; they may be truncated")
    try:
        # Columns that follow from others are left out, so that a short one may have many rows.
        batch = read_one_batch(data, free_rows=MAX_ROWS)
        if batch.num_rows > MAX_ROWS:
            raise CodecError(f"the batch claims {batch.num_rows} rows; {MAX_ROWS} are the most")
    except CodecError:
        raise
    except UNREADABLE as error:
        raise CodecError(f"the bytes are not a readable Arrow stream ({error})") from error
    return batch


def _assemble(payload: pa.RecordBatch, rules: Rules, columns: dict[str, pa.Array]) -> TrackedBatch:
    roots = _roots(payload.num_rows, rules.source_record_id, columns)
    batch = TrackedBatch(
        payload,
        roots,
        _record_ids(roots, rules.record_id, columns),
        key_hash=_key_hashes(payload.num_rows, rules.key_hash, columns),
        attempt=numbers_of("attempt", columns["attempt"], pa.int32())
        if rules.attempt is None
        else rules.attempt,
        origin=numbers_of("origin", columns["origin"], pa.uint64()) if rules.origin is None else None,
    )
    if rules.record_id == "initial":
        batch.root_run = rules.source_record_id
    return batch


def _roots(n: int, run: RootRun | None, columns: dict[str, pa.Array]) -> U64Array:
    if run is None:
        return numbers_of("source_record_id", columns["source_record_id"], pa.uint64())
    try:
        return run.ids(n)
    except (ConfigError, ValueError, OverflowError) as error:
        raise CodecError(f"the rule of 'source_record_id' makes no sense ({error})") from error


def _record_ids(roots: U64Array, rule: str | None, columns: dict[str, pa.Array]) -> U64Array:
    if rule is None:
        return numbers_of("record_id", columns["record_id"], pa.uint64())
    return roots if rule == "root" else initial_record_ids(roots)


def _key_hashes(n: int, constants: tuple[int, ...] | None, columns: dict[str, pa.Array]) -> I32Array:
    if constants is None:
        return key_hashes_of(columns["key_hash"])
    row = np.array(constants, np.int32)
    return np.full(n, row[0], np.int32) if len(row) == 1 else np.tile(row, (n, 1))
