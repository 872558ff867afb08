"""The status of a job."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftlayer.checkpoint.coordinator.in_flight import CheckpointState
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.common.printable import html_table, shown_url
from ftlayer.common.rules.circuit import CircuitState, CircuitStatus, together
from ftlayer.common.rules.histogram import BATCH_BOUNDS, Histogram
from ftlayer.common.rules.restart import restarts_text
from ftlayer.records.beside import MISFITS
from ftlayer.runtime.driver.rules.events import JobState, SlotRecord
from ftlayer.runtime.protocol.messages import Heartbeat
from ftlayer.vertex.calls import StreamStatus, jobs

WHOLE = "checkpoint|"
"""The histogram of whole checkpoints; those of parts are ``checkpoint_<part>|<uid of the chain>``."""


class CheckpointTimes:
    """Counts each completed checkpoint once, however often it is shown the history that has it."""

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.written_bytes = 0
        self._counted: set[int] = set()

    def take(self, history: Sequence[jobs.CheckpointDetails]) -> None:
        completed = {each.number: each for each in history if each.state == CheckpointState.COMPLETED}
        for number in completed.keys() - self._counted:
            self._count(completed[number])
        # What has left the history does not come back.
        self._counted = set(completed)

    def _count(self, taken: jobs.CheckpointDetails) -> None:
        self.written_bytes += taken.total.written_bytes
        self._observe(WHOLE, taken.duration_ms)
        for part in taken.subtasks:
            self._observe(f"checkpoint_start_delay|{part.uid}", part.start_delay_ms)
            self._observe(f"checkpoint_alignment|{part.uid}", part.alignment_ms)
            self._observe(f"checkpoint_sync|{part.uid}", part.sync_ms)
            self._observe(f"checkpoint_async|{part.uid}", part.async_ms)

    def _observe(self, name: str, milliseconds: float) -> None:
        self.histograms.setdefault(name, Histogram(BATCH_BOUNDS)).observe(milliseconds / 1_000)


# Rates are those of the last seconds: long enough to be steady at one heartbeat a second.
WINDOW_MS = 5_000

IN = "records_in"
"""The counter of records that sources have read."""

NOW = ("waiting/", "waiting_bytes/", "paused/", "lag/", "away/")
"""What counters begin with that say how it is now, and are no totals; the uid of a chain follows, or of a source."""

DONE = "done"
"""The counter of a tracked job's records that came to be done."""


class Meter:
    """Sums the totals that instances and the vertex report; what a lost one had counted stays in."""

    def __init__(self) -> None:
        self._latest: dict[str, dict[str, int]] = {}
        self._totals: Counter[str] = Counter()
        self._before: StreamStatus | None = None
        self._done_in_vertex = 0
        self._done = 0
        self._taken = 0
        self._samples: deque[tuple[int, Counter[str]]] = deque()

    def update(self, instance: str, counters: dict[str, int], now_ms: int) -> None:
        """Take an instance's totals, which only grow; what is no total is left out."""
        before = self._latest.get(instance, {})
        counters = {name: value for name, value in counters.items() if not name.startswith(NOW)}
        for name, value in counters.items():
            self._totals[name] += value - before.get(name, 0)
        self._latest[instance] = counters
        if not self._samples or now_ms - self._samples[-1][0] >= WINDOW_MS // 20:
            self._samples.append((now_ms, self._totals.copy()))
        while len(self._samples) > 2 and now_ms - self._samples[1][0] >= WINDOW_MS:
            self._samples.popleft()

    def update_vertex(self, status: StreamStatus, now_ms: int) -> None:
        """Take what the vertex holds, and has seen done since its start, which may be later than the last time.

        The first time is that of before the job.
        """
        if self._before is None:
            self._before, self._done_in_vertex = status, status.done
        self._done += status.done - (self._done_in_vertex if status.done >= self._done_in_vertex else 0)
        self._done_in_vertex = status.done
        self._taken = self._done + _held(status) - _held(self._before)
        self.update("", {DONE: self._done}, now_ms)

    @property
    def totals(self) -> dict[str, int]:
        """All counters. Those records came in, at least, that the vertex has taken.

        (Reports of slots are up to a heartbeat old, and what a lost one had read since its last is in none.)
        """
        totals = dict(self._totals)
        if self._before is not None:
            totals[IN] = max(totals.get(IN, 0), self._taken)
        return totals

    def rates(self, now_ms: int) -> dict[str, float]:
        """Return the counters per second, over the last seconds."""
        if not self._samples:
            return {}
        since_ms, then = self._samples[0]
        passed = max(now_ms - since_ms, 1)
        return {name: (value - then[name]) * 1_000 / passed for name, value in self._totals.items()}


