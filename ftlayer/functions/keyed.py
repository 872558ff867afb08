"""The interface of a state backend for functions with keys (`ftlayer.state`), operator by operator.

Every table is named, and its entries belong to one key each. Keys are hashable Python values: that of the key's
column, or a tuple of several.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

Key = Hashable


class ListTable(Protocol):
    """A list for each key. A key without values has no entry."""

    def size(self, key: Key) -> int:
        """Return how many values there are."""

    def get(self, key: Key) -> list[Any]:
        """Return a list of the values, the caller's own."""

    def extend(self, key: Key, values: Iterable[Any]) -> None:
        """Add values behind those that are there."""

    def clear(self, key: Key) -> None:
        """Remove the key's entry."""


class MapTable(Protocol):
    """A mapping for each key. A key without items has no entry."""

    def keys(self) -> Iterable[Key]:
        """Return the keys that have items, in any order; not to be used behind the next change."""

    def items(self, key: Key) -> Mapping[Any, Any]:
        """Return the items, not to be changed, and valid until the next change."""

    def put(self, key: Key, field: Any, value: Any) -> None:
        """Set one item."""

    def remove(self, key: Key, field: Any) -> None:
        """Remove one item; KeyError if there is none."""

    def clear(self, key: Key) -> None:
        """Remove the key's entry."""


class StateCache(Protocol):
    """Has some of an operator's state in a form of its own, and changes it there. In the task's thread."""

    def write_back(self) -> None:
        """Put what has changed into the tables: a snapshot is about to be taken."""

    def tend(self) -> None:
        """Put some of it there, between batches, so that there is never much to be put at once."""


class KeyedState(Protocol):
    """The state of one operator in one subtask.

    A name belongs to one kind of table; ConfigError if it is asked for as another kind.
    """

    def values(self, name: str) -> MutableMapping[Key, Any]:
        """Return the table of single values of this name, the same at every call."""

    def lists(self, name: str) -> ListTable:
        """Return the table of lists of this name."""

    def maps(self, name: str) -> MapTable:
        """Return the table of mappings of this name."""

    def describe(self, name: str, values: str) -> None:
        """Say what the values of a table are, in words that a snapshot keeps.

        `IncompatibleCheckpointError` where a checkpoint that is restored has other words, and no migration.
        """

    def cache(self, cache: StateCache) -> None:
        """Have ``cache`` written back before snapshots, and tended, by backends that take some."""


class Timers(Protocol):
    """The timers of one operator in one subtask. There is at most one for a key and a time of each kind.

    Times are milliseconds since 1970.
    """

    def add_event(self, key: Key, time_ms: int) -> bool:
        """Set a timer of event time; whether there was none."""

    def add_processing(self, key: Key, time_ms: int) -> bool:
        """Set a timer of processing time; whether there was none."""

    def delete_event(self, key: Key, time_ms: int) -> bool:
        """Remove a timer of event time, if there is one; whether there was."""

    def delete_processing(self, key: Key, time_ms: int) -> bool:
        """Remove a timer of processing time, if there is one; whether there was."""

    def due_event(self, watermark_ms: int) -> tuple[int, list[Key]] | None:
        """Take out the earliest event timers up to the watermark: their time, and keys in the order of setting."""

    def due_processing(self, now_ms: int) -> tuple[int, list[Key]] | None:
        """Take out the earliest processing timers up to now: their time, and keys in the order of setting."""

    @property
    def next_event_ms(self) -> int | None:
        """The earliest event timer's time; None if there is none."""

    @property
    def next_processing_ms(self) -> int | None:
        """The earliest processing timer's time; None if there is none."""

    @property
    def event_count(self) -> int:
        """Number of event timers."""

    @property
    def processing_count(self) -> int:
        """Number of processing timers."""


class OperatorStates(Protocol):
    """State of one operator in one subtask that belongs to no key. The same object at every call for a name.

    A name belongs to one kind of state; ConfigError if it is asked for as another kind.
    """

    def list(self, name: str, *, union: bool = False) -> list[Any]:
        """Return a list; another parallelism deals its items out, or (``union``) gives all items to all."""

    def broadcast(self, name: str) -> dict[Any, Any]:
        """Return a mapping that every subtask has to fill alike."""

    def log_changes(self, logged: Callable[[Any], Any]) -> None:
        """Give out ``logged(state)`` in the place of each list and mapping; called before the first is asked for."""


class Backend(Protocol):
    """Where operators get their state and timers.

    Attributes:
        copies: whether what is in state is read by others, or taken back: what a function may keep is to be a copy.
    """

    @property
    def copies(self) -> bool:
        """See the class."""

    def state(self, uid: str) -> KeyedState:
        """Return the state of an operator; called once for each."""

    def timers(self, uid: str) -> Timers:
        """Return the timers of an operator; called once for each."""

    def operators(self, uid: str) -> OperatorStates:
        """Return the state of an operator that belongs to no key; called once for each."""
