"""A stream as it is kept in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field, replace

from ftlayer.common.clock import Now
from ftlayer.common.rules.histogram import Histogram
from ftlayer.errors import MalformedRequestError, ProtocolError, StaleOwnerError
from ftlayer.records.failures import Failure, split_traceback
from ftlayer.vertex.calls import ClaimJob, JobClaimed, StreamOptions, handles
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import I64, SHARED_FROM, History, StoredAttempt
from ftlayer.vertex.store.streams import StreamRecord, all_jobs, put_job, put_stream

# A topology's streams belong to the run that has claimed it last. Nothing has to time out: what an earlier one has
# under way when it is recalled has roots that are no longer known, and what it adds later is refused.


INGEST = "ingest/"


def owner_of(stream: str) -> str:
    """Return what a stream belongs to: its query or job, or the whole name of an ingest."""
    return stream if stream.startswith(INGEST) else stream.split("/", 1)[0]


class Owners:
    def __init__(self) -> None:
        self._runs: dict[str, str] = {}

    def recover(self, txn: ReadTransaction) -> None:
        self._runs = dict(all_jobs(txn))

    @handles(ClaimJob)
    def claim(self, txn: WriteTransaction, call: ClaimJob, now: Now) -> JobClaimed:
        previous = self._runs.get(call.job, "")
        put_job(txn, call.job, call.run)
        self._runs[call.job] = call.run
        return JobClaimed(previous)

    def run_of(self, job: str) -> str:
        return self._runs.get(job, "")

    def check(self, streams: Iterable[str], owner: str) -> None:
        """Raise `StaleOwnerError` if a job of ``streams`` belongs to another run than ``owner`` ("": any)."""
        if not owner:
            return
        for job in {owner_of(stream) for stream in streams}:
            run = self._runs.get(job)
            if run is None:
                raise ProtocolError(f"run {owner} has not claimed job {job!r}: begin with ClaimJob")
            if run != owner:
                raise StaleOwnerError(
                    f"topology {job!r} was started again by another driver, as run {run}, which goes on with its "
                    f"records: this one, {owner}, ends, and the vertex takes nothing of it any more. Run one of them, "
                    "or give each a name of its own"
                )


MAX_REASON = 1_024  # characters
MAX_OPERATOR = 256  # characters
MAX_PLACE = 256  # characters
MAX_TRACEBACK = 4_096  # characters: some 50 frames, of which the first and the last tell most
MAX_HISTORY = 16  # failed attempts; the first and the newest are kept
MAX_TRACEBACKS = 4  # of them have their traceback; the first and the newest again

NOT_KEPT = f"[not kept: the first attempt and the last {MAX_TRACEBACKS - 1} have their tracebacks]"


def held(cause: Failure) -> Failure:
    """Return the cause as it counts while a circuit breaker holds records: it is the breaker that makes the pause."""
    return replace(cause, uses_attempt=False, after_ms=cause.after_ms or 0)


def shortened(history: History) -> History:
    """Return what stays of ``history`` when one more attempt fails: `MAX_HISTORY`, `MAX_TRACEBACKS` with theirs."""
    if len(history) >= MAX_HISTORY:
        history = history[:1] + history[len(history) - MAX_HISTORY + 2 :]
    if len(history) >= MAX_TRACEBACKS:
        at = len(history) - MAX_TRACEBACKS + 1
        history = (*history[:at], _without_traceback(history[at]), *history[at + 1 :])
    return history


def stored_attempt(number: int, wall_ms: int, cause: Failure, hold: Callable[[str], bytes]) -> StoredAttempt:
    """Return a failed attempt, its texts cut to their bounds; ``hold`` keeps one that others may share."""
    reason = cut(cause.reason, MAX_REASON)
    frames, last_line = split_traceback(cut(cause.traceback, MAX_TRACEBACK))
    digest = b""
    said: str | None = last_line
    if len(frames) < SHARED_FROM:
        said = frames + last_line
    else:
        digest = hold(frames)
        if last_line == f"{reason}\n":
            said = None
    operator, place = cut(cause.operator, MAX_OPERATOR), cut(cause.place, MAX_PLACE)
    return StoredAttempt(number, wall_ms, reason, operator, place, digest, said)


def _without_traceback(attempt: StoredAttempt) -> StoredAttempt:
    has_one = bool(attempt.frames or attempt.last_line is None or attempt.last_line)
    return attempt._replace(frames=b"", last_line=NOT_KEPT if has_one else "")


def cut(text: str, limit: int) -> str:
    """Return ``text`` with at most ``limit`` characters; what is left out of its middle is counted there."""
    if len(text) <= limit:
        return text
    note = f"\n[… about {len(text) - limit} characters left out …]\n"
    kept = limit - len(note)
    head = kept // 2
    return text[:head] + note + text[len(text) - (kept - head) :]


def check_timeout(options: StreamOptions, buckets: int) -> None:
    if options.timeout_ms < buckets - 1:
        raise MalformedRequestError(
            f"options.timeout_ms: expected at least {buckets - 1} ms of a vertex with timeout_buckets={buckets}, got "
            f"{options.timeout_ms}"
        )


@dataclass(slots=True)
class StreamCounters:
    """Rows and events of one stream.

    ``completed`` counts roots (emitted ones, and late ones that cancelled their replay too), ``delivered_done`` the
    delivered rows that a commit finished. ``failed_explicit`` and ``timed_out`` count attempts that ended so,
    ``failed_sealed`` those that a batch's seal named. ``recalled`` are pending rows that became due at once (`Recall`).
    """

    persisted: int = 0
    ingested: int = 0
    registered: int = 0
    completed: int = 0
    delivered_done: int = 0
    failed_explicit: int = 0
    failed_sealed: int = 0
    timed_out: int = 0
    replayed: int = 0
    dead: int = 0
    requeued: int = 0
    purged: int = 0
    cancelled_replays: int = 0
    duplicate_roots: int = 0
    recovered: int = 0
    recalled: int = 0

    @property
    def failed(self) -> int:
        return self.failed_explicit + self.failed_sealed + self.timed_out


@dataclass(slots=True)
class ShardCounters:
    """Events of no known stream: ``late_ignored`` of unknown roots, ``orphans_dropped`` of roots never registered."""

    late_ignored: int = 0
    orphans_dropped: int = 0
    deduplicated_calls: int = 0


MARK_MS = 1_000
"""Rows that come within so long have one time, that of the first."""

MAX_MARKS = 1_024
"""When there are more, each two become one: of a log that is not read for hours the times are coarser."""


class LogAge:
    """Times (Unix, ms) of rows, by the offset that they end before. A row is never younger than it says."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, end: int, now_ms: int) -> None:
        if self._marks and now_ms - self._marks[-1][1] < MARK_MS:
            self._marks[-1] = end, self._marks[-1][1]
            return
        self._marks.append((end, now_ms))
        if len(self._marks) > MAX_MARKS:
            marks = list(self._marks)
            pairs = zip(marks[::2], marks[1::2], strict=False)
            self._marks = deque((later_end, since_ms) for (_, since_ms), (later_end, _) in pairs)
            self._marks.extend(marks[len(marks) - len(marks) % 2 :])

    def committed(self, offset: int) -> None:
        while self._marks and self._marks[0][0] <= offset:
            self._marks.popleft()

    @property
    def since_ms(self) -> int:
        """Since when the first row that is not committed has been there; 0: there is none."""
        return self._marks[0][1] if self._marks else 0


