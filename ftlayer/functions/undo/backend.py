"""A state backend whose users' changes can be taken back."""

from __future__ import annotations

from functools import partial

from ftlayer.functions.keyed import Backend, KeyedState, OperatorStates, StateCache
from ftlayer.functions.undo.log import Changes, Uncopied, UndoLog
from ftlayer.functions.undo.operator_state import logged
from ftlayer.functions.undo.tables import UndoLists, UndoMaps, UndoValues
from ftlayer.functions.undo.timers import UndoTimers


class UndoBackend:
    """`ftlayer.functions.keyed.Backend`: what functions change through it goes into ``log``."""

    def __init__(self, backend: Backend, log: UndoLog, *, copies: bool = True) -> None:
        """``copies``: what functions read is copied where they could change it in place."""
        self._backend = backend
        self._log = log
        self.copies = copies
        self._changes: Changes = log if copies else Uncopied(log)

    def uncopied(self) -> UndoBackend:
        """Return the same for functions that change no value in place."""
        return UndoBackend(self._backend, self._log, copies=False)

    def state(self, uid: str) -> UndoState:
        return UndoState(self._backend.state(uid), self._changes)

    def timers(self, uid: str) -> UndoTimers:
        return UndoTimers(self._backend.timers(uid), self._log)

    def operators(self, uid: str) -> OperatorStates:
        states = self._backend.operators(uid)
        states.log_changes(partial(logged, log=self._changes))
        return states


class UndoState:
    """The keyed state of one operator: `ftlayer.functions.keyed.KeyedState`."""

    def __init__(self, state: KeyedState, log: Changes) -> None:
        self._state = state
        self._log = log
        # One object a table: the log tells places by them.
        self._values: dict[str, UndoValues] = {}
        self._lists: dict[str, UndoLists] = {}
        self._maps: dict[str, UndoMaps] = {}

    def values(self, name: str) -> UndoValues:
        if name not in self._values:
            self._values[name] = UndoValues(self._state.values(name), self._log)
        return self._values[name]

    def lists(self, name: str) -> UndoLists:
        if name not in self._lists:
            self._lists[name] = UndoLists(self._state.lists(name), self._log)
        return self._lists[name]

    def maps(self, name: str) -> UndoMaps:
        if name not in self._maps:
            self._maps[name] = UndoMaps(self._state.maps(name), self._log)
        return self._maps[name]

    def describe(self, name: str, values: str) -> None:
        self._state.describe(name, values)

    def cache(self, cache: StateCache) -> None:
        self._state.cache(cache)
