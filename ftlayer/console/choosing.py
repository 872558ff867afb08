"""Which dead letters are meant: groups, single ones, or all that a filter leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftlayer.console.searching import RecordFilter, selections_of
from ftlayer.console.state import Console
from ftlayer.errors import ConfigError
from ftlayer.monitor.search import DEAD, Selection
from ftlayer.vertex.calls import MAX_KEYS


@dataclass(frozen=True, slots=True)
class ChosenGroup:
    """A group of dead letters: the number that it has in its stream."""

    vertex: str
    number: int
    stream: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Letters that somebody chose: groups, or (vertex, key) of single ones, or what a filter leaves.

    A filter that leaves all of them has to be meant so: ``everything``.
    """

    groups: tuple[ChosenGroup, ...] = ()
    keys: tuple[tuple[str, bytes], ...] = ()
    filter: RecordFilter | None = None
    everything: bool = False

    def selections(self, console: Console) -> list[Selection]:
        """Return where they are, no letter twice. Raises `ConfigError`, also where nothing was chosen."""
        given = [each for each in (self.groups, self.keys, self.filter) if each]
        if len(given) != 1:
            what = "nothing was chosen" if not given else "groups, letters and a filter were chosen at once"
            raise ConfigError(f"{what}; choose groups, or letters, or say a filter")
        if self.filter is not None:
            if self.filter.root:
                raise ConfigError(
                    "root: a filter that changes letters has none; choose the letters that it finds"
                )
            wanted = replace(self.filter, state=DEAD)
            if wanted == RecordFilter() and not self.everything:
                raise ConfigError(
                    'filter: nothing was chosen; for all dead letters there are, say "all": true'
                )
            return list(selections_of(console.watch, wanted, console.clock().wall_ms))
        selections = [
            Selection(group.vertex, stream_id=group.stream, group=group.number)
            for group in dict.fromkeys(self.groups)
        ]
        by_vertex: dict[str, list[bytes]] = {}
        for vertex, key in dict.fromkeys(self.keys):
            by_vertex.setdefault(vertex, []).append(key)
        for vertex, keys in by_vertex.items():
            for start in range(0, len(keys), MAX_KEYS):
                selections.append(Selection(vertex, keys=tuple(keys[start : start + MAX_KEYS])))
        for selection in selections:
            console.watch.client(selection.vertex)  # which says so where there is none
        return selections


def choice_of(groups: tuple[str, ...], keys: tuple[str, ...]) -> Choice:
    """Read what a form has checked: ``vertex:number:stream`` and ``vertex:key``. Raises `ConfigError`."""
    return Choice(tuple(map(_group, groups)), tuple(map(_key, keys)))


def _group(text: str) -> ChosenGroup:
    vertex, _, rest = text.partition(":")
    number, _, stream = rest.partition(":")
    if not (vertex and number.isdecimal() and stream):
        raise ConfigError(f"group: expected '<vertex>:<number>:<stream>', got {text!r}")
    return ChosenGroup(vertex, int(number), stream)


def _key(text: str) -> tuple[str, bytes]:
    vertex, _, key = text.partition(":")
    try:
        if vertex and key:
            return vertex, bytes.fromhex(key)
    except ValueError:
        pass  # what is said below
    raise ConfigError(f"key: expected '<vertex>:<hexadecimal key>', got {text!r}")