@dataclass(slots=True)
class Stream:
    """A stream and its counts of rows.

    ``in_flight`` are registered and not complete, ``waiting`` are in the table of that name (cancelled replays left
    out), ``logged`` are in the delivery log beyond what is committed, ``dead`` are dead. ``due`` are rows of tracked
    segments that are not being worked on: after a restart, recalled, or registered under a root that was taken.
    ``unstored`` were recalled, and are still with those who hold them (of ``in_flight``). ``offered`` is the offset up
    to which the query was told of deliveries. ``asked_pause_ms`` is the longest pause that a failure has asked for
    itself. ``died_ms`` is the time in the last dead letter's key, ``gone_ms`` that of the last one that is gone: keys
    only ascend, whatever the wall clock does, so that a reader misses none behind its position. ``completion`` is how
    long rows took from the registration of the attempt that completed to its completion; those of a call were
    registered at once and are counted together. ``log_age`` knows since when ``logged`` rows are there.
    """

    name: str
    number: int
    options: StreamOptions
    query: str = ""
    in_flight: int = 0
    waiting: int = 0
    logged: int = 0
    dead: int = 0
    offered: int = 0
    asked_pause_ms: int = 0
    died_ms: int = 0
    gone_ms: int = 0
    due: deque[tuple[int, I64]] = field(default_factory=deque)
    due_rows: int = 0
    unstored: int = 0
    counters: StreamCounters = field(default_factory=StreamCounters)
    completion: Histogram = field(default_factory=Histogram)
    log_age: LogAge = field(default_factory=LogAge)

    def add_due(self, segment: int, rows: I64) -> None:
        if len(rows):
            self.due.append((segment, rows))
            self.due_rows += len(rows)

    def add_recalled(self, segment: int, rows: I64) -> None:
        """Make rows due again, before all others: they were taken before them."""
        if len(rows):
            self.due.appendleft((segment, rows))
            self.due_rows += len(rows)

    def take_due(self, limit: int) -> tuple[int, I64]:
        """Take up to ``limit`` (1 or more) due rows of one segment; there must be some."""
        segment, rows = self.due.popleft()
        if len(rows) > limit:
            self.due.appendleft((segment, rows[limit:]))
            rows = rows[:limit]
        self.due_rows -= len(rows)
        return segment, rows

    @property
    def longest_pause_ms(self) -> int:
        """No waiting record's time is further ahead than this, unless the wall clock was set back."""
        return max(*self.options.backoff_ms, self.asked_pause_ms, 0)

    @property
    def held(self) -> int:
        """Rows that count against ``max_pending``."""
        return self.in_flight + self.logged

    def write(self, txn: WriteTransaction) -> None:
        stored = replace(self.options, circuits=(), replay="store")
        put_stream(txn, self.name, StreamRecord(self.number, astuple(stored), self.query))


def stream_of_record(name: str, record: StreamRecord) -> Stream:
    return Stream(name, record.number, StreamOptions(*record.options), record.query)  # type: ignore[arg-type]
