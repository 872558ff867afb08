"""What ftlayer takes of pyspark's Python Data Sources, under pyspark's names, on each Spark; and their options.

This is the one place that knows what Spark 4.0 and 4.1 lack. There a source is asked how far it goes, and told neither
where it is nor how much it may give; and an Arrow writer is of batch queries only, or is called otherwise (4.0).
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

from pyspark import __version__ as spark_version
from pyspark.sql import datasource

from ftlayer.common.checks import MOST
from ftlayer.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

HAS_LIMITS = find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark tells a Python source where it is and how much it may give (4.2)."""

if TYPE_CHECKING or HAS_LIMITS:
    from pyspark.sql.datasource import DataSourceStreamReader as DataSourceStreamReader
    from pyspark.sql.streaming.datasource import ReadAllAvailable as ReadAllAvailable
    from pyspark.sql.streaming.datasource import ReadLimit as ReadLimit
    from pyspark.sql.streaming.datasource import ReadMaxFiles as ReadMaxFiles
    from pyspark.sql.streaming.datasource import ReadMaxRows as ReadMaxRows
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as SupportsTriggerAvailableNow
else:

    class ReadLimit:
        pass

    @dataclass
    class ReadAllAvailable(ReadLimit):
        pass

    @dataclass
    class ReadMaxRows(ReadLimit):
        max_rows: int

    @dataclass
    class ReadMaxFiles(ReadLimit):
        max_files: int

    class SupportsTriggerAvailableNow(ABC):
        @abstractmethod
        def prepareForTriggerAvailableNow(self):  # noqa: N802
            pass

    class DataSourceStreamReader(datasource.DataSourceStreamReader):
        """A reader as 4.2 has it, also for a Spark that calls ``latestOffset()``.

        Where the query is Spark says by `partitions`: of each batch, and, when it starts again, of nothing behind the
        last one. Before that the query is at `initialOffset`, which is asked for later, and has to be the same then.
        """

        limit_option = ""
        _first = _place = None

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            for name, made in _MADE.items():
                if name in cls.__dict__:
                    setattr(cls, name, functools.wraps(cls.__dict__[name])(made(cls.__dict__[name])))

        def getDefaultReadLimit(self):  # noqa: N802
            return ReadAllAvailable()

        def reportLatestOffset(self):  # noqa: N802
            return None

        def unasked_limit(self):
            if self.limit_option:
                raise UnsupportedError(
                    f"{self.limit_option}: Spark {spark_version} asks a Python source for all that there is, and "
                    "knows no limit: leave the option out, use Spark 4.2 or newer, or read the source in a topology"
                )
            return ReadAllAvailable()

    def _initial(asked):
        def initial_offset(self):
            return asked(self) if self._first is None else self._first

        return initial_offset

    def _latest(asked):
        def latest_offset(self, *args):
            if args:
                return asked(self, *args)
            if self._place is None:
                self._first = self._place = self.initialOffset()
            return asked(self, self._place, self.unasked_limit())

        return latest_offset

    def _partitions(asked):
        def partitions(self, start, end):
            self._place = end
            return asked(self, start, end)

        return partitions

    _MADE = {"initialOffset": _initial, "latestOffset": _latest, "partitions": _partitions}

if TYPE_CHECKING or hasattr(datasource, "DataSourceStreamArrowWriter"):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as DataSourceStreamArrowWriter
else:

    class DataSourceStreamArrowWriter(datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter):
        """Spark 4.0 gives batches of Arrow to what is an Arrow writer of batch queries, in a stream, too."""


def from_arrow_schema(schema: pa.Schema) -> StructType:
    """Return Spark's types: a timestamp without a zone stays one, which 4.0 and 4.1 have to be told."""
    from pyspark.sql.pandas.types import from_arrow_schema as made

    return made(schema, prefer_timestamp_ntz=True)


def to_arrow_schema(schema: StructType) -> pa.Schema:
    """Return Spark's own Arrow schema; instants are in UTC, whatever the session's zone."""
    from pyspark.sql.pandas import types

    made: Any = types.to_arrow_schema
    return made(schema, timezone="UTC") if HAS_LIMITS else made(schema)


Made = TypeVar("Made")

_OF_SPARK = {"checkpointlocation", "queryname"}
"""Options that Spark hands over with the user's own; in lower case."""


