"""Messages that are JSON as rows of a schema: read by Arrow a batch at a time, and checked one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.datasource import InputPartition

from ftlayer.common.checks import check_text, check_texts, known_options
from ftlayer.connectors.fitting import is_any
from ftlayer.errors import ConfigError
from ftlayer.functions import data_sources
from ftlayer.topology.ddl import parse_ddl

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


CORRUPT = "_corrupt_record"
"""A column of the schema that gets the text of what cannot be read, as Spark calls it."""

_TEXT = ("string", "large_string", "binary", "large_binary")

SHOWN_BYTES = 200
"""An error shows so much of a message."""


class ObjectReader:
    """Reads JSON objects as a struct of given fields, one for each text."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        """Raises `ConfigError` for types that cannot be read from JSON."""
        self._kind = pa.struct([field.with_nullable(True) for field in fields])
        self._options = pj.ParseOptions(
            explicit_schema=pa.schema([_readable(field, field.name) for field in fields]),
            newlines_in_values=True,
            unexpected_field_behavior="ignore",
        )

    def read(self, written: pa.Buffer, count: int) -> pa.StructArray:
        """Return as many objects as there are texts, which have a newline between them. Raises `pa.ArrowException`.

        Each has to begin with ``{`` and to end with ``}``, blanks aside. Arrow's reader dies of a first value that is
        null, and takes two values in one text, or one in two of them, for what they are not. With these ends a value
        cannot go on over the end of its text: so many texts that are so many values are one each.
        """
        table = pj.read_json(
            pa.BufferReader(written),
            read_options=pj.ReadOptions(use_threads=False, block_size=written.size + 1),
            parse_options=self._options,
        )
        if table.num_rows != count:
            raise pa.ArrowInvalid("there is not one JSON value in each")
        objects = table.to_struct_array().combine_chunks()
        if isinstance(objects, pa.ChunkedArray):
            objects = pa.concat_arrays(objects.chunks)
        found = objects.cast(self._kind)
        _check_numbers(found)
        return found


def _check_numbers(found: pa.Array) -> None:
    """Raise `pa.ArrowInvalid` for a number that its type has not: Arrow makes an infinity of it, or an odd decimal."""
    kind, types = found.type, pa.types
    if types.is_decimal(kind):
        found.validate(full=True)
    elif types.is_floating(kind) and pc.any(pc.is_inf(found)).as_py():
        raise pa.ArrowInvalid(f"a number is too large for a {kind}")
    elif types.is_struct(kind):
        for part in found.flatten():
            _check_numbers(part)
    elif types.is_list(kind) or types.is_large_list(kind):
        _check_numbers(found.flatten())


@known_options
class FromJson:
    """A function for ``map_batches``: a row for each message, from the JSON object in one of its columns.

    Fields that are missing or null are null, and those that the schema does not name are left out. A timestamp or date
    is ISO 8601 text, a decimal a number or text, binary is text.

    A message that does not fit (no JSON, no object, another type, a null where the schema has none) fails, as one that
    a function raises on: it is tried again or becomes a dead letter, with all of the message. With a column
    `CORRUPT` in the schema none fails: such a message is a row of nulls with its text there.
    """

    def __init__(self, schema: pa.Schema | str, *, column: str = "value", keep: Sequence[str] = ()) -> None:
        """Make the function.

        Args:
            schema: of the objects, as a `pyarrow.Schema` or as Spark's DDL: ``"user string, clicks bigint"``.
            column: where messages have the object, text or binary.
            keep: columns of the messages that the rows have too, behind those of the objects.

        Raises `ConfigError` for types that cannot be read (maps), and for columns that are there twice.
        """
        objects = parse_ddl(schema) if isinstance(schema, str) else schema
        if not isinstance(objects, pa.Schema) or not len(objects):
            raise ConfigError(f"schema: expected a pyarrow.Schema or text like 'user string', got {schema!r}")
        check_text(column, "column", "the name of a column")
        if isinstance(keep, str):
            raise ConfigError(f"keep: expected a list of names, got {keep!r}")
        check_texts(keep, "keep", "names of columns")
        for name in keep:
            if name in objects.names:
                raise ConfigError(f"keep: the schema has a column {name!r}, too")
        self._objects, self._column, self._keep = objects, column, tuple(keep)
        self._marks = CORRUPT in objects.names
        if self._marks and objects.field(CORRUPT).type != pa.string():
            raise ConfigError(f"schema: {CORRUPT} is text, not {objects.field(CORRUPT).type}")
        self._fields = [field for field in objects if field.name != CORRUPT]
        if not self._fields:
            raise ConfigError(f"schema: there is no column beside {CORRUPT}")
        self._reader = ObjectReader(self._fields)

    def __repr__(self) -> str:
        return f"FromJson({', '.join(f'{field.name} {field.type}' for field in self._objects)!r})"

    def result_schema(self, messages: pa.Schema) -> pa.Schema:
        """Return the schema of the rows. Raises `ConfigError` if messages do not have the columns."""
        for name in (self._column, *self._keep):
            if name not in messages.names:
                raise ConfigError(
                    f"FromJson: there is no column {name!r}; messages have {', '.join(messages.names)}"
                )
        kind = messages.field(self._column).type
        if not is_any(kind, *_TEXT):
            raise ConfigError(f"FromJson: column {self._column!r} is {kind}: JSON is text or binary")
        return pa.schema([*self._objects, *(messages.field(name) for name in self._keep)])

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a row for each message. Raises `ValueError` if one does not fit, which is named if it is alone."""
        objects, corrupt = (
            self._marked(batch) if self._marks else (self._read(batch.column(self._column)), None)
        )
        columns = [corrupt if name == CORRUPT else objects.field(name) for name in self._objects.names]
        columns += [batch.column(name) for name in self._keep]
        return pa.RecordBatch.from_arrays(columns, schema=self.result_schema(batch.schema))

    def _marked(self, batch: pa.RecordBatch) -> tuple[pa.StructArray, pa.Array]:
        """Return the objects, null for what is none, and the texts of those that are none."""
        values = batch.column(self._column)
        parts: list[pa.Array] = []
        bad: list[int] = []
        todo = [(0, len(values))]
        while todo:
            start, rows = todo.pop()
            try:
                parts.append(self._read(values.slice(start, rows)))
            except ValueError:
                if rows > 1:
                    half = rows // 2
                    todo += [(start + half, rows - half), (start, half)]
                    continue
                bad.append(start)
                parts.append(pa.nulls(1, pa.struct(self._fields)))
        texts = [_text(values[row]) for row in bad]
        found = dict(zip(bad, texts, strict=True))
        corrupt = pa.array([found.get(row) for row in range(len(values))], pa.string())
        return pa.concat_arrays(parts) if parts else pa.nulls(0, pa.struct(self._fields)), corrupt

    def _read(self, values: pa.Array) -> pa.StructArray:
        try:
            objects = self._parsed(values)
        except pa.ArrowException as error:
            raise ValueError(_said(str(error), values)) from error
        for field in self._fields:
            if not field.nullable and objects.field(field.name).null_count:
                raise ValueError(_said(f"{field.name!r} is null", values))
        return objects

    def _parsed(self, values: pa.Array) -> pa.StructArray:
        if not len(values):
            return pa.nulls(0, pa.struct(self._fields))
        if values.null_count:
            raise pa.ArrowInvalid("the value is null")
        # Arrow's reader takes any bytes for text.
        texts = values.cast(pa.large_string())
        shown = pc.utf8_trim(texts, " \t\r\n")
        is_object = pc.and_(pc.starts_with(shown, "{"), pc.ends_with(shown, "}"))
        if not pc.all(is_object).as_py():
            raise pa.ArrowInvalid("the value is no JSON object")
        newline, nothing = pa.scalar("\n", pa.large_string()), pa.scalar("", pa.large_string())
        lines = pc.binary_join_element_wise(texts, nothing, newline)
        return self._reader.read(lines.buffers()[2], len(texts))


