"""Changes of a state since a checkpoint was taken: its type is another one, or its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftlayer.common.checks import check_function, check_int, check_text, known_options
from ftlayer.errors import ConfigError

FIRST_VERSION = 1
"""Of a state that no `StateMigration` speaks of."""


def _unchanged(value: Any, version: int) -> Any:
    return value


@known_options
@dataclass(frozen=True)
class StateMigration:
    """How a restore reads a keyed state that an earlier program has written: `CheckpointConfig(migrations=[…])`.

    Attributes:
        operator: uid of the operator.
        state: its name now, which `open` asks for or the checkpoint has; the state of ``reduce`` and ``aggregate`` is
            called ``"aggregate"``.
        version: of what the program writes now, 2 or more: greater each time the type of the values changes. A state
            without a migration has version 1.
        migrate: ``migrate(value, version)`` returns the value for one that was written with that earlier version; it
            is called for each value, each item of a list, and the value of each item of a map, with or without a
            time to live. Values of the present version do not come to it.
        renamed_from: the name that it had, if that was another one.
    """

    operator: str
    state: str
    version: int = FIRST_VERSION
    migrate: Callable[[Any, int], Any] = _unchanged
    renamed_from: str | None = None

    def __post_init__(self) -> None:
        check_text(self.operator, "StateMigration: operator", "a name")
        check_text(self.state, "StateMigration: state", "a name")
        check_int(self.version, "StateMigration: version", least=FIRST_VERSION)
        check_function(self.migrate, "StateMigration: migrate", takes=2)
        if self.renamed_from is not None:
            check_text(self.renamed_from, "StateMigration: renamed_from", "a name, or None")
        if self.renamed_from == self.state:
            raise ConfigError(
                f"StateMigration: {self.operator}/{self.state}: renamed_from is the name that it has; leave it out"
            )
        if self.version > FIRST_VERSION and self.migrate is _unchanged:
            raise ConfigError(
                f"StateMigration: {self.operator}/{self.state}: version {self.version} needs a migrate function"
            )
        if self.version == FIRST_VERSION and self.renamed_from is None:
            raise ConfigError(
                f"StateMigration: {self.operator}/{self.state}: it changes nothing; give version=2 and migrate, or "
                "renamed_from"
            )


def may_leave(allowed: bool | tuple[str, ...], operator: str, name: str = "") -> bool:
    """Whether ``allow_unclaimed_state`` lets a restore leave behind what an operator had (of that name, if any)."""
    if isinstance(allowed, bool):
        return allowed
    return operator in allowed or f"{operator}/{name}" in allowed
