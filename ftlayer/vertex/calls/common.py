"""Parts of calls of every subject: envelope, options of a stream, ids, records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.backoff import BACKOFF_MS
from ftlayer.checks import check_choice, check_instance, check_int, check_number, known_options, shown
from ftlayer.circuit import Limit
from ftlayer.errors import ConfigError
from ftlayer.records.failure_columns import Why
from ftlayer.records.ids import RootRange as RootRange
from ftlayer.records.ids import RowRoots as RowRoots

U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]

MAX_ROWS = 1 << 20
"""At most this many rows in a call."""

REPLAYS = ("store", "source")
"""Where a replay of a topology's record comes from."""

LONGEST_MS = 1 << 52  # about 140,000 years: times stay exact, whatever they are added to


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who calls, and the how-many-eth call of theirs it is (from 1, without gaps).

    A client's call with a sequence already seen has no second effect and gets the first one's reply.
    """

    client: str
    sequence: int


@dataclass(frozen=True, slots=True)
class StreamCircuit:
    """A circuit breaker that holds a topology's stream while it is not closed.

    Streams of one topology that name it have it in common. It looks at the failures in the operator ``name``; one
    called "", or as the stream's source, at those in operators without one of their own. ``counts`` False: what becomes
    of this stream's records is not counted (those that it becomes are, in a stream of their own).
    """

    name: str
    limit: Limit
    counts: bool = True


@known_options
@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream's records are retried and how many may be in flight.

    ``max_attempts`` counts runs, the first included; None: a record is tried again without end. ``backoff_ms``
    lists the pause before attempt 2, 3, …; its last entry serves all later ones. ``jitter``
    (0 to 1) is the share of a pause that is drawn at random (deterministically, from the record's origin and attempt).
    ``circuits`` and ``replay`` are set by a topology for its streams (from ``max_failing``, and from ``replay`` of a
    source), and not stored: each run says them again.

    Raises `ConfigError` naming the option. A vertex asks for a ``timeout_ms`` of at least its ``timeout_buckets`` − 1.
    """

    timeout_ms: int = 30_000
    max_attempts: int | None = 5
    backoff_ms: tuple[int, ...] = BACKOFF_MS
    jitter: float = 0.1
    max_pending: int = 1_000_000
    circuits: tuple[StreamCircuit, ...] = ()
    replay: str = "store"

    def __post_init__(self) -> None:
        check_int(self.timeout_ms, "timeout_ms", least=1, most=LONGEST_MS)
        if self.max_attempts is not None:
            check_int(self.max_attempts, "max_attempts", least=1)
        if not isinstance(self.backoff_ms, tuple):
            raise ConfigError(
                f"backoff_ms: expected a tuple of pauses in milliseconds, got {shown(self.backoff_ms)}"
            )
        for place, pause in enumerate(self.backoff_ms):
            check_int(pause, f"backoff_ms[{place}]", least=0, most=LONGEST_MS)
        check_number(self.jitter, "jitter", least=0, most=1)
        check_int(self.max_pending, "max_pending", least=1, most=LONGEST_MS)
        check_instance(self.circuits, "circuits", tuple)
        for circuit in self.circuits:
            check_instance(circuit, "circuits", StreamCircuit)
        check_choice(self.replay, "replay", REPLAYS)


@dataclass(frozen=True, slots=True)
class EventIds:
    """The ids that values were folded from, for a vertex with ``tracker="exact"``; others take no note of them.

    ``values[i]`` is the XOR of ``ids[offsets[i]:offsets[i + 1]]``: ids uint64[m], offsets int32[n + 1], as
    Arrow lays lists out. ``owners``, int32[m], has for each id the position in ``operators`` of the operator
    that is to acknowledge it, or -1 where this event acknowledges the id itself.
    """

    ids: U64
    offsets: I32
    owners: I32
    operators: tuple[str, ...] = ()

    def take(self, which: npt.NDArray[np.int64]) -> EventIds:
        """Return the lists at the positions ``which``, in that order."""
        sizes = np.diff(self.offsets)[which]
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])
        places = np.repeat(self.offsets[which] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return EventIds(self.ids[places], offsets, self.owners[places], self.operators)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one root failed. ``traceback`` is cut to a bound by the layer. ``fatal`` skips further attempts.

    ``after_ms`` is the pause before the next attempt, exactly; None: as the stream's options say. A failure that does
    not use up an attempt (``uses_attempt``) is followed by the attempt of the same number. ``place`` says in words in
    which process it happened; "" where that is not known.
    """

    root: int
    reason: str
    operator: str = ""
    traceback: str = ""
    fatal: bool = False
    after_ms: int | None = None
    uses_attempt: bool = True
    place: str = ""

    @classmethod
    def of(cls, root: int, why: Why, place: str = "") -> Self:
        """Return a failure of a record, however it is kept, as that of a root."""
        return cls(
            root, why.reason, why.operator, why.traceback, why.fatal, why.after_ms, why.uses_attempt, place
        )


@dataclass(frozen=True, slots=True)
class Records:
    """Stored records as they came, with what the vertex knows of them. Arrays have one entry a row.

    ``first_failed_ms`` is the Unix time of each one's first failure, 0 where it has none; None where no row has any.
    ``edited``: the payload of all of them is not the one that ``key_hashes`` were made of.
    """

    payload: pa.RecordBatch
    roots: U64
    origins: U64
    attempts: I32  # 1 on the first run
    key_hashes: I32 | None = None
    first_failed_ms: U64 | None = None
    edited: bool = False


@dataclass(frozen=True, slots=True)
class RecordBatches:
    """Reply with records; several batches where schemas differ, and none where there is nothing.

    ``held``: there may be more, which a circuit breaker holds.
    """

    batches: tuple[Records, ...]
    held: bool = False
