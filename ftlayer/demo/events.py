"""Events from the demo's driver to its screen: one line of JSON each."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Starting:
    """The driver has begun to start ``what``; what it had begun before is up."""

    what: str


@dataclass(frozen=True)
class Started:
    """Spark is up and the query or topology runs."""


@dataclass(frozen=True)
class Writing:
    """The query's sink was called for a batch: its verdict is sealed, its rows are not written yet."""

    batch: int


@dataclass(frozen=True)
class BatchDone:
    """A batch is through. ``again``: it had been sealed by a driver that did not live to commit it.

    ``rows_in`` counts source rows and replays, ``delivered`` the replays among them; ``waiting`` and ``dead``
    those that failed; ``seconds`` is the time since the batch before, or the start.
    """

    batch: int
    again: bool
    rows_in: int
    waiting: int
    dead: int
    delivered: int
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Where a topology is.

    Attributes:
        lines: of the input that have been read, by any driver so far.
        files: that its sinks have committed since this driver started.
        pids: of its slots' processes, 0 where there is none now.
        figures: what else is to be shown, by name.
    """

    lines: int
    files: int
    pids: list[int]
    figures: dict[str, int]


@dataclass(frozen=True)
class Restarted:
    """The query failed and its supervisor started it again."""

    failure: str


@dataclass(frozen=True)
class Finished:
    """Everything is done; what the ledger needs is written down."""


Event = Starting | Started | Writing | BatchDone | Progress | Restarted | Finished

_TYPES = {
    kind.__name__: kind for kind in (Starting, Started, Writing, BatchDone, Progress, Restarted, Finished)
}


def to_line(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}) + "\n"


def from_line(line: str) -> Event | None:
    """Read a line; None for one that was cut off by a kill."""
    if not line.endswith("\n"):
        return None
    values = json.loads(line)
    event: Event = _TYPES[values.pop("event")](**values)
    return event
