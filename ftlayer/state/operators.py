"""State of an operator that belongs to no key: lists, union lists and broadcast mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ftlayer.checkpoint.snapshots import OperatorState, Redistribution
from ftlayer.errors import ConfigError, IncompatibleCheckpointError, StateSerializationError
from ftlayer.state.serializer import Serializer, unpack, unreadable


class SubtaskOperatorStates:
    """The operator state of one operator in one subtask: `ftlayer.state.contract.OperatorStates`."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self._states: dict[str, tuple[Redistribution, Any]] = {}
        self._restored: set[str] = set()
        self._asked: set[str] = set()

    def list(self, name: str, *, union: bool = False) -> list[Any]:
        """Return a list; another parallelism deals its items out, or (``union``) gives all items to all."""
        self._asked.add(name)
        found: list[Any] = self._state(name, Redistribution.UNION if union else Redistribution.SPLIT, list)
        return found

    def broadcast(self, name: str) -> dict[Any, Any]:
        """Return a mapping that every subtask has to fill alike."""
        self._asked.add(name)
        found: dict[Any, Any] = self._state(name, Redistribution.BROADCAST, dict)
        return found

    @property
    def unasked(self) -> set[str]:
        """The restored states that the operator has not asked for yet."""
        return self._restored - self._asked

    def check_asked(self) -> None:
        """Raise IncompatibleCheckpointError if it uses a state that is new while one of the checkpoint lies idle."""
        new = sorted(self._asked - self._restored)
        idle = sorted(name for name in self.unasked if self._states[name][1])
        if new and idle:
            raise IncompatibleCheckpointError(
                f"{self._uid!r} begins the operator state {', '.join(map(repr, new))} and does not use "
                f"{', '.join(map(repr, idle))}, which the checkpoint holds; ask for it under the name that it had, or, "
                f"if it may be dropped, name it: allow_unclaimed_state=[{f'{self._uid}/{idle[0]}'!r}]"
            )
        if new:
            self._asked |= self.unasked

    def _state(self, name: str, wanted: Redistribution, make: Callable[[], Any]) -> Any:
        kind, state = self._states.setdefault(name, (wanted, make()))
        if kind is wanted:
            return state
        if name in self._restored:
            raise IncompatibleCheckpointError(
                f"{self._uid!r} asks for the operator state {name!r} as {wanted}, and the checkpoint holds it as "
                f"{kind}; give the new state another name"
            )
        raise ConfigError(
            f"{self._uid!r} uses the operator state {name!r} as {kind} and as {wanted}; give each its own name"
        )

    def restore(self, states: Iterable[OperatorState]) -> None:
        """Fill in what a checkpoint holds of this operator."""
        for saved in states:
            kind = Redistribution(saved.redistribution)
            self._restored.add(saved.name)
            items = [self._unpacked(saved.name, item) for item in saved.items]
            if kind is Redistribution.BROADCAST:
                self._state(saved.name, kind, dict).update(items)
            else:
                self._state(saved.name, kind, list).extend(items)

    def snapshot(self, serializer: Serializer) -> Iterator[OperatorState]:
        """Write every state out as it is now; `StateSerializationError`. Meant for small states: it is not lazy."""
        for name, (kind, state) in self._states.items():
            values = state.items() if kind is Redistribution.BROADCAST else state
            yield OperatorState(
                self._uid, name, kind, tuple([self._packed(serializer, name, value) for value in values])
            )

    def _unpacked(self, name: str, item: bytes) -> Any:
        try:
            return unpack(item)
        except Exception as error:
            raise unreadable(f"operator {self._uid!r}, state {name!r}", error) from error

    def _packed(self, serializer: Serializer, name: str, value: Any) -> bytes:
        try:
            return serializer.pack(value)
        except Exception as error:
            raise StateSerializationError(
                f"operator {self._uid!r}, state {name!r}: a {type(value).__name__} cannot be written "
                f"({type(error).__name__}: {error})"
            ) from error
