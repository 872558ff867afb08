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

    def list(self, name: str, *, union: bool = False) -> list[Any]:
        """Return a list; another parallelism deals its items out, or (``union``) gives all items to all."""
        found: list[Any] = self._state(name, Redistribution.UNION if union else Redistribution.SPLIT, list)
        return found

    def broadcast(self, name: str) -> dict[Any, Any]:
        """Return a mapping that every subtask has to fill alike."""
        found: dict[Any, Any] = self._state(name, Redistribution.BROADCAST, dict)
        return found

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
                self.broadcast(saved.name).update(items)
            else:
                self.list(saved.name, union=kind is Redistribution.UNION).extend(items)

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
