"""FTLayerCore: the rules of one shard, over a store.

The *shell* around it (a service, a test) owns the thread, the clock and the transactions::

    layer = FTLayerCore(store, options, now)
    with store.write(intake=True) as txn:                     # a group of calls
        outcomes = [layer.apply(txn, call, envelope, now) for call, envelope in waiting]
    for outcome in outcomes:                                  # once the block has ended without an error
        outcome.after()                                       # in order; then answer outcome.reply

What the shell must keep to:

- Calls, `tick`, `read` and every ``after`` come one at a time: from one thread, or under a lock. ``after``
  runs for every outcome, in order, and before the next transaction's first call.
- `MemoryCall`s are part of no transaction. They may come at any moment in between: among the calls of an open
  transaction, while it is committed, before its outcomes' ``after``. They have their effect at once, and a lost
  transaction does not undo them.
- An `IntakeCall` changes memory in ``after`` only: if their transaction is lost (a full store), nothing has happened;
  answer with the error. A lost transaction that had any *other* call in it, or a `tick`, leaves memory ahead of the
  store: make a new object from the store, as after a crash, and give intake transactions of its own. The layer
  notices when it can, and raises `VertexError` from then on.
- A call that raises `MalformedRequestError`, `ProtocolError`, `StaleIncarnationError`, `StaleOwnerError` or
  `UnknownJobError` has changed and staged nothing: answer it with the error and go on with the group. Any other error
  (the store's) loses the transaction.
- Ask `intake_blocked` right before `apply`; a blocked call waits its turn while others go ahead.
- Call `tick` when its time has come. Late ticks delay expiry and writing down, nothing else.

The calls of one group see each other in order, but for roots that a group registers by `Persist`: events know them
from the next transaction on. (No client has reason to send events of a root before the answer.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from ftlayer.common.clock import Now
from ftlayer.errors import (
    MalformedRequestError,
    ProtocolError,
    StaleOwnerError,
    UnsupportedError,
    VertexError,
)
from ftlayer.records.ipc import says
from ftlayer.vertex import calls
from ftlayer.vertex.acker import ExactTracker
from ftlayer.vertex.rules import audit, walk
from ftlayer.vertex.rules.audit import VertexHour
from ftlayer.vertex.rules.batches import Batches
from ftlayer.vertex.rules.board import Board
from ftlayer.vertex.rules.dedupe import Dedupe
from ftlayer.vertex.rules.deliveries import Deliveries, Replays
from ftlayer.vertex.rules.followed import EndedAttempt
from ftlayer.vertex.rules.operating import DeadLetters
from ftlayer.vertex.rules.source_ranges import by_segment
from ftlayer.vertex.rules.state import Group, LayerOptions, ShardState, recover
from ftlayer.vertex.rules.streams import Stream, StreamCounters, check_timeout
from ftlayer.vertex.rules.tracking import Failing, RangeCalls, Tracking
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store import streams as stored
from ftlayer.vertex.store.dead_index import FailedTable
from ftlayer.vertex.store.key_value import (
    INTAKE_SHARE,
    KeyValueStore,
    ReadTransaction,
    WriteTransaction,
    all_planned,
)


class Opening:
    def __init__(self, state: ShardState) -> None:
        self._state = state

    @calls.handles(calls.OpenStream)
    def stream(self, txn: WriteTransaction, call: calls.OpenStream, now: Now) -> calls.StreamOpened:
        self._state.owners.check([call.stream], call.owner)
        check_timeout(call.options, self._state.options.buckets)
        stream = self._declare(txn, call.stream, call.options)
        held = tuple(partition.name for partition in self._state.ranges.of_stream(stream))
        positions = stored.all_positions(txn, stream.number)
        planned = all_planned(txn, stream.number)
        return calls.StreamOpened(self._state.incarnation, positions, self._state.exact, held, planned)

    @calls.handles(calls.OpenQuery)
    def query(self, txn: WriteTransaction, call: calls.OpenQuery, now: Now) -> calls.QueryOpened:
        state = self._state
        check_timeout(call.options, state.options.buckets)
        for name in call.streams:
            stream = state.find_stream(name)
            if stream is not None and stream.query not in ("", call.query):
                raise StaleOwnerError(
                    f"stream {name!r} belongs to query {stream.query!r}; a stream is read by one query: stop "
                    "that one and start it again without the stream, or give this query another one"
                )
        record = stored.get_query(txn, call.query)
        if record is None:
            number = 1 + max((other.number for _, other in stored.all_queries(txn)), default=0)
            record = stored.QueryRecord(number, 0, call.run, ())
        for name in set(record.streams) - set(call.streams):
            self._own(txn, state.stream(name), "")
        for name in call.streams:
            self._own(txn, self._declare(txn, name, call.options), call.query)
        record = replace(
            record,
            epoch=record.epoch + 1,
            run=call.run,
            streams=call.streams,
            title=call.title or record.title,
        )
        stored.put_query(txn, call.query, record)
        return calls.QueryOpened(
            record.epoch,
            state.incarnation,
            record.last_sealed,
            record.last_committed,
            state.options.shard,
            state.options.shards,
            state.exact,
        )

    def _declare(self, txn: WriteTransaction, name: str, options: calls.StreamOptions) -> Stream:
        stream = self._state.find_stream(name)
        if stream is None:
            stream = Stream(name, stored.next_stream_number(txn), options)
        stream.options = options
        stream.write(txn)
        if options.replay != "source":
            self._state.forget_ranges(txn, stream)
        self._state.add_stream(stream)
        return stream

    def _own(self, txn: WriteTransaction, stream: Stream, query: str) -> None:
        stream.query = query
        stream.write(txn)

    @calls.handles(calls.Recall)
    def recall(self, txn: WriteTransaction, call: calls.Recall, now: Now) -> calls.Recalled:
        """Make the pending rows of streams due at once, since the slots that worked on them may be gone.

        In memory only: after a restart they are due anyway. They are before what is due already, the oldest first.
        Roots that timed out stay in the tracker for their late events; their rows have left the segment.
        """
        state = self._state
        state.check_incarnation(call.incarnation)
        state.owners.check(call.streams, call.owner)
        numbers = {state.stream(name).number for name in call.streams}
        roots, locations = state.tracker.pending()
        recalled = np.zeros(len(roots), np.bool_)
        for segment, rows, positions in reversed(list(by_segment(locations))):
            live = state.live.get(segment)
            if live is None or live.stream.number not in numbers:
                continue
            pending = ~live.done[rows]
            if live.source is not None:
                # Those that timed out are wanted before, and stay.
                pending &= ~live.source.wanted_of(rows)
                recalled[positions[pending]] = True
                count = live.source.recall(rows[pending])
                live.stream.unstored += count
                live.stream.counters.recalled += count
                continue
            recalled[positions[pending]] = True
            due = np.zeros(len(live.done), np.bool_)
            due[rows[pending]] = True
            live.stream.add_recalled(segment, np.flatnonzero(due))
            count = int(np.count_nonzero(due))
            live.stream.in_flight -= count
            live.stream.counters.recalled += count
        # In the order they were found in: that of the tracker's memory, several times as fast as any other.
        taken = roots[recalled]
        state.tracker.forget(taken)
        state.circuits.recalled(taken, now.mono_ms)
        return calls.Recalled(len(taken))


def select(state: ShardState, txn: ReadTransaction, call: calls.SelectRecords) -> calls.RecordPage:
    """Return a page: it ends with the limit, with `MAX_EXAMINED` records, or with `MAX_PAGE_BYTES` of payload."""
    span = _span(state, call)
    wanted = _Wanted(call, span)
    keys: list[bytes] = []
    infos: list[calls.RecordInfo] = []
    size = 0
    last = b""
    examined = passed = 0
    for record in _candidates(state, txn, call, span):
        if examined + passed >= calls.MAX_EXAMINED or len(keys) == call.limit or size >= calls.MAX_PAGE_BYTES:
            return calls.RecordPage(tuple(infos), tuple(keys), examined, last)
        last = record.key
        if isinstance(record, walk.PassedRows):
            passed += walk.PASSED_AT_ONCE
            continue
        examined += 1
        if not wanted(record):
            continue
        keys.append(record.key)
        if not call.keys_only:
            info = record.info()
            infos.append(info)
            size += info.payload.nbytes + sum(len(each.traceback) for each in info.history)
    return calls.RecordPage(tuple(infos), tuple(keys), examined, b"")


class _Wanted:
    def __init__(self, call: calls.SelectRecords, span: walk.Span) -> None:
        self._span = span
        self._operator = call.operator
        self._root = call.root
        self._text = call.text
        self._bytes = call.text.encode()

    def __call__(self, record: walk.Record) -> bool:
        if record.stream.number not in self._span.numbers:
            return False
        if not self._span.since_ms <= record.time_ms < self._span.until_ms:
            return False
        if self._root and self._root not in (record.root, record.origin):
            return False
        if self._operator and record.last_failure[1] != self._operator:
            return False
        return not self._text or self._says(record)

    def _says(self, record: walk.Record) -> bool:
        reason, operator = record.last_failure
        if self._text in reason or self._text in operator:
            return True
        return record.may_say(self._bytes) and says(record.payload(), self._bytes)


def _span(state: ShardState, call: calls.SelectRecords) -> walk.Span:
    streams = [
        stream
        for _, stream in sorted(state.numbers.items())
        if not call.stream or walk.belongs_to(stream, call.stream)
    ]
    is_picky = bool(call.operator or call.text or call.root)
    most = calls.MAX_EXAMINED if is_picky else min(call.limit, calls.MAX_EXAMINED) + 1
    return walk.Span(streams, call.after, most, call.since_ms, call.until_ms or walk.NEVER_MS)


def _candidates(
    state: ShardState, txn: ReadTransaction, call: calls.SelectRecords, span: walk.Span
) -> Iterator[walk.Record | walk.PassedRows]:
    walks = walk.Walks(state, txn)
    if call.keys:
        return walks.at_keys(call.state, [key for key in call.keys if key > call.after])
    if call.state == "dead":
        return _dead_candidates(state, walks, call, span)
    if call.state == "pending" and call.root and not call.after:
        tracked = list(walks.pending_root(call.root))
        if tracked:
            return iter(tracked)
    return walks.records(call.state, span)


def _dead_candidates(
    state: ShardState, walks: walk.Walks, call: calls.SelectRecords, span: walk.Span
) -> Iterator[walk.Record | walk.PassedRows]:
    if call.group >= 0:
        stream = state.find_stream(call.stream)
        return (
            iter(()) if stream is None else walks.dead_of_group(span, stream, call.group, newest=call.newest)
        )
    if call.root and state.dead_index.is_built:
        return walks.dead_of_root(call.root, call.after)
    return walks.newest_dead(span) if call.newest else walks.records("dead", span)


class Status:
    def __init__(
        self, state: ShardState, store: KeyValueStore, replay: Replays, board: Board, hour: VertexHour
    ) -> None:
        self._state = state
        self._store = store
        self._replay = replay
        self._board = board
        self._hour = hour

    @calls.handles(calls.AnnounceJob)
    def announce(self, txn: WriteTransaction, call: calls.AnnounceJob, now: Now) -> calls.Announced:
        return self._board.announce(txn, call, self._run_of(txn, call.job), now)

    def _run_of(self, txn: ReadTransaction, job: calls.JobDetails) -> str:
        """Return the run that a job belongs to, "" where this shard keeps no records of it."""
        if job.kind is calls.JobKind.TOPOLOGY:
            return self._state.owners.run_of(job.owner)
        query = stored.get_query(txn, job.owner)
        # A query opens itself anew at each run of Spark's: what is before the dot is the execution.
        return "" if query is None else query.run.partition(".")[0]

    @calls.handles(calls.ListJobs)
    def jobs(self, txn: ReadTransaction, call: calls.ListJobs, now: Now) -> calls.JobList:
        return self._board.jobs(now)

    @calls.handles(calls.GetHour)
    def hour(self, txn: ReadTransaction, call: calls.GetHour, now: Now) -> calls.Hour:
        return self._board.hour(call.owner, now) if call.owner else self._hour.hour(now)

    @calls.handles(calls.ListAudit)
    def audit(self, txn: ReadTransaction, call: calls.ListAudit, now: Now) -> calls.AuditPage:
        return audit.page(txn, call)

    @calls.handles(calls.ReportCircuits)
    def circuits(self, txn: WriteTransaction, call: calls.ReportCircuits, now: Now) -> calls.CircuitsReported:
        self._state.circuits.reported[call.query] = call.circuits
        return calls.CircuitsReported()

    @calls.handles(calls.ListRecords)
    def listed(self, txn: ReadTransaction, call: calls.ListRecords, now: Now) -> calls.RecordList:
        page = self.selected(
            txn, calls.SelectRecords(call.state, call.stream, limit=call.limit, after=call.after), now
        )
        return calls.RecordList(page.records, page.more)

    @calls.handles(calls.SelectRecords)
    def selected(self, txn: ReadTransaction, call: calls.SelectRecords, now: Now) -> calls.RecordPage:
        return select(self._state, txn, call)

    @calls.handles(calls.DeadGroups)
    def dead_groups(self, txn: ReadTransaction, call: calls.DeadGroups, now: Now) -> calls.GroupList:
        wanted = {
            number: stream.name
            for number, stream in self._state.numbers.items()
            if not call.stream or walk.belongs_to(stream, call.stream)
        }
        return self._state.dead_index.groups(txn, wanted)

    @calls.handles(calls.Explain)
    def explained(self, txn: ReadTransaction, call: calls.Explain, now: Now) -> calls.Explained:
        tracker = self._state.tracker
        if not isinstance(tracker, ExactTracker):
            raise UnsupportedError(
                'this vertex keeps one XOR for each root, not its ids: start it with tracker="exact" (some '
                "hundred times slower) to have roots explained"
            )
        return calls.Explained(tracker.explain(call.root))

    @calls.handles(calls.ListStreams)
    def streams(self, txn: ReadTransaction, call: calls.ListStreams, now: Now) -> calls.StreamList:
        """Return all streams of a shard by name. Reads one waiting record a stream, and no payload."""
        state, oldest_ms = self._state, self._state.live.oldest_ms()
        return calls.StreamList(
            tuple(
                _details(state, txn, stream, oldest_ms.get(stream.number, 0))
                for _, stream in sorted(state.streams.items())
            )
        )

    @calls.handles(calls.QueryStatusCall)
    def query(self, txn: ReadTransaction, call: calls.QueryStatusCall, now: Now) -> calls.QueryStatus:
        """Count the rows of a query's streams. Rows that a sealed batch is about to move count as delivered."""
        query = stored.get_query(txn, call.query)
        if query is None:
            raise ProtocolError(f"query {call.query!r} is unknown: open it first (OpenQuery)")
        streams = [self._state.stream(name) for name in query.streams]
        times = [self._replay.next_due_ms(txn, stream, now) for stream in streams]
        due = min((time for time in times if time is not None), default=None)
        unread = sum(max(stream.logged - self._offered(stream.number, txn), 0) for stream in streams)
        return calls.QueryStatus(
            waiting=sum(stream.waiting + stream.due_rows for stream in streams),
            deliverable=unread,
            delivered=sum(stream.logged for stream in streams) - unread + self._sealed_rows(txn, query),
            pending=sum(stream.in_flight for stream in streams),
            dead=sum(stream.dead for stream in streams),
            next_due_in_ms=-1 if due is None else max(due - now.wall_ms, 0),
        )

    @calls.handles(calls.StreamStatusCall)
    def of_streams(self, txn: ReadTransaction, call: calls.StreamStatusCall, now: Now) -> calls.StreamStatus:
        self._state.owners.check(call.streams, call.owner)
        streams = [self._state.stream(name) for name in call.streams]
        due, next_due_in_ms = 0, -1
        for stream in streams:
            count, pause_ms = self._due(txn, stream, now)
            due += count
            if pause_ms >= 0:
                next_due_in_ms = pause_ms if next_due_in_ms < 0 else min(pause_ms, next_due_in_ms)
        return calls.StreamStatus(
            pending=sum(stream.in_flight for stream in streams),
            due=due,
            waiting=sum(stream.waiting + stream.due_rows for stream in streams) - due,
            dead=sum(stream.dead for stream in streams),
            next_due_in_ms=next_due_in_ms,
            done=sum(stream.counters.completed for stream in streams),
            circuits=self._state.circuits.statuses(call.streams, now.mono_ms),
        )

    def _due(self, txn: ReadTransaction, stream: Stream, now: Now) -> tuple[int, int]:
        """Return how many replays of a stream can be taken now, and in how many ms one can be (-1: none is there)."""
        next_due = self._replay.next_due_ms(txn, stream, now)
        pause_ms = -1 if next_due is None else max(next_due - now.wall_ms, 0)
        held_ms = self._state.circuits.held_ms(stream, now.mono_ms)
        if held_ms is not None:
            return 0, -1 if pause_ms < 0 else max(pause_ms, held_ms)
        return stream.due_rows + self._replay.count_due(txn, stream, now), pause_ms

    @calls.handles(calls.Stats)
    def stats(self, txn: ReadTransaction, call: calls.Stats, now: Now) -> calls.StatsReply:
        state = self._state
        streams = state.streams.values()
        counted = [asdict(stream.counters) for stream in streams]
        values = {
            each.name: float(sum(counters[each.name] for counters in counted))
            for each in fields(StreamCounters)
        }
        values |= {name: float(value) for name, value in asdict(state.counters).items()}
        values |= {
            "incarnation": float(state.incarnation),
            "streams": float(len(state.streams)),
            "pending": float(sum(stream.in_flight for stream in streams)),
            "waiting": float(sum(stream.waiting + stream.due_rows for stream in streams)),
            "in_delivery": float(sum(stream.logged for stream in streams)),
            "dead_letters": float(sum(stream.dead for stream in streams)),
            "tracked_roots": float(state.tracker.pending_count),
            "orphans": float(state.tracker.orphan_count + len(state.early)),
            "live_segments": float(len(state.live)),
            "used_bytes": float(self._store.used_bytes),
            "used_share": float(self._store.used_share),
        }
        return calls.StatsReply(values, state.circuits.all_statuses(now.mono_ms))

    def _offered(self, number: int, txn: ReadTransaction) -> int:
        stream = self._state.numbers[number]
        return max(stream.offered - stored.get_bounds(txn, number).committed, 0)

    def _sealed_rows(self, txn: ReadTransaction, query: stored.QueryRecord) -> int:
        if query.last_sealed <= query.last_committed:
            return 0
        head = stored.get_batch(txn, query.number, query.last_sealed)
        if head is None:
            return 0
        parts = stored.batch_parts(txn, query.number, query.last_sealed, head.parts, self._state.payloads)
        emitted = sum(len(emit.roots) // 8 for emit in head.emitted if emit.segment >= 0)
        return sum(len(part.rows) for part in parts) + emitted


def _details(
    state: ShardState, txn: ReadTransaction, stream: Stream, pending_since_ms: int
) -> calls.StreamDetails:
    names = walk.names_of(state, txn, stream)
    since_ms = (pending_since_ms, stream.log_age.since_ms, _waits_since_ms(state, txn, stream))
    counters = stream.counters
    return calls.StreamDetails(
        stream=stream.name,
        owner=names.owner,
        title=names.title,
        source=names.source,
        pending=stream.in_flight,
        waiting=stream.waiting + stream.due_rows,
        in_delivery=stream.logged,
        dead=stream.dead,
        persisted=counters.persisted + counters.ingested,
        completed=counters.completed + counters.delivered_done,
        failed=counters.failed,
        died=counters.dead,
        oldest_ms=min(filter(None, since_ms), default=0),
        max_pending=stream.options.max_pending,
        kind=names.kind,
        counters=asdict(counters),
        completion=calls.HistogramDetails.of(stream.completion),
    )


def _waits_since_ms(state: ShardState, txn: ReadTransaction, stream: Stream) -> int:
    """Return when the record that is due first failed for the first time; 0: none waits."""
    if not stream.waiting:
        return 0
    for key, value in failed.scan(txn, FailedTable.WAITING, stream.number):
        if key not in state.cancelled:
            history = failed.decode(value).history
            return history[0].wall_ms if history else 0
    return 0


_FORGET_CLIENTS_EVERY_MS = 600_000


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The reply to a call, valid once the transaction is committed and ``after`` was called."""

    reply: calls.Reply
    after: Callable[[], None]


class FTLayerCore:
    """The rules of one shard; what it knows at its start it reads from ``store`` (`StoreDamagedError`)."""

    def __init__(self, store: KeyValueStore, options: LayerOptions, now: Now) -> None:
        self._store = store
        self._state = state = ShardState(options, store.incarnation)
        with store.read() as txn:
            recover(state, txn, now)
            self._dedupe = Dedupe(txn, store.incarnation, now.mono_ms)
            self._board = Board(store, txn, now)
        failing = Failing(state)
        self._tracking = Tracking(state, failing)
        self._replay = Replays(state, self._tracking)
        deliveries = Deliveries(state, self._replay)
        self._hour = VertexHour(state, store, now)
        self._handlers = calls.registered_in(
            self._tracking,
            self._replay,
            RangeCalls(state, self._tracking, failing),
            deliveries,
            Opening(state),
            Batches(state, self._tracking, failing, deliveries),
            DeadLetters(state, store),
            walk.BarrierLetters(state, store),
            Status(state, store, self._replay, self._board, self._hour),
            self._board,
            state.owners,
        )
        self._transaction: WriteTransaction | None = None
        self._broken = False
        self._flushed_ms = now.mono_ms
        self._clients_checked_ms = now.mono_ms

    @property
    def incarnation(self) -> int:
        return self._state.incarnation

    @property
    def exact(self) -> bool:
        return self._state.exact

    def take_attempts(self) -> list[EndedAttempt]:
        followed = self._state.followed
        return [] if followed is None else followed.take()

    def apply(
        self,
        txn: WriteTransaction | None,
        call: calls.MutatingCall,
        envelope: calls.Envelope | None,
        now: Now,
    ) -> CallOutcome:
        """Stage a call's changes in ``txn``; see the module for what the shell must keep to.

        ``envelope`` None: the call is executed however often it comes. ``txn`` may be None for
        `MemoryCall`s, which are no part of any transaction.

        Raises `MalformedRequestError`, `ProtocolError`, `StaleIncarnationError`, `StaleOwnerError`, `UnknownJobError`
        (each says why), whatever the store raises, and `VertexError` when this object must not be used any more.
        """
        if isinstance(call, calls.MemoryCall):
            return self._apply_in_memory(call, envelope, now)
        if not isinstance(call, calls.MutatingCall):
            raise MalformedRequestError(f"{type(call).__name__} is no changing call")
        if txn is None:
            raise ValueError(f"{type(call).__name__} needs a transaction")
        group = self._enter(txn)
        self._hour.advance(now)
        if envelope is not None and isinstance(call, (calls.DurableCall, calls.PassingCall)):
            if isinstance(call, (calls.Fail, calls.Recall)):
                self._state.check_incarnation(call.incarnation)
            seen = self._dedupe.reply_to(envelope, group.replies)
            if seen is not None:
                self._state.counters.deduplicated_calls += 1
                return CallOutcome(seen, _nothing)
        self._tracking.advance(now)
        made = self._handlers[type(call)](txn, call, now)
        reply, register = made if type(made) is tuple else (made, None)
        group.texts.write(txn)
        self._state.dead_index.write(txn)
        if not isinstance(call, calls.IntakeCall):
            group.irrevocable = True
        if envelope is not None and isinstance(call, calls.DurableCall):
            self._dedupe.stage(txn, envelope, reply)
            group.replies[envelope] = reply
        elif envelope is not None:
            self._dedupe.keep_passing(envelope, reply, now.mono_ms)
        group.unconfirmed += 1

        def after() -> None:
            group.unconfirmed -= 1
            if register is not None:
                register()
            if envelope is not None and isinstance(call, calls.DurableCall):
                self._dedupe.keep_durable(envelope, reply, now.mono_ms)

        return CallOutcome(reply, after)

    def _apply_in_memory(
        self, call: calls.MemoryCall, envelope: calls.Envelope | None, now: Now
    ) -> CallOutcome:
        self._check_usable()
        self._hour.advance(now)
        self._state.check_incarnation(call.incarnation)
        if envelope is not None:
            seen = self._dedupe.reply_to(envelope, self._state.group.replies)
            if seen is not None:
                self._state.counters.deduplicated_calls += 1
                return CallOutcome(seen, _nothing)
        self._tracking.advance(now)
        reply = self._handlers[type(call)](None, call, now)
        if envelope is not None:
            self._dedupe.keep_passing(envelope, reply, now.mono_ms)
        return CallOutcome(reply, _nothing)

    def read(self, txn: ReadTransaction, call: calls.ReadingCall, now: Now) -> calls.Reply:
        """Answer a call that changes nothing; raises as `apply`, `UnsupportedError` without the exact tracker."""
        self._check_usable()
        if not isinstance(call, calls.ReadingCall):
            raise MalformedRequestError(f"{type(call).__name__} is no reading call")
        reply: calls.Reply = self._handlers[type(call)](txn, call, now)
        return reply

    def tick(self, txn: WriteTransaction, now: Now) -> int | None:
        """Do what time brings: expiry, and writing down what completed.

        Returns the monotone time (ms) at which to call it again, None when it has nothing to wait for; ask
        again after a group of calls (`next_tick_ms`). Cheap when nothing is due.
        """
        group = self._enter(txn)
        state = self._state
        self._hour.advance(now)
        self._tracking.advance(now)
        self._tracking.end_attempts(txn, now)
        # Transactions come one after the other: what an earlier one wrote is committed.
        state.ranges.confirm()
        if now.mono_ms - self._flushed_ms >= state.options.flush_ms:
            self._flushed_ms = now.mono_ms
            state.ranges.write(txn, state.next_segment)
            state.live.flush(txn)
            self._replay.delete_cancelled(txn)
        self._board.tick(txn, now)
        if self._store.used_share < INTAKE_SHARE:
            state.dead_index.tick(txn, now)
        group.texts.write(txn)
        state.dead_index.write(txn)
        if now.mono_ms - self._clients_checked_ms >= _FORGET_CLIENTS_EVERY_MS:
            self._clients_checked_ms = now.mono_ms
            self._dedupe.forget_idle(txn, now.mono_ms)
        return self.next_tick_ms(now)

    def next_tick_ms(self, now: Now) -> int | None:
        """Return the monotone time (ms) at which `tick` has something to do; None when never, as things are."""
        state = self._state
        if self._tracking.ends_attempts:
            return now.mono_ms
        times = [
            state.rotations.next_ms(),
            state.orphan_rotations.next_ms(),
            self._board.next_tick_ms(now),
            state.dead_index.next_tick_ms(now),
        ]
        if state.live.unwritten or state.cancelled or state.ranges.unwritten:
            times.append(self._flushed_ms + state.options.flush_ms)
        if len(self._dedupe):
            times.append(self._clients_checked_ms + _FORGET_CLIENTS_EVERY_MS)
        return min((time for time in times if time is not None), default=None)

    def intake_blocked(self, call: calls.Call, now: Now) -> str | None:
        """Say why intake has to wait (a full store holds all, ``max_pending`` no verdicts); None: apply it now."""
        if not isinstance(call, (calls.IntakeCall, calls.Register)):
            return None
        share = self._store.used_share
        if share >= INTAKE_SHARE:
            return f"the store has used {share:.0%} of its {self._store.max_bytes} bytes"
        if not isinstance(call, (calls.Persist, calls.Ingest, calls.Register)):
            return None
        stream = self._state.find_stream(call.stream)
        rows = call.range.rows if isinstance(call, calls.Register) else call.payload.num_rows
        if stream is None or rows > stream.options.max_pending:
            return None  # apply says what is wrong with it
        if isinstance(call, (calls.Persist, calls.Register)) and rows:
            broken = self._state.circuits.hold_of(stream, now.mono_ms)
            if broken is not None:
                return broken
        held = stream.held + self._state.group.rows.get(stream.name, 0)
        if held + rows <= stream.options.max_pending:
            return None
        return (
            f"stream {stream.name!r} has {held} of {stream.options.max_pending} rows (max_pending) in flight"
        )

    def lost(self) -> None:
        """Forget what calls of the lost transaction staged; `VertexError` if memory is lost: make a new core."""
        group, self._state.group = self._state.group, Group()
        self._transaction = None
        if group.irrevocable and group.unconfirmed:
            self._broken = True
        self._check_usable()

    def _enter(self, txn: WriteTransaction) -> Group:
        self._check_usable()
        if txn is not self._transaction:
            if self._state.group.unconfirmed:
                self.lost()
            self._transaction = txn
            self._state.group = Group()
        return self._state.group

    def _check_usable(self) -> None:
        if self._broken:
            raise VertexError(
                "a transaction with changes that memory knows of was lost; "
                "recover a new FTLayerCore from the store"
            )


def _nothing() -> None:
    """Do nothing: the call had its effect before."""