def _said(why: str, values: pa.Array) -> str:
    if len(values) != 1:
        return f"one of {len(values)} messages does not fit the schema: {why}"
    shown = _text(values[0])
    return f"the message does not fit the schema: {why}: {'null' if shown is None else shown[:SHOWN_BYTES]}"


def _text(value: pa.Scalar) -> str | None:
    raw = value.as_py()
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw


def _readable(field: pa.Field, path: str) -> pa.Field:
    return pa.field(field.name, _readable_type(field.type, path))


def _readable_type(kind: pa.DataType, path: str) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_readable(inner, f"{path}.{inner.name}") for inner in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_readable_type(kind.value_type, f"{path}[]"))
    if pa.types.is_date32(kind) or (pa.types.is_timestamp(kind) and kind.tz is None):
        # Of which Arrow's reader would turn a time with a zone into one of UTC.
        return pa.string()
    if is_any(kind, "integer", "floating", "boolean", "decimal128", "timestamp", *_TEXT):
        return kind
    raise ConfigError(f"schema: {path} is {kind}, which cannot be read from JSON: use a function of your own")


JSON_OPTIONS = ("column", "keep")
"""The options of `with_schema`."""


class MessageReader(data_sources.DataSourceStreamReader, data_sources.SupportsTriggerAvailableNow):
    """A reader of messages, whose rows are these, or the JSON objects in them, see `with_schema`."""

    from_json: FromJson | None = None

    @abstractmethod
    def read_messages(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the messages of a partition."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield messages, or their objects. Raises `ValueError` for the first one that does not fit."""
        messages = self.read_messages(partition)
        return messages if self.from_json is None else map(partial(_objects, self.from_json), messages)


def _objects(from_json: FromJson, batch: pa.RecordBatch) -> pa.RecordBatch:
    try:
        return from_json(batch)
    except ValueError:
        # One by one, for the message of the one that does not fit.
        for row in range(batch.num_rows):
            from_json(batch.slice(row, 1))
        raise


def with_schema(
    reader: MessageReader, messages: pa.Schema, wanted: StructType, options: data_sources.DataSourceOptions
) -> MessageReader:
    """Return the reader; its rows are the JSON objects in messages, if the user's schema is not that of messages.

    Options: ``column``, where messages have the object (``value``); ``keep``, names of columns of messages that the
    schema has too, with commas between them. Raises `ConfigError` as `FromJson` does.
    """
    options.know(*JSON_OPTIONS)
    if wanted == data_sources.from_arrow_schema(messages):
        return reader
    column, keep = options.text("column", "value"), options.names("keep")
    given = data_sources.to_arrow_schema(wanted)
    for name in keep:
        if name not in given.names:
            raise ConfigError(f"keep: the schema has no column {name!r}")
    objects = pa.schema([field for field in given if field.name not in keep])
    from_json = FromJson(objects, column=column, keep=keep)
    if from_json.result_schema(messages).names != given.names:
        raise ConfigError("schema: the columns of keep come last, in their order")
    reader.from_json = from_json
    return reader


_NEWLINE, _RETURN = 0x0A, 0x0D


def line_starts(data: bytes) -> npt.NDArray[np.int64]:
    """Return where each line begins; the last one may be without a newline."""
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
    starts = np.concatenate([np.zeros(1, np.int64), newlines.astype(np.int64) + 1])
    return starts[:-1] if starts[-1] == len(data) else starts


def texts_of(data: bytes) -> pa.Array:
    """Return each line as a text, without its newline and a carriage return before that.

    What is no UTF-8 is U+FFFD.
    """
    content = np.frombuffer(data, np.uint8)
    is_newline = content == _NEWLINE
    kept = ~is_newline
    kept[:-1] &= ~((content[:-1] == _RETURN) & is_newline[1:])
    starts = line_starts(data)
    # How many bytes are kept before each line.
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept, dtype=np.int64)])
    offsets = np.append(before[starts], before[-1]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content[kept])]
    lines = pa.Array.from_buffers(pa.binary(), len(starts), buffers)
    try:
        return lines.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([line.decode("utf-8", "replace") for line in lines.to_pylist()], pa.string())
