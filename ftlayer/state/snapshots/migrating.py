"""Reads state as the program of now wants it: under its present name, and with values of its present version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ftlayer.checkpoint.migration import FIRST_VERSION, StateMigration
from ftlayer.checkpoint.snapshots import TableInfo
from ftlayer.checks import check_named
from ftlayer.errors import ConfigError, IncompatibleCheckpointError
from ftlayer.functions.keyed import Key
from ftlayer.functions.ttl import holds_stamped, plain_name
from ftlayer.state.tables.declarations import StateDeclarations
from ftlayer.state.tables.keyed import LIST, MAP, TIMERS


class Migrations:
    """What `CheckpointConfig.migrations` and ``allow_unclaimed_state`` say, by operator and table."""

    def __init__(self, migrations: Sequence[StateMigration], allowed: bool | tuple[str, ...] = False) -> None:
        self._by_name = {(one.operator, one.state): one for one in migrations}
        self._renamed = {
            (one.operator, one.renamed_from): one.state for one in migrations if one.renamed_from
        }
        self._allowed = () if isinstance(allowed, bool) else allowed

    def version(self, operator: str, table: str) -> int:
        """Return the version of what the program writes into a table."""
        found = self._by_name.get((operator, plain_name(table)))
        return FIRST_VERSION if found is None else found.version

    def check_declared(self, operator: str, declarations: StateDeclarations) -> None:
        """Raise `ConfigError` for a migration of a state that an operator, all of whose functions are open, has not.

        Which ones it has, `open` says. Nothing is known of an operator that asks for none there.
        """
        declared = set(map(plain_name, declarations.declared))
        if not declared:
            return
        known = declared | set(map(plain_name, declarations.held))
        for named, state in self._by_name:
            if named == operator and state not in known:
                try:
                    check_named(state, known, f"migrations: operator {operator!r} has no state")
                except ConfigError as error:
                    raise ConfigError(
                        f"{error}. If it is asked for with a record only, ask for it in `open` too"
                    ) from None

    def is_left_behind(self, operator: str, table: str) -> bool:
        """Whether a restore is to leave a state behind. With a time to live it has another name than without."""
        return f"{operator}/{table}" in self._allowed

    def present(self, info: TableInfo) -> TableInfo:
        """Return a table of a checkpoint under its present name; IncompatibleCheckpointError for a later version."""
        if info.kind == TIMERS:
            return info
        plain = plain_name(info.name)
        name = self._renamed.get((info.operator, plain))
        found = info if name is None else replace(info, name=name + info.name[len(plain) :])
        now = self.version(found.operator, found.name)
        if found.state_version > now:
            raise IncompatibleCheckpointError(
                f"operator {info.operator!r}, state {plain!r}: the checkpoint holds version {info.state_version} of "
                f"it, and this program has version {now}; restore with the program that wrote it, or a later one"
            )
        return found

    def changes(self, info: TableInfo) -> bool:
        """Whether a table of a checkpoint cannot be taken over as it is."""
        found = self.present(info)
        return found.name != info.name or (info.kind != TIMERS and self._is_older(found))

    def migrated(self, info: TableInfo, keys: list[Key], values: list[Any]) -> list[Any]:
        """Return values of a table, which has its present name, in their present version.

        IncompatibleCheckpointError where the user's function raises.
        """
        if not self._is_older(info):
            return values
        migrate = self._by_name[info.operator, plain_name(info.name)].migrate
        stamped = holds_stamped(info.name)

        def one(value: Any) -> Any:
            if stamped:
                until, inner = value
                return until, migrate(inner, info.state_version)
            return migrate(value, info.state_version)

        whole = _WHOLES.get(info.kind, _value)
        migrated = []
        for key, value in zip(keys, values, strict=True):
            try:
                migrated.append(whole(value, one))
            except Exception as error:
                raise IncompatibleCheckpointError(
                    f"operator {info.operator!r}, state {plain_name(info.name)!r}, key {key!r:.100}: its "
                    f"migration from version {info.state_version} to {self.version(info.operator, info.name)} failed "
                    f"({type(error).__name__}: {error})"
                ) from error
        return migrated

    def _is_older(self, info: TableInfo) -> bool:
        return info.state_version < self.version(info.operator, info.name)


def _value(value: Any, one: Callable[[Any], Any]) -> Any:
    return one(value)


def _list(values: Any, one: Callable[[Any], Any]) -> Any:
    return [one(value) for value in values]


def _map(items: Any, one: Callable[[Any], Any]) -> Any:
    return {field: one(value) for field, value in items.items()}


_WHOLES: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {LIST: _list, MAP: _map}
