"""The functions a user gave, each with its operator's uid, what it returns, and which failures are worth a retry.

``rate_limit`` is how many records a second each subtask, or task, gives the function; None: as many as come.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from ftlayer.checks import check_int, is_async_function
from ftlayer.errors import ConfigError
from ftlayer.functions.retry_rules import NO_RULES, RetryRules

Record = dict[str, Any]

MAIN = ""
"""The tag of the main output."""

MAX_IN_FLIGHT = 100_000
"""Calls at a time of a `MapAsync`: more than a process may have sockets."""


@dataclass(frozen=True)
class Map:
    uid: str
    function: Callable[[Record], Record]
    schema: pa.Schema
    rules: RetryRules = NO_RULES
    rate_limit: float | None = None


@dataclass(frozen=True)
class FlatMap:
    uid: str
    function: Callable[[Record], Any]
    schema: pa.Schema
    rules: RetryRules = NO_RULES
    rate_limit: float | None = None


@dataclass(frozen=True)
class Filter:
    """Keep the records for which the function is true."""

    uid: str
    function: Callable[[Record], Any]
    schema: pa.Schema
    rules: RetryRules = NO_RULES
    rate_limit: float | None = None


@dataclass(frozen=True)
class MapBatches:
    """A batch in, a batch out: row for row, or (``tagged``) with the column `ROW_TAG` kept.

    ``kind`` says what the function takes and returns: ``pa.RecordBatch`` or ``pandas.DataFrame``.
    """

    uid: str
    function: Callable[[Any], Any]
    schema: pa.Schema
    kind: Literal["arrow", "pandas"]
    tagged: bool
    rules: RetryRules = NO_RULES


def result_schema(function: object, given: pa.Schema) -> pa.Schema | None:
    """Return what a function of batches says its results' schema is, for batches of ``given``; None: it says nothing.

    Raises what the function raises for batches that it cannot take.
    """
    say = getattr(function, "result_schema", None)
    return None if say is None else say(given)


@dataclass(frozen=True)
class MapAsync:
    """One record in, one out, by an async function: up to ``in_flight`` calls at a time, ``timeout_ms`` for each.

    Raises `ConfigError` for a function that is not async, and for bounds that make no sense.
    """

    uid: str
    function: Callable[[Any], Awaitable[Any]]
    schema: pa.Schema
    in_flight: int
    timeout_ms: int
    rules: RetryRules = NO_RULES
    rate_limit: float | None = None

    def __post_init__(self) -> None:
        if not is_async_function(self.function):
            raise ConfigError(
                f"map_async {self.uid!r}: expected an async function (async def), got "
                f"{getattr(self.function, '__qualname__', repr(self.function))}; map takes plain ones"
            )
        check_int(self.in_flight, f"map_async {self.uid!r}: in_flight", least=1, most=MAX_IN_FLIGHT)


@dataclass(frozen=True)
class Reduce:
    """Running aggregate a key: the first record of a key as it is, then ``function(aggregate, record)``.

    With ``create`` it begins with ``function(create(), record)``, and may be of another schema than the records.
    Emits the new aggregate for every record. ``keys`` are columns. ``in_place``: the function may change an aggregate
    that it is given, so that a copy is kept where a failing record's changes are to be taken back.
    """

    uid: str
    function: Callable[[Any, Any], Any]
    keys: tuple[str, ...]
    schema: pa.Schema
    volatile_state: bool = False
    create: Callable[[], Any] | None = None
    rules: RetryRules = NO_RULES
    in_place: bool = True


@dataclass(frozen=True)
class Process:
    """A `ftlayer.functions.process.ProcessFunction`, with keyed state and timers where there are ``keys``.

    ``side`` names its side outputs and what each carries. ``in_place`` as in `Reduce`, of the values that it reads.
    """

    uid: str
    function: Any
    keys: tuple[str, ...]
    schema: pa.Schema
    side: tuple[tuple[str, pa.Schema], ...] = ()
    volatile_state: bool = False
    rules: RetryRules = NO_RULES
    rate_limit: float | None = None
    in_place: bool = True


@dataclass(frozen=True)
class CoProcess:
    """A function over two inputs that share keyed state; ``keys`` are those of input 0 and input 1.

    Both empty: no keys, and no keyed state. ``function`` is a `ftlayer.functions.process.CoProcessFunction`.
    """

    uid: str
    function: Any
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    inputs: tuple[pa.Schema, pa.Schema]
    schema: pa.Schema
    side: tuple[tuple[str, pa.Schema], ...] = ()
    volatile_state: bool = False
    rules: RetryRules = NO_RULES
    in_place: bool = True


RecordStep = Map | FlatMap | Filter
FunctionStep = Map | FlatMap | Filter | MapBatches | MapAsync
