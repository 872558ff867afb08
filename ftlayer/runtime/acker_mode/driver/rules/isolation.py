"""Finding the record that ends the process that works on it: replays go out in groups, nothing else does.

    loss → (repair) → all slots at rest → the vertex recalls what is pending → a group goes out → at rest → the next
    group → … → nothing is left: normal running goes on

The size of a group comes from `GroupSizes`. A record that was out alone when a slot was lost is *accused*. It goes out
alone once more, after a time in which nothing was out at all: a machine that ends processes by itself does so then too.
If the slot is lost again, the record is *convicted*, and becomes a dead letter. No I/O, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ftlayer.runtime.driver.rules.events import SOON_MS
from ftlayer.runtime.driver.rules.job_status import IsolationStatus
from ftlayer.runtime.protocol.messages import AllowReplays, LetOut, ReplaysOut

FACTOR = 8
"""A group that ends a process is searched in so many parts; a group without suspects that passes grows by it."""

FIRST_GROUP = FACTOR * FACTOR
"""Records of the first group where nothing says which are suspects."""


class GroupSizes:
    """How many records go out next, when one of them may end the process that works on it.

    Adaptive group testing (after Hwang, "A method for detecting all defective members in a population by group
    testing", 1972), with groups of an eighth instead of a half: a group that passes costs some milliseconds, one that
    does not costs the start of a process.

    Counts on what is recalled going out in its old order: what is held back on purpose (rows of a join that wait for
    a partner) and was there before the group that was lost comes first, and is innocent.

    Attributes:
        suspects: records, first in the queue behind the innocent ones, of which one has ended a process.
    """

    def __init__(self) -> None:
        self.suspects = 0
        self._innocent = 0
        self._all_suspect = False
        self._grown = FIRST_GROUP

    def suspect_all(self) -> None:
        self._all_suspect = True

    def lost(self, rows: int) -> None:
        """A process ended while a group of so many records (1 or more) was out."""
        self._all_suspect = False
        self.suspects = rows

    def convicted(self) -> None:
        self.suspects, self._grown = 0, FACTOR

    def recalled(self, rows: int) -> None:
        if self._all_suspect:
            self._all_suspect = False
            self.suspects = rows
        elif rows:
            # The others of the group are done. (A vertex that restarted has nothing to recall, and knows as much.)
            self.suspects = min(self.suspects, rows)
        self._innocent = max(0, rows - self.suspects)

    @property
    def next(self) -> int:
        """How many records the next group has, 1 or more."""
        return self._innocent or -(-self.suspects // FACTOR) or self._grown

    def passed(self, rows: int) -> None:
        """A group of so many records (up to ``next``) did no harm; fewer than ``next``: there were no more."""
        if rows < self.next:
            self._innocent = self.suspects = 0
        if self._innocent:
            self._innocent = 0
        else:
            self.suspects = max(0, self.suspects - rows)
            self._grown = max(1, rows) * FACTOR


# Nothing is out before an accused record's second time for twice as long as it took the first time, at least (ms) …
SHORTEST_CONTROL_MS = 200
# … and at most: a loss after a longer time is no quick one.
LONGEST_CONTROL_MS = SOON_MS
# So many further losses may come of what was still on its way between slots, before they are at rest.
LEFTOVERS = 4


@dataclass(frozen=True, slots=True)
class ReplayInput:
    uid: str
    slot: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell an input what it may take, or let out."""

    input: ReplayInput
    message: AllowReplays | LetOut


@dataclass(frozen=True, slots=True)
class RecallAll: ...


@dataclass(frozen=True, slots=True)
class AllThrough:
    """There is nothing left to replay: go on as usual."""


Step = Tell | RecallAll | AllThrough


@dataclass(frozen=True, slots=True)
class Convicted:
    """A record that has ended the process of ``slot``, alone, twice."""

    root: int
    origin: int
    slot: int


class _IsolationPhase(Enum):
    OFF = auto()
    REPAIR = auto()  # a slot is missing
    CALMING = auto()  # until all slots are at rest
    RECALLING = auto()
    CONTROL = auto()  # nothing is out, for a while
    TAKING = auto()  # inputs take the group's replays
    OUT = auto()


class Isolation:
    """Told of losses, repairs and answers; says what to do next. Off at first."""

    def __init__(self, inputs: Sequence[ReplayInput]) -> None:
        self._inputs = tuple(inputs)
        self._phase = _IsolationPhase.OFF
        self._sizes = GroupSizes()
        self._recalled = 0
        self._group = 0
        self._limit = self._taken = 0
        self._asked = 0  # place of the input that takes now
        self._alone: ReplaysOut | None = None
        self._since_ms = 0  # of the phase
        self._accused: int | None = None
        self._control_ms = 0
        self._excuses = 0
        self._found = 0
        self.convicted: Convicted | None = None

    @property
    def active(self) -> bool:
        return self._phase is not _IsolationPhase.OFF

    @property
    def found(self) -> int:
        return self._found

    @property
    def on_trial(self) -> bool:
        """Whether a record is accused: one more loss while it is out alone convicts it."""
        return self._accused is not None

    @property
    def waits_for_rest(self) -> bool:
        return self._phase in (_IsolationPhase.CALMING, _IsolationPhase.OUT)

    @property
    def group_is_out(self) -> bool:
        return self._phase is _IsolationPhase.OUT

    @property
    def status(self) -> IsolationStatus | None:
        if not self.active:
            return None
        out = self._taken if self._phase is _IsolationPhase.OUT else self._sizes.next
        return IsolationStatus(out, self._sizes.suspects, self._found)

    # ------------------------------------------------------------ losses and repairs

    def begin(self) -> None:
        """A slot was lost, not for the first time: whatever is pending is suspect."""
        self._sizes = GroupSizes()
        self._sizes.suspect_all()
        self._phase, self._recalled, self._found = _IsolationPhase.REPAIR, 0, 0
        self._accused, self._excuses = None, LEFTOVERS

    def lost(self, slot: int, now_ms: int) -> bool:
        """A slot that ran was lost; return whether records may have done it: it is no failure of its own."""
        if self._phase in (_IsolationPhase.CONTROL, _IsolationPhase.TAKING, _IsolationPhase.OUT):
            self._recalled = 0
        if self._phase is _IsolationPhase.OUT or (
            self._phase is _IsolationPhase.TAKING and not self._is_kept
        ):
            self._excuses = LEFTOVERS + 1
            if self._alone is not None:
                self._accuse(self._alone, slot, now_ms)
            self._sizes.lost(self._taken if self._phase is _IsolationPhase.OUT else self._limit)
        self._phase = _IsolationPhase.REPAIR
        self._excuses -= 1
        return self._excuses >= 0

    def deployed(self) -> None:
        self._phase = _IsolationPhase.CALMING

    def condemned(self) -> None:
        self.convicted = self._accused = None
        self._found += 1
        self._sizes.convicted()

    def _accuse(self, alone: ReplaysOut, slot: int, now_ms: int) -> None:
        if alone.origin == self._accused:
            self.convicted = Convicted(alone.root, alone.origin, slot)
            return
        self._accused = alone.origin
        took_ms = now_ms - self._since_ms
        self._control_ms = min(max(2 * took_ms, SHORTEST_CONTROL_MS), LONGEST_CONTROL_MS)

    # ------------------------------------------------------------ groups

    def at_rest(self, now_ms: int) -> list[Step]:
        if self._phase is _IsolationPhase.CALMING:
            self._phase, self._excuses = _IsolationPhase.RECALLING, 0
            return [RecallAll()]
        if self._alone is not None and self._alone.origin == self._accused:
            self._accused = None  # this time it did no harm
        self._sizes.passed(self._taken)
        return self._next_group(now_ms)

    def recalled(self, rows: int, now_ms: int) -> list[Step]:
        self._recalled += rows
        if self._phase is not _IsolationPhase.RECALLING:
            return []
        self._sizes.recalled(self._recalled)
        return self._next_group(now_ms)

    def tick(self, now_ms: int) -> list[Step]:
        if self._phase is _IsolationPhase.CONTROL and now_ms - self._since_ms >= self._control_ms:
            return self._take()
        return []

    def took(self, report: ReplaysOut, now_ms: int) -> list[Step]:
        if self._phase is not _IsolationPhase.TAKING or report.group != self._group:
            return []
        source = self._inputs[self._asked]
        self._taken += report.rows
        self._asked += 1
        steps: list[Step] = []
        if report.root:
            steps.append(Tell(source, LetOut(source.uid, self._group)))
            self._alone = report if self._limit == 1 else None
        if self._taken < self._limit and self._asked < len(self._inputs):
            return [*steps, self._allow()]
        if not self._taken:
            self._phase = _IsolationPhase.OFF
            return [AllThrough()]
        self._enter(_IsolationPhase.OUT, now_ms)
        return steps

    @property
    def _is_kept(self) -> bool:
        """Whether nothing of the group that is being taken has gone out."""
        return self._limit == 1

    def _next_group(self, now_ms: int) -> list[Step]:
        if self.on_trial and self._sizes.next == 1:
            self._enter(_IsolationPhase.CONTROL, now_ms)
            return []
        return self._take()

    def _take(self) -> list[Step]:
        if not self._inputs:
            self._phase = _IsolationPhase.OFF
            return [AllThrough()]
        self._phase = _IsolationPhase.TAKING
        self._group += 1
        self._limit, self._taken, self._asked, self._alone = self._sizes.next, 0, 0, None
        return [self._allow()]

    def _allow(self) -> Tell:
        source = self._inputs[self._asked]
        return Tell(source, AllowReplays(source.uid, self._group, self._limit - self._taken))

    def _enter(self, phase: _IsolationPhase, now_ms: int) -> None:
        self._phase, self._since_ms = phase, now_ms
