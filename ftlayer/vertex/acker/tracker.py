"""The interface of trackers of pending roots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ftlayer.errors import ConfigError
from ftlayer.records.ids import RootRange
from ftlayer.vertex.acker.rotating_map import NEVER, U64, Mask, as_u64


class Roots(NamedTuple):
    """Roots and the location each was registered with, uint64[n] both."""

    roots: U64
    locations: U64


class Located(NamedTuple):
    """For each root asked for: whether it was pending, bool[n], and its location, uint64[n] (0 if not)."""

    pending: Mask
    locations: U64


@dataclass(frozen=True)
class IdLists:
    """The ids behind folded values, for a tracker that keeps them: one list for each event.

    ``ids`` is uint64[m]; list ``i`` is ``ids[offsets[i]:offsets[i + 1]]``, with ``offsets`` int64[n + 1]
    (Arrow's layout of lists). ``owners``, if given, names for each id the operator that is to acknowledge
    it; an empty name says that this event acknowledges the id itself.
    """

    ids: U64
    offsets: npt.NDArray[np.int64]
    owners: Sequence[str] | None = None

    def __post_init__(self) -> None:
        as_u64(self.ids, "ids")
        offsets = self.offsets
        if (
            offsets.size == 0
            or offsets[0] != 0
            or offsets[-1] != self.ids.size
            or (np.diff(offsets) < 0).any()
        ):
            raise ConfigError(
                f"offsets: expected int64[n + 1] rising from 0 to {self.ids.size}, got {offsets}"
            )
        if self.owners is not None and len(self.owners) != self.ids.size:
            raise ConfigError(
                f"owners: expected {self.ids.size} names, one for each id, got {len(self.owners)}"
            )


def fold_ids(lists: IdLists) -> U64:
    """Return the XOR of each list, uint64[n] (0 for an empty one): what a tracker takes as values."""
    running = np.concatenate([np.zeros(1, np.uint64), np.bitwise_xor.accumulate(lists.ids)])
    folded: U64 = running[lists.offsets[1:]] ^ running[lists.offsets[:-1]]
    return folded


class Tracker(Protocol):
    """Pending roots, each with the XOR of the ids emitted and not yet acknowledged.

    Batches are uint64[n] arrays; events count in the order of the batch, and a root may occur in it any
    number of times. A root completes when it is registered and its value is 0: once, after which it is
    unknown. ``bucket`` is a number from an `BucketRotation` (default: never expires). ``ids`` are the
    lists that ``values`` were folded from; `AckerTable` has no use for them. Not thread-safe.

    Raises `ConfigError` for arrays of another dtype, shape or length, and for a root 0 in `register`.
    """

    def register(
        self,
        roots: U64,
        values: U64,
        *,
        locations: U64 | None = None,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        """Enter roots with the XOR of all ids emitted for them; return those complete at once.

        A location is a number of the caller's, handed back when the root leaves (default 0). What was
        held for the root counts. A root that is registered already stays as it is, and is counted in
        `duplicate_registrations`.
        """

    def register_range(
        self,
        roots: RootRange,
        values: U64 | None,
        *,
        location: int = 0,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        """Do the same for consecutive roots, whose locations are consecutive, too, from ``location`` on.

        ``values`` None: the value of each is its own id.
        """

    def xor(
        self,
        roots: U64,
        values: U64,
        *,
        hold_unregistered: bool = False,
        bucket: int = NEVER,
        ids: IdLists | None = None,
    ) -> Roots:
        """XOR values into pending roots; return those that completed.

        An event of an unknown root is ignored and counted in `unknown_xors`; with ``hold_unregistered``
        it is held for the root's registration (as an *orphan*, stamped with ``bucket``), save for a
        root that completed earlier in the same batch.
        """

    def forget(self, roots: U64) -> Located:
        """Drop pending roots, complete or not; their later events are unknown."""

    def touch(self, roots: U64, bucket: int) -> Mask:
        """Move pending roots to ``bucket``; return which are pending, bool[n]."""

    def expire(self, buckets: Sequence[int], *, keep_as: int | None = None) -> Roots:
        """Return the pending roots in these buckets; drop them, or move them to bucket ``keep_as``."""

    def drop_orphans(self, buckets: Sequence[int]) -> int:
        """Drop the orphans in these buckets (numbers apart from those of roots); return how many."""

    def locate(self, roots: U64) -> Located:
        """Return which roots are pending, and where they were registered."""

    def contains(self, roots: U64) -> Mask:
        """Return which roots are pending, bool[n]."""

    def values(self, roots: U64) -> U64:
        """Return the values of roots, uint64[n]; 0 for one that is not pending."""

    def pending(self) -> Roots:
        """Return a copy of all pending roots, in no particular order."""

    @property
    def pending_count(self) -> int:
        """Number of pending roots."""

    @property
    def orphan_count(self) -> int:
        """Number of roots with events held for a registration."""

    @property
    def unknown_xors(self) -> int:
        """Events that were ignored since the start."""

    @property
    def duplicate_registrations(self) -> int:
        """Registrations that were ignored since the start."""
