"""Finding records that end the process that works on them, from what processes have left in writing.

    a process has ended itself → tasks begin again *armed*: each notes the record that it has in hand → it ends again,
    record in hand → and once more, over the same record: that is *convicted*, and its chain makes it a dead letter

The first death says of no record anything, so it takes three to convict one. What another process ended (the kernel
for want of memory, Spark, a host that is gone) leaves nothing in writing, and convicts no record. Up to
`MOST_EXCUSED` losses of a search are no failures to the restart strategy. The search is over when
`CHECKPOINTS` are complete since tasks began last. No I/O, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ftlayer.runtime.driver.job_status import IsolationStatus
from ftlayer.runtime.driver.reasons import convicted_by_deaths, died
from ftlayer.runtime.protocol.deaths import Conviction, Death

MOST_EXCUSED = 8
"""So many losses in a search without a conviction are excused."""

CHECKPOINTS = 2
"""Complete ones without a further loss, after which the search is over."""

_Record = tuple[str, bytes]


class KillerSearch:
    """Told of losses, of deaths that slots report, and of checkpoints.

    Attributes:
        active: whether tasks that begin now are to be armed.
    """

    def __init__(self) -> None:
        self.active = False
        self._known: set[str] = set()  # instances whose deaths are reported
        self._accused: set[_Record] = set()  # one process has ended over each
        self._convicted: dict[_Record, Conviction] = {}
        self._excused = 0
        self._found = 0
        self._completed = 0

    @property
    def convictions(self) -> tuple[Conviction, ...]:
        """Records that no complete checkpoint holds as dead."""
        return tuple(self._convicted.values())

    @property
    def status(self) -> IsolationStatus | None:
        """How far it is; None while there is none."""
        return IsolationStatus(1, len(self._accused), self._found) if self.active else None

    def lost(self) -> bool:
        """An instance that ran was lost; return whether that is excused."""
        if not self.active or self._excused >= MOST_EXCUSED:
            return False
        self._excused += 1
        return True

    def died(self, deaths: Iterable[Death]) -> list[str]:
        """Take what a slot has found of processes that are gone; return what is news of it, in words.

        Several slots may find the same.
        """
        news = []
        for death in deaths:
            if death.instance not in self._known:
                self._known.add(death.instance)
                news += [died(death), *self._look_into(death)]
        return news

    def deployed(self) -> None:
        """Tasks begin again: checkpoints count from now on."""
        self._completed = 0

    def completed(self, condemned: Collection[_Record]) -> None:
        """A checkpoint is complete that can be restored; it holds these records as dead, by chain and digest."""
        for record in condemned:
            self._convicted.pop(record, None)
        if not self.active:
            return
        self._completed += 1
        if self._completed >= CHECKPOINTS:
            self.active = False
            self._accused.clear()
            self._excused = self._found = 0

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
        assert self.active or not self._accused, f"{self._accused} are accused, and no search runs"
        both = self._accused & self._convicted.keys()
        assert not both, f"{both} are convicted, and accused as well"

    def _look_into(self, death: Death) -> list[str]:
        self.active = True
        record = death.chain, death.digest
        # It may have died before its process knew of the conviction.
        if not death.digest or record in self._convicted:
            return []
        if record not in self._accused:
            self._accused.add(record)
            return []
        self._accused.remove(record)
        self._convicted[record] = conviction = convicted_by_deaths(death)
        self._found += 1
        self._excused = 0
        return [f"{death.chain!r} makes a record a dead letter: {conviction.reason}"]
