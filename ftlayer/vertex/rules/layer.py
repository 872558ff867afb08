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
- `MEMORY_ONLY` calls are part of no transaction. They may come at any moment in between: among the calls of an open
  transaction, while it is committed, before its outcomes' ``after``. They have their effect at once, and a lost
  transaction does not undo them.
- `Persist`, `Ingest`, `Seal` and `Reseal` (`INTAKE`) change memory in ``after`` only: if their transaction
  is lost (a full store), nothing has happened; answer with the error. A lost transaction that had any
  *other* call in it, or a `tick`, leaves memory ahead of the store: drop the object and make a new one from
  the store, which is what a crash would have done. So give intake transactions of its own. The layer
  notices when it can, and raises `VertexError` from then on.
- A call that raises `MalformedRequestError`, `ProtocolError`, `StaleIncarnationError`, `StaleOwnerError` or
  `UnknownJobError` has changed and staged nothing: answer it with the error and go on with the group. Any other error
  (the store's) loses the transaction.
- Ask `intake_blocked` right before `apply`; a blocked call waits its turn while others go ahead.
- Call `tick` when its time has come. Late ticks delay expiry and writing down, nothing else.

The calls of one group see each other in order, with one exception: roots that a group registers by
`Persist` are known to events from the next transaction on. (Persist before emit: no client has reason to send
events of a root before the answer.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ftlayer.acker import ExactTracker
from ftlayer.clock import Now
from ftlayer.errors import MalformedRequestError, UnsupportedError, VertexError
from ftlayer.store.kv import INTAKE_SHARE, KeyValueStore, ReadTransaction, WriteTransaction
from ftlayer.store.meta import get_query
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Call, Envelope, MutatingCall, ReadingCall, Reply
from ftlayer.vertex.rules import audit
from ftlayer.vertex.rules.batches import Batches
from ftlayer.vertex.rules.board import Board
from ftlayer.vertex.rules.dedupe import Dedupe
from ftlayer.vertex.rules.deliveries import Deliveries
from ftlayer.vertex.rules.failing import Failing
from ftlayer.vertex.rules.followed import EndedAttempt
from ftlayer.vertex.rules.hour import VertexHour
from ftlayer.vertex.rules.letters import BarrierLetters
from ftlayer.vertex.rules.names import belongs_to
from ftlayer.vertex.rules.opening import Opening, recall
from ftlayer.vertex.rules.operating import DeadLetters
from ftlayer.vertex.rules.options import LayerOptions
from ftlayer.vertex.rules.range_calls import RangeCalls
from ftlayer.vertex.rules.replay import Replays
from ftlayer.vertex.rules.selecting import listed, select
from ftlayer.vertex.rules.state import Group, ShardState, recover
from ftlayer.vertex.rules.status import Status, list_streams
from ftlayer.vertex.rules.tracking import Tracking

INTAKE = (calls.Persist, calls.Ingest, calls.Seal, calls.Reseal)
"""Calls that add records: for ``store.write(intake=True)``."""

_DURABLE = (
    *INTAKE,
    calls.ClaimJob,
    calls.OpenQuery,
    calls.Commit,
    calls.Requeue,
    calls.Purge,
    calls.EditAndRequeue,
    calls.PutCursor,
)
_PASSING = (calls.Fail, calls.TakeReplays, calls.Recall, calls.StoreRows, calls.TakeOver, calls.NoteRange)
MEMORY_ONLY = (calls.Xor, calls.Touch, calls.Register, calls.AskRanges)
"""Calls that no transaction has a part in."""

MemoryCall = calls.Xor | calls.Touch | calls.Register | calls.AskRanges

_FORGET_CLIENTS_EVERY_MS = 600_000


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The reply to a call, valid once the transaction is committed and ``after`` was called."""

    reply: Reply
    after: Callable[[], None]


class FTLayerCore:
    """The rules of one shard. Everything it knows at its start it reads from ``store``.

    Raises `StoreDamagedError` when the store's content makes no sense.
    """

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
        self._ranges = RangeCalls(state, self._tracking, failing)
        self._deliveries = Deliveries(state, self._replay)
        self._opening = Opening(state)
        self._batches = Batches(state, self._tracking, failing, self._deliveries)
        self._dead_letters = DeadLetters(state, store)
        self._letters = BarrierLetters(state, store)
        self._status = Status(state, store, self._replay)
        self._hour = VertexHour(state, store, now)
        self._transaction: WriteTransaction | None = None
        self._broken = False
        self._flushed_ms = now.mono_ms
        self._clients_checked_ms = now.mono_ms

    @property
    def incarnation(self) -> int:
        """The incarnation that calls about pending roots must name."""
        return self._state.incarnation

    @property
    def exact(self) -> bool:
        """Whether it keeps every id, so that `EventIds` are worth sending and `Explain` is answered."""
        return self._state.exact

    def take_attempts(self) -> list[EndedAttempt]:
        """Return which attempts of records that are followed have ended since the last call."""
        followed = self._state.followed
        return [] if followed is None else followed.take()

    def apply(
        self, txn: WriteTransaction | None, call: MutatingCall, envelope: Envelope | None, now: Now
    ) -> CallOutcome:
        """Stage a call's changes in ``txn``; see the module for what the shell must keep to.

        ``envelope`` None: the call is executed however often it comes. ``txn`` may be None for
        `MEMORY_ONLY` calls, which are no part of any transaction.

        Raises `MalformedRequestError`, `ProtocolError`, `StaleIncarnationError`, `StaleOwnerError`, `UnknownJobError`
        (each says why), whatever the store raises, and `VertexError` when this object must not be used any more.
        """
        if isinstance(call, MEMORY_ONLY):
            return self._apply_in_memory(call, envelope, now)
        if txn is None:
            raise ValueError(f"{type(call).__name__} needs a transaction")
        group = self._enter(txn)
        self._hour.advance(now)
        if envelope is not None and isinstance(call, _DURABLE + _PASSING):
            if isinstance(call, (calls.Fail, calls.Recall)):
                self._state.check_incarnation(call.incarnation)
            seen = self._dedupe.reply_to(envelope, group.replies)
            if seen is not None:
                self._state.counters.deduplicated_calls += 1
                return CallOutcome(seen, _nothing)
        self._tracking.advance(now)
        reply, register = self._execute(txn, call, now)
        group.texts.write(txn)
        self._state.dead_index.write(txn)
        if not isinstance(call, INTAKE):
            group.irrevocable = True
        if envelope is not None and isinstance(call, _DURABLE):
            self._dedupe.stage(txn, envelope, reply)
            group.replies[envelope] = reply
        elif envelope is not None:
            self._dedupe.keep_passing(envelope, reply, now.mono_ms)
        group.unconfirmed += 1

        def after() -> None:
            group.unconfirmed -= 1
            if register is not None:
                register()
            if envelope is not None and isinstance(call, _DURABLE):
                self._dedupe.keep_durable(envelope, reply, now.mono_ms)

        return CallOutcome(reply, after)

    def _apply_in_memory(self, call: MemoryCall, envelope: Envelope | None, now: Now) -> CallOutcome:
        """Run a call that no transaction has a part in: it has its effect at once."""
        self._check_usable()
        self._hour.advance(now)
        self._state.check_incarnation(call.incarnation)
        if envelope is not None:
            seen = self._dedupe.reply_to(envelope, self._state.group.replies)
            if seen is not None:
                self._state.counters.deduplicated_calls += 1
                return CallOutcome(seen, _nothing)
        self._tracking.advance(now)
        reply: Reply
        match call:
            case calls.Xor():
                reply = self._tracking.xor(call, now)
            case calls.Touch():
                reply = self._tracking.touch(call, now)
            case calls.Register():
                reply = self._ranges.register(call, now)
            case calls.AskRanges():
                reply = self._ranges.ask(call)
        if envelope is not None:
            self._dedupe.keep_passing(envelope, reply, now.mono_ms)
        return CallOutcome(reply, _nothing)

    def read(self, txn: ReadTransaction, call: ReadingCall, now: Now) -> Reply:
        """Answer a call that changes nothing.

        Raises `MalformedRequestError`, `ProtocolError`, `StaleOwnerError`, `UnknownJobError`, and `UnsupportedError`
        for `Explain` without the exact tracker.
        """
        self._check_usable()
        match call:
            case calls.ReadDeliveries():
                return self._deliveries.read(txn, call)
            case calls.QueryStatusCall():
                return self._status.query(txn, call, now)
            case calls.StreamStatusCall():
                return self._status.of_streams(txn, call, now)
            case calls.ListRecords():
                return listed(self._state, txn, call)
            case calls.GetCursor():
                return self._dead_letters.cursor(txn, call)
            case calls.Explain():
                return self._explain(call.root)
            case calls.Stats():
                return self._status.stats(now)
            case calls.GetHour():
                return self._board.hour(call.owner, now) if call.owner else self._hour.hour(now)
            case calls.GetRequeued():
                return self._letters.requeued(txn, call)
            case calls.ListAudit():
                return audit.page(txn, call)
            case calls.SelectRecords():
                return select(self._state, txn, call)
            case calls.DeadGroups():
                return self._dead_groups(txn, call)
            case calls.ListStreams():
                return list_streams(self._state, txn)
            case calls.ListJobs():
                return self._board.jobs(now)
            case calls.GetJob():
                return self._board.job(txn, call, now)
        raise MalformedRequestError(f"{type(call).__name__} is no reading call")

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
        """Return the monotone time (ms) at which `tick` has something to do; None when never, as things
        are.
        """
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

    def intake_blocked(self, call: Call, now: Now) -> str | None:
        """Say why intake has to wait: ``max_pending``, a full store, a circuit breaker. None: apply it now.

        Only `Persist`, `Register` and `Ingest` ever wait for ``max_pending``: a batch's verdict must get through.
        """
        if not isinstance(call, (*INTAKE, calls.Register)):
            return None
        share = self._store.used_share
        if share >= INTAKE_SHARE:
            return f"the store has used {share:.0%} of its {self._store.max_bytes} bytes"
        if isinstance(call, (calls.Seal, calls.Reseal)):
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
        """Tell that the current transaction was not committed: what its calls staged is forgotten.

        Raises `VertexError` if one of them had changed memory: make a new `FTLayerCore` from the store.
        """
        group, self._state.group = self._state.group, Group()
        self._transaction = None
        if group.irrevocable and group.unconfirmed:
            self._broken = True
        self._check_usable()

    def _explain(self, root: int) -> calls.Explained:
        tracker = self._state.tracker
        if not isinstance(tracker, ExactTracker):
            raise UnsupportedError(
                'this vertex keeps one XOR for each root, not its ids: start it with tracker="exact" (some '
                "hundred times slower) to have roots explained"
            )
        found = tracker.explain(root)
        if found is None:
            return calls.Explained(known=False)
        owed = tuple(calls.OwedId(o.record_id, o.owner or "", o.emitted) for o in found.owed)
        return calls.Explained(True, found.registered, found.value, found.ids_known, owed)

    def _execute(
        self, txn: WriteTransaction, call: MutatingCall, now: Now
    ) -> tuple[Reply, Callable[[], None] | None]:
        match call:
            case calls.Persist():
                return self._tracking.persist(txn, call, now)
            case calls.Fail():
                return self._tracking.fail(txn, call, now), None
            case calls.TakeReplays():
                return self._replay.take(txn, call, now), None
            case calls.Recall():
                return recall(self._state, call, now), None
            case calls.TakeOver():
                return self._ranges.take_over(txn, call), None
            case calls.NoteRange():
                return self._ranges.note(txn, call), None
            case calls.StoreRows():
                return self._ranges.store(txn, call, now), None
            case calls.Ingest():
                return self._deliveries.ingest(txn, call, now)
            case calls.Deliverable():
                return self._deliveries.deliverable(txn, call, now), None
            case calls.ClaimJob():
                return self._state.owners.claim(txn, call), None
            case calls.OpenStream():
                return self._opening.stream(txn, call), None
            case calls.OpenQuery():
                return self._opening.query(txn, call), None
            case calls.BeginBatch():
                return self._batches.begin(txn, call), None
            case calls.Seal():
                return self._batches.seal(txn, call, now), None
            case calls.Reseal():
                return self._batches.reseal(txn, call, now), None
            case calls.Commit():
                return self._batches.commit(txn, call, now), None
            case calls.Requeue():
                return self._dead_letters.requeue(txn, call, now), None
            case calls.ReportCircuits():
                self._state.circuits.reported[call.query] = call.circuits
                return calls.CircuitsReported(), None
            case calls.KeepLetters():
                return self._letters.keep(txn, call, now), None
            case calls.ForgetLetters():
                return self._letters.forget(txn, call), None
            case calls.Readmitted():
                return self._letters.readmitted(txn, call), None
            case calls.ReturnLetters():
                return self._letters.give_back(txn, call, now), None
            case calls.PutCursor():
                return self._dead_letters.put_cursor(txn, call), None
            case calls.Purge():
                return self._dead_letters.purge(txn, call, now), None
            case calls.EditAndRequeue():
                return self._dead_letters.edit(txn, call, now), None
            case calls.AnnounceJob():
                return self._board.announce(txn, call, self._run_of(txn, call.job), now), None
            case calls.AskJob():
                return self._board.ask(txn, call, now), None
        raise MalformedRequestError(f"{type(call).__name__} is no changing call")

    def _dead_groups(self, txn: ReadTransaction, call: calls.DeadGroups) -> calls.GroupList:
        streams = self._state.numbers.items()
        wanted = {
            number: stream.name
            for number, stream in streams
            if not call.stream or belongs_to(stream, call.stream)
        }
        return self._state.dead_index.groups(txn, wanted)

    def _run_of(self, txn: ReadTransaction, job: calls.JobDetails) -> str:
        """Return the run that a job belongs to, "" where this shard keeps no records of it."""
        if job.kind is calls.JobKind.TOPOLOGY:
            return self._state.owners.run_of(job.owner)
        query = get_query(txn, job.owner)
        # A query opens itself anew at each run of Spark's: what is before the dot is the execution.
        return "" if query is None else query.run.partition(".")[0]

    def _enter(self, txn: WriteTransaction) -> Group:
        """Return the group of ``txn``; a new transaction means that the last one is over."""
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
