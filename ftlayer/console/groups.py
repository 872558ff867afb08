"""Groups of dead letters, of all vertices."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.console.watch import Watch
from ftlayer.monitor.facts import Facts, group_facts


@dataclass(frozen=True, slots=True)
class FoundGroups:
    """Groups, the largest first, and why there may be more."""

    groups: list[Facts]
    troubles: list[str]


def dead_groups(
    watch: Watch, *, vertex: str = "", job: str = "", stream: str = "", operator: str = "", mask: bool
) -> FoundGroups:
    """Return the groups that a filter leaves; "" is all. A vertex that gives no answer is said so.

    Raises `ConfigError` for a vertex that there is not.
    """
    names = watch.names()
    if vertex:
        watch.is_up(vertex)  # which says so where there is none
    if job:
        vertex, _, owner = job.partition(":")
        stream = stream or owner
    groups: list[Facts] = []
    troubles = []
    for view in watch.views():
        if not view.has_records or vertex not in ("", view.vertex):
            continue
        if view.is_gone:
            if dead := int(view.stats.get("dead_letters", 0)):
                troubles.append(
                    f"The program of {view.vertex} has ended, and {dead:,} dead letters are in its store, {view.path}: "
                    "start it again, or serve the store with `ftlayer serve`, to look at them and to change them."
                )
            continue
        if not view.is_up:
            troubles.append(f"{view.vertex} gives no answer: {view.failure}")
        if view.indexed < 1:
            troubles.append(f"{view.vertex} counts its dead letters: {view.indexed:.0%} are in the groups.")
        groups += [group_facts(view.vertex, group, names, mask=mask) for group in view.groups]
    streams = set(names.streams(stream)) if stream else set()
    kept = [
        group
        for group in groups
        if operator in ("", group["operator"])
        and (not stream or (group["vertex"], group["stream_id"]) in streams or group["stream_id"] == stream)
    ]
    return FoundGroups(sorted(kept, key=lambda group: -group["count"]), troubles)
