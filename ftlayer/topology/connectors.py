"""Sources and sinks as users give them, made the connectors that a graph knows. pyspark is imported when asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from ftlayer.common.checks import check_methods, check_runs
from ftlayer.errors import ConfigError
from ftlayer.functions.writing import check_writer
from ftlayer.topology import operators

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource
    from pyspark.sql.types import StructType


PARTITION_ROWS = 100_000
"""Rows of a step. Order is kept within a partition."""

MAX_PARTITIONS = 64

_BATCH_ROWS = 16_384

_UNSIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}


def partitioned(table: pa.Table, rows: int = PARTITION_ROWS) -> tuple[Callable[[], Iterable[Any]], ...]:
    """Deal a table out by steps, in turn. What was dealt stays where it is when the table grows at its end."""
    starts = range(0, max(1, table.num_rows), rows)
    steps = [table.slice(start, rows) for start in starts]
    parts = min(MAX_PARTITIONS, len(steps))
    return tuple(_packed(pa.concat_tables(steps[part::MAX_PARTITIONS])) for part in range(parts))


def _packed(table: pa.Table) -> _IpcPartition:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=_BATCH_ROWS)
    return _IpcPartition(sink.getvalue().to_pybytes())


@dataclass(frozen=True)
class _IpcPartition:
    """Rows as an Arrow IPC stream: a slice of a table would take all of it along."""

    data: bytes

    def __call__(self) -> Iterator[pa.RecordBatch]:
        with pa.ipc.open_stream(self.data) as reader:
            yield from reader


# ---------------------------------------------------------------- to Arrow


def table_of(given: Any) -> pa.Table | None:
    """Return the rows of a DataFrame, or of a list of dicts, read now; None for anything else.

    Raises `ConfigError` for one that Arrow cannot read.
    """
    if isinstance(given, type | pa.Array | pa.ChunkedArray) or type(given).__name__ == "Series":
        # One column has no name: these are iterables of values.
        return None
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    if any(
        kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"
        for kind in type(given).__mro__
    ):
        return _from_pandas(given)
    if isinstance(given, list) and given and all(isinstance(record, dict) for record in given):
        return _read("a list of dicts", _from_dicts, given)
    if getattr(given, "isStreaming", False) is True:
        raise ConfigError(
            "source: a streaming DataFrame is read by Spark alone, batch by batch: wrap it with FTLayer.source(…), or "
            "give the topology a source that it reads itself, such as a reader"
        )
    if hasattr(given, "__arrow_c_stream__") or hasattr(given, "__arrow_c_array__"):
        return _read(f"a {type(given).__name__}", pa.table, given)
    return None


def _from_dicts(given: list[dict[str, Any]]) -> pa.Table:
    """Read the columns that any of the dicts has; Arrow itself looks at the first one."""
    names = dict.fromkeys(name for record in given for name in record)
    return pa.table({name: [record.get(name) for record in given] for name in names})


def _from_pandas(frame: Any) -> pa.Table:
    names = [name for name in frame.index.names if name is not None]
    if names:
        raise ConfigError(
            f"source: the index of this DataFrame is named {', '.join(map(repr, names))}, and only columns are read: "
            "reset_index() makes columns of it, reset_index(drop=True) leaves it out"
        )
    if not all(isinstance(name, str) for name in frame.columns):
        raise ConfigError(
            f"source: names of columns are texts, and this DataFrame has {list(frame.columns)!r}"
        )
    return _read("a pandas.DataFrame", pa.Table.from_pandas, frame, preserve_index=False)


def _read(what: str, read: Callable[..., pa.Table], given: Any, **options: Any) -> pa.Table:
    try:
        return read(given, **options)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"source: {what} that Arrow cannot read: {'; '.join(map(str, error.args))}"
        ) from error


# ---------------------------------------------------------------- types


def with_known_types(table: pa.Table) -> pa.Table:
    """Return a table with the types that Spark has for its columns; `ConfigError` for values that do not fit them."""
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        wanted = known_type(field.type)
        try:
            columns.append(column if wanted == field.type else _cast(column, wanted))
        except pa.ArrowException as error:
            raise ConfigError(
                f"source: column {field.name!r} is {field.type}, and its values do not fit {wanted} ({error}): "
                "convert it, or give schema=…"
            ) from error
    fields = [pa.field(name, column.type) for name, column in zip(table.column_names, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    if not pa.types.is_dictionary(column.type):
        return column.cast(wanted)
    # Arrow does not decode a dictionary of string views in one step.
    return pa.chunked_array([one.dictionary.cast(wanted).take(one.indices) for one in column.chunks], wanted)


def known_type(given: pa.DataType) -> pa.DataType:
    """Return the type that Spark reads a column of this type as; the same for one that it has none for."""
    types = pa.types
    if given in _UNSIGNED:
        return _UNSIGNED[given]
    if types.is_large_string(given) or types.is_string_view(given):
        return pa.string()
    if types.is_large_binary(given) or types.is_binary_view(given) or types.is_fixed_size_binary(given):
        return pa.binary()
    if types.is_dictionary(given):
        return known_type(given.value_type)
    if types.is_timestamp(given):
        return pa.timestamp("us", None if given.tz is None else "UTC")
    if types.is_struct(given):
        return pa.struct([field.with_type(known_type(field.type)) for field in given])
    if types.is_map(given):
        return pa.map_(known_type(given.key_type), known_type(given.item_type))
    if types.is_list(given) or types.is_large_list(given) or types.is_fixed_size_list(given):
        return pa.list_(pa.field("item", known_type(given.value_type), given.value_field.nullable))
    return given


ParseSchema: TypeAlias = Callable[[str], pa.Schema]
Schema: TypeAlias = pa.Schema | str
Options: TypeAlias = Mapping[str, str | int | float | bool]


def partitions(*parts: Any) -> operators.IterableSource:
    """Return a source with several partitions, each an iterable or a function without arguments that returns one.

    Raises `ConfigError` for an iterator, which can be gone through just once.
    """
    if not parts:
        raise ConfigError("partitions: expected one iterable or more")
    return operators.IterableSource(
        tuple(_partition(part, f"partition {place}") for place, part in enumerate(parts))
    )


@dataclass(frozen=True)
class OpenedSource:
    """A connector with what it knows of itself: its schema (None: nothing) and how many subtasks are of use.

    ``inferred`` says what the schema was read off, "" where the source says it itself.
    """

    connector: operators.SourceConnector
    schema: pa.Schema | None
    most_subtasks: int | None
    inferred: str = ""


def open_source(
    given: Any, schema: pa.Schema | None, options: Options | None, parse: ParseSchema
) -> OpenedSource:
    """Make a source's connector of whatever a user gave. ``options`` go to a Data Source's class.

    Raises `ConfigError` for what cannot be a source.
    """
    from pyspark.sql.datasource import DataSourceStreamReader, SimpleDataSourceStreamReader

    if _is_data_source(given):
        return _open_data_source(given, schema, options, parse)
    if options is not None:
        raise ConfigError(
            f"source: options are for a pyspark DataSource class, and this is {_described(given)}: give them to it"
        )
    table = table_of(given)
    if table is not None:
        table = with_known_types(table) if schema is None else table
        parts = partitioned(table)
        dealt = operators.IterableSource(parts, PARTITION_ROWS)
        return OpenedSource(dealt, table.schema, len(parts), "as its rows have it")
    if isinstance(given, operators.IterableSource):
        found = schema_of_first(given.partitions) if schema is None else None
        return OpenedSource(given, found, len(given.partitions), "as its first records have it")
    if isinstance(given, operators.Queue):
        return _opened(operators.QueueSource(given), given.schema)
    if isinstance(given, operators.ReaderSource | operators.PushSource):
        return _opened(given, None)
    if _is_instance(given, (DataSourceStreamReader, SimpleDataSourceStreamReader), "source"):
        known = getattr(given, "schema", None)
        return _opened(operators.ReaderSource(given), known if isinstance(known, pa.Schema) else None)
    return open_source(operators.IterableSource((_partition(given, "source"),)), schema, options, parse)


def open_sink(
    given: Any, schema: pa.Schema, options: Options | None, every_ms: int, max_rows: int
) -> operators.SinkConnector:
    """Make a sink's connector of whatever a user gave. ``options`` go to a Data Source's class.

    Raises `ConfigError` for what cannot be a sink.
    """
    from pyspark.sql.datasource import DataSourceStreamWriter

    connector: operators.SinkConnector
    if _is_data_source(given):
        try:
            writer = _instance(given, options).streamWriter(_struct_of(schema), False)
        except NotImplementedError as error:
            raise ConfigError(f"sink: {_described(given)} has no stream writer") from error
        connector = operators.WriterSink(writer, every_ms, max_rows)
    elif options is not None:
        raise ConfigError(
            f"sink: options are for a pyspark DataSource class, and this is {_described(given)}: give them to it"
        )
    elif isinstance(given, operators.FunctionSink | operators.WriterSink):
        connector = given
    elif _is_instance(given, (DataSourceStreamWriter,), "sink"):
        connector = operators.WriterSink(given, every_ms, max_rows)
    elif callable(given):
        connector = operators.FunctionSink(given)
    else:
        raise ConfigError(
            "sink: expected a function of a pyarrow.RecordBatch, a DataSourceStreamWriter or a DataSource class, "
            f"got {_described(given)}"
        )
    if isinstance(connector, operators.WriterSink):
        check_writer(connector.writer, "sink")
    else:
        check_runs(connector.function, "sink")
    return connector


def _opened(
    connector: operators.ReaderSource | operators.PushSource | operators.QueueSource, schema: pa.Schema | None
) -> OpenedSource:
    if isinstance(connector, operators.ReaderSource):
        giving = ("read", "readBetweenOffsets")
        asked = ("initialOffset", "latestOffset", "partitions", *giving, "commit", "stop")
        check_methods(connector.reader, asked, "source", may_yield=giving)
    return OpenedSource(connector, schema, _most_subtasks(connector))


def _is_data_source(given: Any) -> bool:
    from pyspark.sql.datasource import DataSource

    return isinstance(given, DataSource) or (isinstance(given, type) and issubclass(given, DataSource))


def _is_instance(given: Any, classes: tuple[type, ...], what: str) -> bool:
    # A class can be called, and would pass for a function.
    if isinstance(given, type) and issubclass(given, classes):
        raise ConfigError(f"{what}: expected an instance, got {_described(given)}; write {given.__name__}(…)")
    return isinstance(given, classes)


# ---------------------------------------------------------------- Data Sources


def _open_data_source(
    given: Any, schema: pa.Schema | None, options: Options | None, parse: ParseSchema
) -> OpenedSource:
    source = _instance(given, options)
    if schema is None:
        from ftlayer.functions.data_sources import to_arrow_schema

        try:
            own = source.schema()
        except NotImplementedError as error:
            raise ConfigError(
                f"source: {_described(source)} does not say its schema; give schema=…"
            ) from error
        schema = parse(own) if isinstance(own, str) else to_arrow_schema(own)
    struct = _struct_of(schema)
    try:
        reader: Any = source.streamReader(struct)
    except NotImplementedError:
        try:
            reader = source.simpleStreamReader(struct)
        except NotImplementedError as error:
            raise ConfigError(f"source: {_described(given)} has no stream reader") from error
    return _opened(operators.ReaderSource(reader), schema)


def _instance(given: Any, options: Options | None) -> DataSource:
    from pyspark.sql.datasource import CaseInsensitiveDict, DataSource

    if isinstance(given, DataSource):
        if options is not None:
            raise ConfigError(
                f"options: {_described(given)} has its own; give the class, or make it with these"
            )
        return given
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (options or {}).items()
    }
    made: DataSource = given(CaseInsensitiveDict(texts))
    return made


def _struct_of(schema: pa.Schema) -> StructType:
    from ftlayer.functions.data_sources import from_arrow_schema

    return from_arrow_schema(schema)


def _most_subtasks(connector: operators.SourceConnector) -> int | None:
    """Return how many subtasks find something to do: one a partition, one a callback, any number of a reader."""
    if isinstance(connector, operators.IterableSource):
        return len(connector.partitions)
    if isinstance(connector, operators.PushSource):
        return 1
    if isinstance(connector, operators.QueueSource):
        return connector.queue.most_subtasks
    from pyspark.sql.datasource import SimpleDataSourceStreamReader

    return 1 if isinstance(connector.reader, SimpleDataSourceStreamReader) else None


# ---------------------------------------------------------------- iterables


@dataclass(frozen=True)
class _Items:
    items: Iterable[Any]

    def __call__(self) -> Iterable[Any]:
        return self.items


def _partition(given: Any, what: str) -> Callable[[], Iterable[Any]]:
    if isinstance(given, Iterator):
        raise ConfigError(
            f"{what}: a {type(given).__name__} can be gone through just once, and a slot that is lost has to begin "
            "again: give a function that makes it (the generator function itself, or lambda: …), or a list"
        )
    if isinstance(given, pa.Table):
        return _Items(given.to_batches())
    if isinstance(given, pa.RecordBatch):
        return _Items([given])
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping | type):
        return _Items(given)
    if callable(given):
        check_runs(given, what, may_yield=True)
        _check_no_arguments(given, what)
        return given  # type: ignore[no-any-return]
    raise ConfigError(
        f"{what}: expected an iterable of records, a function that returns one, a stream reader or a DataSource class "
        f"of pyspark, a source of ftlayer.sources, or a PushSource; got {_described(given)}"
    )


def _check_no_arguments(function: Callable[..., Any], what: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some built-in functions have none that Python could see.
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"{what}: {getattr(function, '__qualname__', function)} needs arguments {signature}; expected a function "
            "without any that returns an iterable (for records that come by callback, PushSource(start))"
        ) from error


def _described(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


FIRST = 1_000
"""Records that are looked at."""

_REMEDY = "give schema=…, a pyarrow.Schema or text like 'id bigint, name string'"
_DECIMAL = pa.decimal128(38, 18)


def schema_of_first(partitions: Sequence[Callable[[], Iterable[Any]]]) -> pa.Schema:
    """Return the schema of an iterable source's records; `ConfigError` with the remedy where they do not say it.

    Columns are called as in namedtuples and `Row`s, else ``_1``, ``_2``, …, as Spark calls them; a bare value's is
    ``value``. A function is not called: it may block, or have an effect.
    """
    first: list[Any] = []
    for partition in partitions:
        items = getattr(partition, "items", None)
        if not isinstance(items, Iterable) or not isinstance(items, Sized):
            raise _unknown("a function is called in the slots alone, and is not asked for its records here")
        first += islice(items, FIRST - len(first))
    if not first:
        raise _unknown("there is no record to read it off")
    if isinstance(first[0], pa.RecordBatch):
        return first[0].schema
    names, columns = _columns(first)
    return pa.schema([(name, _type(name, values)) for name, values in zip(names, columns, strict=True)])


def _columns(records: list[Any]) -> tuple[list[str], list[Sequence[Any]]]:
    tuples = [isinstance(record, tuple) for record in records]
    if not any(tuples):
        return ["value"], [records]
    if not all(tuples):
        raise _unknown("its first records are tuples and others")
    lengths = sorted(set(map(len, records)))
    if len(lengths) > 1:
        raise _unknown(f"its first records have {' and '.join(map(str, lengths))} values")
    if lengths == [0]:
        raise _unknown("its first records have no values")
    names = getattr(records[0], "_fields", None) or getattr(records[0], "__fields__", None)
    names = names or [f"_{place + 1}" for place in range(lengths[0])]
    return list(names), list(zip(*records, strict=True))


def _type(name: str, values: Sequence[Any]) -> pa.DataType:
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        raise _unknown(f"column {name!r} is null in the first {len(values)} records")
    try:
        if bool in kinds and len(kinds) > 1:
            raise TypeError("true and false among other values")
        found = pa.array(values).type
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _unknown(f"column {name!r}: {error}") from error
    return _DECIMAL if pa.types.is_decimal(found) else known_type(found)


def _unknown(why: str) -> ConfigError:
    return ConfigError(f"source: its schema is not known: {why}; {_REMEDY}")
