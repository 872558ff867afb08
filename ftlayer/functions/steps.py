"""The functions a user gave, as steps of a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from ftlayer.common.checks import check_int, is_async_function
from ftlayer.errors import ConfigError
from ftlayer.functions.retry_rules import NO_RULES, RetryRules

Record = dict[str, Any]

MAIN = ""
"""The tag of the main output."""

MAX_IN_FLIGHT = 100_000
"""Calls at a time of a `MapAsync`: more than a process may have sockets."""


@dataclass(frozen=True)
class Step:
    """A function that a user gave, with its operator's uid, what it returns, and which failures are worth a retry.

    ``rate_limit`` is how many records a second each subtask, or task, gives the function; None: as many as come.
    """

    uid: str
    function: Any
    schema: pa.Schema
    rules: RetryRules = field(default=NO_RULES, kw_only=True)
    rate_limit: float | None = field(default=None, kw_only=True)


class Map(Step):
    """A record in, a record out."""


class FlatMap(Step):
    """A record in, any number out."""


class Filter(Step):
    """Keep the records for which the function is true."""


@dataclass(frozen=True)
class MapBatches(Step):
    """A batch in, a batch out: row for row, or (``tagged``) with the column `ROW_TAG` kept.

    ``kind`` says what the function takes and returns: ``pa.RecordBatch`` or ``pandas.DataFrame``.
    """

    kind: Literal["arrow", "pandas"]
    tagged: bool


def result_schema(function: object, given: pa.Schema) -> pa.Schema | None:
    """Return what a function of batches says its results' schema is, for batches of ``given``; None: it says nothing.

    Raises what the function raises for batches that it cannot take.
    """
    say = getattr(function, "result_schema", None)
    return None if say is None else say(given)


@dataclass(frozen=True)
class MapAsync(Step):
    """One record in, one out, by an async function: up to ``in_flight`` calls at a time, ``timeout_ms`` for each.

    Raises `ConfigError` for a function that is not async, and for bounds that make no sense.
    """

    in_flight: int
    timeout_ms: int

    def __post_init__(self) -> None:
        if not is_async_function(self.function):
            raise ConfigError(
                f"map_async {self.uid!r}: expected an async function (async def), got "
                f"{getattr(self.function, '__qualname__', repr(self.function))}; map takes plain ones"
            )
        check_int(self.in_flight, f"map_async {self.uid!r}: in_flight", least=1, most=MAX_IN_FLIGHT)


@dataclass(frozen=True)
class KeyedStep(Step):
    """A function with keyed state, which may be lost with its slot where it is ``volatile_state``.

    ``in_place``: the function may change values of its state that it is given, so that copies are kept where a failing
    record's changes are to be taken back.
    """

    volatile_state: bool = field(default=False, kw_only=True)
    in_place: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class Reduce(KeyedStep):
    """Running aggregate a key: the first record of a key as it is, then ``function(aggregate, record)``.

    With ``create`` it begins with ``function(create(), record)``, and may be of another schema than the records.
    Emits the new aggregate for every record. ``keys`` are columns.
    """

    keys: tuple[str, ...]
    create: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Process(KeyedStep):
    """A `ftlayer.functions.process.ProcessFunction`, with keyed state and timers where there are ``keys``.

    ``side`` names its side outputs and what each carries.
    """

    keys: tuple[str, ...]
    side: tuple[tuple[str, pa.Schema], ...] = ()


@dataclass(frozen=True)
class TwoInputStep(KeyedStep):
    """A function over two inputs that share keyed state; ``keys`` are those of input 0 and input 1."""

    keys: tuple[tuple[str, ...], tuple[str, ...]]
    inputs: tuple[pa.Schema, pa.Schema]


@dataclass(frozen=True)
class CoProcess(TwoInputStep):
    """A `ftlayer.functions.process.CoProcessFunction`. Both ``keys`` empty: no keys, and no keyed state."""

    side: tuple[tuple[str, pa.Schema], ...] = ()


RecordStep = Map | FlatMap | Filter
FunctionStep = Map | FlatMap | Filter | MapBatches | MapAsync
