"""Handles of keyed state, as a process function uses them: each speaks of the key of the current call."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from typing import TYPE_CHECKING, Any, Generic, Protocol, overload

from ftlayer.functions.keyed import ATOMS, Key, ListTable, MapTable, StateTtl, is_marker, owned, owned_all
from ftlayer.records.kernels import native

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Value = TypeVar("Value", default=Any)
    Field = TypeVar("Field", default=Any)
    Result = TypeVar("Result", default=Any)
else:  # A default is of Python 3.13.
    from typing import TypeVar

    Value, Field, Result = map(TypeVar, ("Value", "Field", "Result"))


class KeyedCall(Protocol):
    key: Any
    now_ms: int


Own = Callable[[Any], Any] | None
"""`ftlayer.functions.keyed.owned` for what functions get and set, which they may keep; None: it is not copied."""


class ValueHandle(Generic[Value], metaclass=ABCMeta):  # for handles in C, which are registered
    """One value a key, of the default's type; without one it may be said: ``last: ValueHandle[str | None]``."""

    __slots__ = ("_context", "_own", "_table", "default", "ttl")

    def __init__(
        self,
        context: KeyedCall,
        table: MutableMapping[Key, Any],
        default: Any = None,
        ttl: StateTtl | None = None,
        own: Own = None,
    ) -> None:
        self._context = context
        self._table = table
        self._own: Callable[[Value], Value] | None = own
        self.default = default
        self.ttl = ttl

    def get(self) -> Value:
        """Return the value, the default if there is none. After changing it in place, `set` it."""
        value: Value = self._table.get(self._context.key, NOTHING)
        if value is NOTHING:
            return self._initial()
        return value if self._own is None else self._own(value)

    def set(self, value: Value) -> None:
        """Replace the value."""
        self._table[self._context.key] = value if self._own is None else self._own(value)

    def clear(self) -> None:
        """Remove the value."""
        self._table.pop(self._context.key, None)

    def _initial(self) -> Value:
        """Return the default, a copy for each caller: keys that shared a list would see each other's values."""
        value: Value = self.default if is_marker(self.default) else owned(self.default)
        return value


ValueHandle.register(native.DictValueHandle)


class _Handle:
    __slots__ = ("_context", "_own", "_table", "ttl")

    def __init__(self, context: KeyedCall, table: Any, ttl: StateTtl | None = None, own: Own = None) -> None:
        self._context = context
        self._table = table
        self._own = own
        self.ttl = ttl


class ListHandle(_Handle, Generic[Value]):
    """A list a key; what it holds may be said: ``seen: ListHandle[int]``."""

    __slots__ = ()
    _table: ListTable

    def append(self, value: Value) -> None:
        self._table.extend(self._context.key, (value if self._own is None else self._own(value),))

    def extend(self, values: Iterable[Value]) -> None:
        self._table.extend(self._context.key, values if self._own is None else owned_all(list(values)))

    def get(self) -> list[Value]:
        return self._table.get(self._context.key)

    def clear(self) -> None:
        self._table.clear(self._context.key)


class MapHandle(_Handle, MutableMapping[Field, Value]):
    """A mapping a key: ``by_name: MapHandle[str, int]``. After changing one of its values in place, set it again."""

    __slots__ = ()
    _table: MapTable

    def __getitem__(self, field: Field) -> Value:
        value: Value = self._table.items(self._context.key)[field]
        return value if self._own is None else self._own(value)

    def __contains__(self, field: object) -> bool:
        return field in self._table.items(self._context.key)

    @overload
    def get(self, field: Field) -> Value | None: ...

    @overload
    def get(self, field: Field, default: Value | Result) -> Value | Result: ...

    def get(self, field: Any, default: Any = None) -> Any:
        value = self._table.items(self._context.key).get(field, default)
        return value if self._own is None or value is default else self._own(value)

    def items(self) -> ItemsView[Field, Value]:
        """Return the current key's items, as they are until the next change."""
        return self._all().items()

    def values(self) -> ValuesView[Value]:
        """Return the current key's values, as they are until the next change."""
        return self._all().values()

    def _all(self) -> Mapping[Field, Value]:
        items = self._table.items(self._context.key)
        if self._own is None or ATOMS.issuperset(map(type, items.values())):
            return items
        return {field: self._own(value) for field, value in items.items()}

    def __setitem__(self, field: Field, value: Value) -> None:
        self._table.put(self._context.key, field, value if self._own is None else self._own(value))

    def __delitem__(self, field: Field) -> None:
        self._table.remove(self._context.key, field)

    def __iter__(self) -> Iterator[Field]:
        return iter(self._table.items(self._context.key))

    def __len__(self) -> int:
        return len(self._table.items(self._context.key))

    def clear(self) -> None:
        self._table.clear(self._context.key)


class ReducingHandle(Generic[Value]):
    """One value a key that takes others in: the first one as it is, then ``function(value, other)``."""

    __slots__ = ("_function", "_value")

    def __init__(self, value: ValueHandle, function: Callable[[Value, Value], Value]) -> None:
        """``value`` has `NOTHING` where nothing was added."""
        self._value = value
        self._function = function

    def add(self, value: Value) -> None:
        old = self._value.get()
        self._value.set(value if old is NOTHING else self._function(old, value))

    def get(self) -> Value | None:
        value = self._value.get()
        return None if value is NOTHING else value

    def clear(self) -> None:
        self._value.clear()


class AggregatingHandle(Generic[Value, Result]):
    """An aggregate a key: ``add(create(), value)``, then ``add(aggregate, value)``."""

    __slots__ = ("_add", "_create", "_result", "_value")

    def __init__(
        self,
        value: ValueHandle,
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        result: Callable[[Any], Result] | None,
    ) -> None:
        """``value`` has `NOTHING` where nothing was added."""
        self._value = value
        self._create = create
        self._add = add
        self._result = result

    def add(self, value: Value) -> None:
        old = self._value.get()
        self._value.set(self._add(self._create() if old is NOTHING else old, value))

    def get(self) -> Result | None:
        """Return ``result(aggregate)``, or without ``result`` the aggregate; None if nothing was added."""
        aggregate = self._value.get()
        if aggregate is NOTHING:
            return None
        return aggregate if self._result is None else self._result(aggregate)

    def clear(self) -> None:
        self._value.clear()


class _Nothing:
    __slots__ = ()


NOTHING: Any = _Nothing()
"""In place of a value where there is none, and None may be one."""