def _held(status: StreamStatus) -> int:
    return status.pending + status.due + status.waiting + status.dead


OUT = "records_out"

PAUSED, WAITING, LAG, AWAY = "paused/", "waiting/", "lag/", "away/"
"""Counters of chains; the uid follows."""


@dataclass(frozen=True)
class ChainStatus:
    """Records that a chain took and sent, and per second over the last few; of all its subtasks.

    ``late`` are those that came too late: to a join to be kept, to windows to go anywhere. In barrier mode with a
    `FailurePolicy`: attempts behind the first are ``retried``, ``waiting`` are records and timers that wait for their
    next one, ``dead`` those that were given up, ``paused`` subtasks that take no input now, since too many fail
    (``max_failing``) or wait (``max_waiting``). What is done again behind a restore counts again. Of a job that was
    stopped with a savepoint ``waiting`` are those that wait in it.
    """

    uid: str
    records_in: int
    records_out: int
    in_per_s: float
    out_per_s: float
    late: int = 0
    retried: int = 0
    waiting: int = 0
    dead: int = 0
    paused: int = 0


@dataclass(frozen=True)
class IsolationStatus:
    """How far the search for a record that ends processes is.

    Attributes:
        group: how many records are out, or are next.
        suspects: of so many records one has ended a process; 0 while the others are let out in growing groups.
        found: how many were found since it began.
    """

    group: int
    suspects: int
    found: int


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment.

    Attributes:
        job: unique id of this execution.
        counters: totals over all instances by name (``records_in``, ``persisted``, ``failed``, …). Records that
            are replayed count again; what an instance did between its last heartbeat and its loss is not in them.
        rates: the same per second, over the last few seconds.
        vertex: what is pending, due, waiting and dead; None with FTStatus.OFF, or where the vertex gave no answer.
        before: the same when the job began, what an earlier run had left; None where the vertex gave no answer then.
        checkpoints: totals in barrier mode, None in acker mode.
        isolation: how far the search for a record that ends processes is; None while there is none.
        restarts: how often something that ran was lost and started again: in acker mode a slot, in barrier mode what
            goes back to a checkpoint together. The loss behind which the restart strategy gives up is none. So it is
            at most what a `FixedDelay` allows, save for slots that a record ended, which no strategy counts.
        last_failure: why something was lost the last time, or could not be started.
        subtasks: what each did in the last second, by its slot's last heartbeat.
        edges: what waits for them, by slot; edges between the same two chains are one.
        incidents: the last 50 losses, restarts and changes of state, the oldest first; times by the wall clock at the
            job's start.
        transports: by slot: what carries records to each other slot that it sends to: ``unix`` for one that it has met
            on its own machine, ``flight`` for others.
        savepoint: where the savepoint lies that the job was stopped with, "" for none.
        breakers: circuit breakers of chains in barrier mode, by operator; a policy's by the first of its chain.
        lags: by source: how many records of its system were not read, when it was asked last; of the sources of logs
            and queues that can tell.
        away: by source: for how long (ms) its system cannot be read, or does not answer; 0 while it can.
        histograms: durations since the job's begin, by ``"<metric>|<part>"``: ``persist`` by source,
            ``end_to_end`` by ``"<source>|<sink>"``.
    """

    name: str
    job: str
    state: JobState
    epoch: int
    uptime_s: float
    slots: tuple[jobs.SlotDetails, ...]
    chains: tuple[ChainStatus, ...]
    counters: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    vertex: StreamStatus | None = None
    before: StreamStatus | None = None
    isolation: IsolationStatus | None = None
    checkpoints: jobs.CheckpointTotals | None = None
    restarts: int = 0
    last_failure: str = ""
    subtasks: tuple[jobs.SubtaskDetails, ...] = ()
    edges: tuple[jobs.EdgeDetails, ...] = ()
    incidents: tuple[jobs.Incident, ...] = ()
    histograms: dict[str, jobs.HistogramDetails] = field(default_factory=dict)
    transports: dict[int, dict[int, str]] = field(default_factory=dict)
    savepoint: str = field(default="", repr=False)
    breakers: dict[str, CircuitStatus] = field(default_factory=dict)
    lags: dict[str, int] = field(default_factory=dict)
    away: dict[str, int] = field(default_factory=dict)

    @property
    def circuits(self) -> dict[str, CircuitStatus]:
        """Where the circuit breakers of `max_failing` are, by operator or source; "" is the topology's.

        In barrier mode each subtask of a chain has its own: the state is that of the worst, the counts are added up.
        """
        return self.breakers if self.vertex is None else self.vertex.circuits

    @property
    def dead(self) -> int:
        """Records that are dead letters now: what the vertex has, or in barrier mode what the chains count."""
        return sum(chain.dead for chain in self.chains) + (0 if self.vertex is None else self.vertex.dead)

    @property
    def new_letters(self) -> int:
        """Those of `dead` that were not there when the program began."""
        return max(self.dead - (0 if self.before is None else self.before.dead), 0)

    def line(self) -> str:
        """Return it in one line: of a tracked job what is done, of another what its last chains took.

        Of a tracked one, what came in and what an earlier run had left is done, pending, due, waiting, dead by now or
        on its way to the vertex.
        """
        name, word = (DONE, "done") if DONE in self.counters else (OUT, "out")
        parts = [self._headline(), self._counted(IN, "in") + self._left_before(), self._counted(name, word)]
        if self.vertex is not None:
            parts.append(self._left(self.vertex))
        parts += self._failing()
        if self.counters.get(MISFITS):
            parts.append(f"{self.counters[MISFITS]:,} misfits")
        parts += [
            f"circuit {name or 'of the topology'} {status.state}"
            for name, status in self.circuits.items()
            if status.state is not CircuitState.CLOSED
        ]
        if self.checkpoints is not None:
            failed = f", {self.checkpoints.failed} failed" if self.checkpoints.failed else ""
            parts.append(f"{self.checkpoints.completed} checkpoints{failed}")
        if self.isolation is not None:
            parts.append(
                f"{self.isolation.group:,} let out, {self.isolation.suspects:,} suspects, {self.isolation.found} found"
            )
        if self.restarts:
            parts.append(restarts_text(self.restarts))
        busiest = max(self.slots, key=lambda slot: slot.busy_ms, default=None)
        if busiest is not None and busiest.busy_ms >= 1_000 and not self.state.is_final:
            where = busiest.function or busiest.busy
            parts.append(f"slot {busiest.slot} busy in {where} for {busiest.busy_ms / 1_000:.0f} s")
        if self.savepoint:
            parts.append(f"stopped with savepoint {shown_url(self.savepoint)}")
        elif self.state is JobState.ENDED and not self.counters.get(IN) and not self.counters.get(DONE):
            parts.append(
                "no new record was read: its sources have none, an earlier run of this name has read them to their end "
                "(another name or another directory begins anew; in barrier mode restore_from=None does), or it was "
                "drained before it had come to where that run had been"
            )
        return " · ".join(parts)

    def _headline(self) -> str:
        return f"{self.name}: {self.state}" + (f" after {self.uptime_s:.1f} s" if self.state.is_final else "")

    def _counted(self, counter: str, word: str) -> str:
        count = f"{self.counters.get(counter, 0):,} {word}"
        return count if self.state.is_final else f"{count} ({self.rates.get(counter, 0):,.0f}/s)"

    def _left_before(self) -> str:
        before = self.before
        left = 0 if before is None else before.pending + before.due + before.waiting
        return f", {left:,} left by an earlier run" if left else ""

    def _left(self, vertex: StreamStatus) -> str:
        tries = self.counters.get("failed", 0)
        # Some may have been requeued or purged since.
        old = 0 if self.before is None else min(self.before.dead, vertex.dead)
        dead = f"{vertex.dead:,} dead" + (f", {old:,} of them before" if old else "")
        dead += f" ({tries:,} failed tries)" if tries else ""
        if self.state is JobState.ENDED:
            return dead
        return f"{vertex.pending + vertex.due:,} pending, {vertex.waiting:,} waiting, {dead}"

    def _failing(self) -> list[str]:
        retried, waiting, dead = (
            sum(getattr(chain, name) for chain in self.chains) for name in ("retried", "waiting", "dead")
        )
        if not (retried or waiting or dead):
            return []
        where = " in the savepoint" if self.savepoint else ""
        words = [f"{waiting:,} waiting{where}"] if waiting or not self.state.is_final else []
        words.append(f"{dead:,} dead")
        paused = [chain.uid for chain in self.chains if chain.paused and not self.state.is_final]
        return [
            ", ".join(words) + (f" ({retried:,} retried)" if retried else ""),
            *(f"{uid} paused" for uid in paused),
        ]

    def _repr_html_(self) -> str:
        return html_table(
            self.line(),
            ("chain", "in", "in/s", "out", "out/s"),
            [
                (
                    chain.uid,
                    chain.records_in,
                    round(chain.in_per_s),
                    chain.records_out,
                    round(chain.out_per_s),
                )
                for chain in self.chains
            ],
        )


def slot_status(slot: SlotRecord, now_ms: int) -> jobs.SlotDetails:
    """Return the status of a slot."""
    hello, beat = slot.hello, slot.heartbeat
    state = (
        "ended"
        if slot.ended
        else "running"
        if slot.started
        else "initializing"
        if slot.deployed
        else "ready"
        if hello is not None
        else "starting"
        if slot.submitted
        else "waiting"
    )
    return jobs.SlotDetails(
        slot.number,
        state,
        host="" if hello is None else hello.host,
        pid=0 if hello is None else hello.pid,
        heartbeat_age_ms=-1 if beat is None else max(0, now_ms - slot.heard_ms),
        busy="" if beat is None else beat.busy,
        busy_ms=0 if beat is None else beat.busy_ms,
        function="" if beat is None else beat.function,
        restarts=slot.restarts,
        failure=slot.failure,
        instance="" if hello is None else hello.instance,
    )


def chain_status(
    uid: str,
    totals: dict[str, int],
    rates: dict[str, float],
    slots: Sequence[SlotRecord],
    savepoint: Checkpoint | None = None,
) -> ChainStatus:
    """Return it by the job's counters and their rates, and by what slots said last.

    ``savepoint`` is the one that the job was stopped with, if it was.
    """
    taken, sent = f"records_in/{uid}", f"records_out/{uid}"
    in_savepoint = () if savepoint is None else savepoint.subtasks
    waiting = sum(part.waiting for part in in_savepoint if part.uid == uid)
    return ChainStatus(
        uid,
        totals.get(taken, 0),
        totals.get(sent, 0),
        rates.get(taken, 0.0),
        rates.get(sent, 0.0),
        totals.get(f"late/{uid}", 0),
        totals.get(f"retried/{uid}", 0),
        _now(f"{WAITING}{uid}", slots) if savepoint is None else waiting,
        totals.get(f"dead/{uid}", 0),
        _now(f"{PAUSED}{uid}", slots),
    )


def chains_with(counter: str, slots: Sequence[SlotRecord]) -> frozenset[str]:
    """Return the uids of chains that have some of what a counter says, `PAUSED` or `WAITING`, as slots said last."""
    return frozenset(uid for uid, most in _most(counter, slots).items() if most)


def circuits_of(slots: Sequence[SlotRecord]) -> dict[str, CircuitStatus]:
    """Return where the circuit breakers of chains are, by operator, as slots that run said last."""
    found: dict[str, list[CircuitStatus]] = {}
    for beat in _beats(slots):
        for name, status in beat.circuits.items():
            found.setdefault(name, []).append(status)
    return {name: together(statuses) for name, statuses in found.items()}


def lags_of(slots: Sequence[SlotRecord]) -> dict[str, int]:
    """Return the lags of sources that are queues, as slots that run said last: each has seen all of the queue."""
    return _most(LAG, slots)


def away_of(planners: Mapping[str, int], slots: Sequence[SlotRecord]) -> dict[str, int]:
    """Return by source for how long (ms) its system cannot be read: the longest of what planners and slots said."""
    found = _most(AWAY, slots)
    return {uid: max(planners.get(uid, 0), found.get(uid, 0)) for uid in {**planners, **found}}


def _most(counter: str, slots: Sequence[SlotRecord]) -> dict[str, int]:
    found: dict[str, int] = {}
    for beat in _beats(slots):
        for name, value in beat.counters.items():
            if name.startswith(counter):
                uid = name.removeprefix(counter)
                found[uid] = max(value, found.get(uid, 0))
    return found


def transports_of(slots: Sequence[SlotRecord]) -> dict[int, dict[int, str]]:
    """Return what carries records from each slot to others, as these said last."""
    return {
        slot.number: {int(other): how for other, how in slot.heartbeat.transports.items() if other.isdigit()}
        for slot in slots
        if slot.heartbeat is not None
    }


def _now(counter: str, slots: Sequence[SlotRecord]) -> int:
    return sum(beat.counters.get(counter, 0) for beat in _beats(slots))


def _beats(slots: Sequence[SlotRecord]) -> list[Heartbeat]:
    return [slot.heartbeat for slot in slots if slot.heartbeat is not None and not slot.ended]