class DataSourceOptions:
    """Options as ``option`` of a reader or writer of Spark has set them, by names without regard to case.

    It notes what it is asked for: what is left at the end is unknown (`check_all_known`).
    """

    def __init__(self, options: Mapping[str, str], format: str) -> None:
        self._options = {name.lower(): str(value) for name, value in options.items()}
        self._format = format
        self._known: dict[str, None] = {}
        self._prefixes: list[str] = []

    def get(self, name: str) -> str | None:
        self.know(name)
        return self._options.get(name.lower())

    def text(self, name: str, default: str) -> str:
        found = self.get(name)
        return default if found is None else found

    def required(self, name: str) -> str:
        """Return an option's text. Raises `ConfigError` if there is none."""
        found = self.get(name)
        if not found:
            raise ConfigError(f"option {name!r} is missing: .option({name!r}, …)")
        return found

    def names(self, name: str, default: str = "") -> list[str]:
        """Return an option that is names with commas between them."""
        return [part.strip() for part in self.text(name, default).split(",") if part.strip()]

    def count(self, name: str, default: int, *, most: int = MOST) -> int:
        """Return an option that is a number from 1 to ``most``. Raises `ConfigError`."""
        text = self.text(name, str(default))
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise ConfigError(f"{name}: expected a number from 1 to {most}, got {text!r}")
        return int(text)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return an option that is true or false. Raises `ConfigError`."""
        text = self.text(name, str(default)).lower()
        if text not in {"true", "false"}:
            raise ConfigError(f"{name}: expected true or false, got {text!r}")
        return text == "true"

    def made(self, kind: type[Made], names: Mapping[str, str] | None = None, /, **given: Any) -> Made:
        """Return a source or sink, whose parameters are options: ``max_pending`` is called ``maxPending``.

        What no text can be, a function or a mapping, is no option. Raises `ConfigError` as `count`, `flag` and the
        class do.

        Args:
            kind: its class. Its annotations and defaults say what an option is.
            names: of options that are called otherwise, by parameters.
            given: arguments that are read otherwise, or are no options.
        """
        for name, parameter in inspect.signature(kind, eval_str=True).parameters.items():
            if name in given:
                continue
            first, *others = name.split("_")
            option = (names or {}).get(name, first + "".join(map(str.capitalize, others)))
            hint, default = parameter.annotation, parameter.default
            kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
            if hint == Sequence[str]:
                given[name] = self.names(option, ",".join(default))
            elif bool in kinds:
                given[name] = self.flag(option, default=default)
            elif str in kinds:
                text = self.get(option)
                # Without a default the class says what is expected.
                given[name] = default if text is None and default is not parameter.empty else text
            elif int in kinds:
                is_left_out = default is None and self.get(option) is None
                given[name] = None if is_left_out else self.count(option, default or MOST)
        return kind(**given)

    def below(self, prefix: str) -> dict[str, str]:
        """Return the options whose names begin so, in lower case and without that."""
        self._prefixes.append(prefix)
        return {
            name.removeprefix(prefix): value
            for name, value in self._options.items()
            if name.startswith(prefix)
        }

    def know(self, *names: str) -> None:
        self._known.update(dict.fromkeys(names))

    def note_limit(self, reader: Any) -> Any:
        """Return the reader, which knows by which options it is limited, if it is."""
        reader.limit_option = ", ".join(
            name for name in self._known if name.endswith("PerTrigger") and name.lower() in self._options
        )
        return reader

    def check_all_known(self) -> None:
        """Raise `ConfigError` for an option that was not asked for, with those that were."""
        known = {name.lower() for name in self._known} | _OF_SPARK
        for name in self._options:
            if name not in known and not name.startswith(tuple(self._prefixes)):
                names = ", ".join([*self._known, *(f"{prefix}…" for prefix in self._prefixes)])
                raise ConfigError(f"option {name!r} is unknown to {self._format}; it knows {names}")


class OptionsDataSource(datasource.DataSource):
    """A Data Source whose options make a source, a sink, or both, see `DataSourceOptions.made`.

    Attributes:
        format: what it is called.
        _sink_class: of the sink, if it is a stream writer; see `sink`.
    """

    format: ClassVar[str]
    _sink_class: ClassVar[type[DataSourceStreamArrowWriter] | None] = None

    @classmethod
    def name(cls) -> str:
        return cls.format

    def given(self) -> DataSourceOptions:
        return DataSourceOptions(self.options, self.format)

    def sink(self, options: DataSourceOptions) -> Any:
        """Return the stream writer that the options say; None: nothing can be written."""
        return None if self._sink_class is None else options.made(self._sink_class)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = self.given()
        sink = self.sink(options)
        if sink is None:
            return super().streamWriter(schema, overwrite)
        options.check_all_known()
        return sink
