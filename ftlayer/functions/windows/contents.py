"""The contents of windows: a reduced or aggregated value, or all records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Protocol

from ftlayer.functions.aggregates.per_record import AggregatesPerRecord
from ftlayer.functions.aggregates.typed import AggregatePlan
from ftlayer.functions.context import results_of
from ftlayer.functions.handles import NOTHING
from ftlayer.functions.windows.assigners import Window

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Result = Callable[[Any, Window, Any], Any]
"""``result(key, window, value)`` returns the record that a window emits."""


class Content(Protocol):
    """Puts records together; `NOTHING` is the content of a window without records.

    Attributes:
        described: what is kept, in words: `ftlayer.functions.keyed.KeyedState.describe`; "": a function makes it.
        is_given: whether a user's function makes the content itself, and may keep it.
    """

    is_given: bool

    @property
    def described(self) -> str:
        """See the class."""

    def added(self, content: Any, record: Any) -> Any:
        """Return the content with one more record."""

    def merged(self, content: Any, other: Any) -> Any:
        """Return the content of two windows that have become one; ``other`` is the later one's."""

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        """Return the records that a window emits."""


@dataclass(frozen=True)
class Reduced:
    """The first record, then ``function(reduced, record)``."""

    function: Callable[[Any, Any], Any]
    result: Result | None = None
    described = ""
    is_given = True

    def added(self, content: Any, record: Any) -> Any:
        return record if content is NOTHING else self.function(content, record)

    def merged(self, content: Any, other: Any) -> Any:
        return self.function(content, other)

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        return [content if self.result is None else self.result(key, window, content)]


@dataclass(frozen=True)
class Aggregated:
    """``add(create(), record)``, then ``add(aggregate, record)``. ``merge`` is needed where windows merge."""

    create: Callable[[], Any]
    add: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any] | None = None
    result: Result | None = None
    described = ""
    is_given = True

    def added(self, content: Any, record: Any) -> Any:
        return self.add(self.create() if content is NOTHING else content, record)

    def merged(self, content: Any, other: Any) -> Any:
        assert self.merge is not None
        return self.merge(content, other)

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        return [content if self.result is None else self.result(key, window, content)]


@dataclass(frozen=True)
class BuiltIn:
    """Built-in aggregates. A window emits its key's columns, its start and end, and a column for each of them."""

    plan: AggregatePlan
    is_given = False

    @property
    def described(self) -> str:
        return self.plan.described()

    @cached_property
    def _model(self) -> AggregatesPerRecord:
        return AggregatesPerRecord(self.plan)

    def added(self, content: Any, record: Any) -> Any:
        return self._model.add(self._model.create() if content is NOTHING else content, record)

    def merged(self, content: Any, other: Any) -> Any:
        return self._model.merge(content, other)

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        own = (key,) if len(self.plan.keys) == 1 else key
        times = (
            _EPOCH + timedelta(milliseconds=window.start_ms),
            _EPOCH + timedelta(milliseconds=window.end_ms),
        )
        return [(*own, *times, *self._model.results(content))]


@dataclass(frozen=True)
class Collected:
    """All records, in the order in which they came; ``function(key, window, records)`` returns what is emitted."""

    function: Callable[[Any, Window, list[Any]], Iterable[Any] | None]
    described = ""
    is_given = False

    def added(self, content: Any, record: Any) -> Any:
        if content is NOTHING:
            return [record]
        content.append(record)
        return content

    def merged(self, content: Any, other: Any) -> Any:
        return content + other

    def emitted(self, key: Any, window: Window, content: Any) -> Iterable[Any]:
        return results_of(self.function(key, window, list(content)))
