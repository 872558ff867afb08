"""Drawn programs whose records and timers fail, through checkpoints, losses and rescales, against a model of dicts.

A keyed chain of drawn operators, a partitioner that raises, and a two-phase sink that refuses rows: real tasks and
backends, without slots. Behind each checkpoint that completes, what is committed, what waits and what is dead are the
model's; behind each restore the state is, too. What goes wrong does so until a time: a service that is away, and is
back.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from chain_programs import (
    KEYS,
    PLACES,
    SCHEMA,
    TIMER_PLACES,
    Model,
    Record,
    ScriptedError,
    operators_of,
    rows_of,
)
from chain_shell import no_cancel, now
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_storage import MemoryStorage
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.checkpoint.options import CheckpointConfig, FailurePolicy
from ftlayer.checkpoint.snapshots import SubtaskRestore, SubtaskSnapshot
from ftlayer.common.failures import RowsRejected
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter
from ftlayer.functions.steps import CoProcess, Process
from ftlayer.functions.windows import Collected, Fixed, IntervalJoin, Window, window_function
from ftlayer.records.ipc import read_one_batch
from ftlayer.records.partitioning import Custom, HashByKeyGroup, groups_of, key_groups, subtasks_of
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.barrier_mode.task.failing.attempts import WaitingRecord, WaitingRecords
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Batch, Watermark, unseal
from ftlayer.runtime.task.actions import Action, ElementCame, Send, TaskStart, TimeCame
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import NO_SUSPECTS
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import open_backend
from ftlayer.state.snapshots.serializer import unpack
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import IterableSource, Sink, Source, WriterSink

GROUPS = 8
SINKS = 2
SEAL = b"k" * 32
POLICY = FailurePolicy(max_attempts=3, backoff=("10ms", "30ms"), jitter=0)
PAUSES = POLICY.backoff_ms
NEVER_WELL = 10**9
MIN_MS = -(2**63)
SIZE_MS = 4
"""Of a window."""
FAR_MS = 10**6
"""How far the times of records that are joined may be apart: all are."""

Timer = tuple[str, int]
Place = tuple[str, int, str]
"""An operator, the id of a record or the time of a timer, and where in the operator."""


# ---------------------------------------------------------------- programs


class Trouble:
    """`chain_programs.Script`: what goes wrong, until when."""

    def __init__(self, until: Mapping[Place, int]) -> None:
        self.until = until
        self.now_ms = 0

    def __contains__(self, place: object) -> bool:
        return self.now_ms < self.until.get(place, 0)  # type: ignore[call-overload]

    def at(self, *place: Any) -> None:
        if place in self:
            raise ScriptedError(str(place))


@dataclass(frozen=True)
class Program:
    """The kinds of the chain's operators, and what goes wrong in them."""

    kinds: tuple[str, ...]
    until: Mapping[Place, int]

    @property
    def inputs(self) -> int:
        return 2 if self.kinds[0] == "join" else 1

    @property
    def timed(self) -> tuple[str, str] | None:
        """The kind and the uid of the operator with timers that fail."""
        found = [
            (kind, f"{kind}{place}")
            for place, kind in enumerate(self.kinds)
            if kind in ("process", "windows")
        ]
        return found[0] if found else None


def emitted(trouble: Trouble, uid: str, key: str, window: Window, rows: list[Record]) -> Record:
    rows.append(rows[0])
    trouble.at(uid, window.start_ms, "emit")
    return key, sum(number for *_, number in rows[:-1]), -1 - window.start_ms


def paired(trouble: Trouble, uid: str, left: Record, right: Record) -> Record:
    number = max(left[2], right[2])
    trouble.at(uid, number, "pair")
    return left[0], left[2] * 1_000 + right[2], number


def chain_of(program: Program, trouble: Trouble) -> tuple[Any, ...]:
    operators: list[Any] = []
    for place, kind in enumerate(program.kinds):
        uid = f"{kind}{place}"
        match kind:
            case "join":
                join = IntervalJoin(partial(paired, trouble, uid), -FAR_MS, FAR_MS, SCHEMA)
                operators.append(CoProcess(uid, join, SCHEMA, (("k",), ("k",)), (SCHEMA, SCHEMA)))
            case "windows":
                content = Collected(lambda *window, uid=uid: [emitted(trouble, uid, *window)])
                function = window_function(Fixed(SIZE_MS, SIZE_MS), content)
                operators.append(Process(uid, function, SCHEMA, ("k",)))
            case _:
                operators += operators_of(kind, uid, trouble)
    return tuple(operators)


class Refusing(DataSourceStreamArrowWriter):
    """Writes rows aside; some it refuses."""

    def __init__(self, refused: frozenset[int]) -> None:
        self.refused = refused

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = [tuple(row.values()) for batch in iterator for row in batch.to_pylist()]
        bad = {place: "refused" for place, row in enumerate(rows) if row[2] in self.refused}
        if bad:
            raise RowsRejected(bad)
        return Written(tuple(rows))


@dataclass
class Written(WriterCommitMessage):
    rows: tuple[Any, ...]


# ---------------------------------------------------------------- the model


@dataclass
class Waiting:
    """A record (with its input), or a timer (with its kind), that waits."""

    what: tuple[int, Record] | tuple[str, Timer]
    attempt: int
    due_ms: int
    watermark_ms: int = MIN_MS


class Chain(Model):
    """`chain_programs.Model` with windows and joins; all state is of keys."""

    watermark_ms = MIN_MS
    input = 0
    time_ms = 0
    is_again = is_late = False

    def _through(self, kinds: list[str], place: int, script: Any, record: Record) -> Iterator[Record]:
        kind = kinds[place] if place < len(kinds) else ""
        if kind not in ("windows", "join"):
            yield from super()._through(kinds, place, script, record)
            return
        uid = f"{kind}{place}"
        results = self._window(uid, record) if kind == "windows" else self._join(uid, script, record)
        for result in results:
            yield from self._through(kinds, place + 1, script, result)

    def _window(self, uid: str, record: Record) -> list[Record]:
        key, time_ms = record[0], self.time_ms
        start = time_ms // SIZE_MS * SIZE_MS
        if start + SIZE_MS <= self.watermark_ms:
            self.is_late = self.is_again
            if self.is_late:
                raise ScriptedError("late")
            return []
        contents = self.table(uid, "contents")
        if (key, start) not in contents:
            self.table(uid, "event", set).add((key, start + SIZE_MS))
        contents.setdefault((key, start), []).append(record)
        return []

    def _join(self, uid: str, script: Any, record: Record) -> list[Record]:
        mine, others = (self.table(uid, ("left", "right")[side]) for side in (self.input, 1 - self.input))
        mine.setdefault(record[0], []).append(record)
        found = others.get(record[0], [])
        if self.input == 0:
            return [paired(script, uid, record, other) for other in found]
        return [paired(script, uid, other, record) for other in found]

    def fire(self, kinds: list[str], script: Any, uid: str, timer: Timer) -> list[Record] | None:
        if not uid.startswith("windows"):
            return super().fire(kinds, script, uid, timer)
        key, time_ms = timer
        start = time_ms - SIZE_MS

        def came() -> Iterator[Record]:
            rows = self.table(uid, "contents").pop((key, start), None)
            if rows is None:
                return
            result = emitted(script, uid, key, Window(start, start + SIZE_MS), rows)
            yield from self._through(kinds, kinds.index("windows") + 1, script, result)

        return self._whole(came())


@dataclass
class Expected:
    """The outcome of a program so far."""

    chain: Chain = field(default_factory=Chain)
    waiting: list[Waiting] = field(default_factory=list)
    rows: Counter[Record] = field(default_factory=Counter)
    dead: Counter[Any] = field(default_factory=Counter)
    """Records and timers, as they wait; rows of the sink."""


class Interpreter:
    """Runs a program as it is meant to be."""

    def __init__(self, program: Program, trouble: Trouble, refused: frozenset[int]) -> None:
        self._kinds, self._timed = list(program.kinds), program.timed
        self._trouble, self._refused = trouble, refused
        self.has = Expected()
        self.watermark_ms = MIN_MS

    def give(self, input: int, records: Sequence[Record]) -> None:
        for record in records:
            self._try(Waiting((input, record), 1, 0, self.watermark_ms), is_new=True)
        self._event_timers()

    def watermark(self, time_ms: int) -> None:
        self.watermark_ms = time_ms
        self._event_timers()

    def time_came(self, again: Callable[[], Sequence[Waiting]]) -> None:
        """``again`` returns what is tried again, in its order."""
        self._timers("processing", self._trouble.now_ms)
        self._event_timers()
        due = [each for each in self.has.waiting if each.due_ms <= self._trouble.now_ms]
        taken = again()
        assert sorted(map(str, taken)) == sorted(map(str, due))
        for each in taken:
            self.has.waiting.remove(each)
            self._try(each, is_new=False)
        self._event_timers()

    # ------------------------------------------------------------ one thing

    def _try(self, each: Waiting, *, is_new: bool) -> None:
        chain, what = self.has.chain, each.what
        if isinstance(what[0], str):
            assert self._timed is not None
            came = self._routed(partial(chain.fire, self._kinds, self._trouble, self._timed[1], what[1]))
        else:
            chain.input, record = what
            chain.watermark_ms, chain.time_ms = max(each.watermark_ms, self.watermark_ms), record[1]
            chain.is_again, chain.is_late = not is_new, False
            came = self._routed(partial(chain.run, self._kinds, self._trouble, record))
        if came is None:
            self._failed(each, is_over=chain.is_late and not isinstance(what[0], str))
            return
        for row in came:
            (self.has.dead if row[2] in self._refused else self.has.rows)[row] += 1

    def _routed(self, run: Callable[[], list[Record] | None]) -> list[Record] | None:
        before = copy.deepcopy((self.has.chain.tables, self.has.chain.side))
        came = run()
        if came is not None and any(("route", number, "") in self._trouble for *_, number in came):
            self.has.chain.tables, self.has.chain.side = before
            return None
        return came

    def _failed(self, each: Waiting, *, is_over: bool) -> None:
        if is_over or each.attempt == POLICY.max_attempts:
            self.has.dead[each.what] += 1
        else:
            due_ms = self._trouble.now_ms + PAUSES[min(each.attempt, len(PAUSES)) - 1]
            self.has.waiting.append(Waiting(each.what, each.attempt + 1, due_ms, each.watermark_ms))

    def _event_timers(self) -> None:
        self._timers("event", self.watermark_ms)

    def _timers(self, kind: str, until_ms: int) -> None:
        if self._timed is None:
            return
        timers = self.has.chain.table(self._timed[1], kind, set)
        while due := [timer for timer in timers if timer[1] <= until_ms]:
            timer = min(due, key=lambda timer: (timer[1], timer[0]))
            timers.remove(timer)
            self._try(Waiting((kind, timer), 1, 0), is_new=True)
            timers = self.has.chain.table(self._timed[1], kind, set)


# ---------------------------------------------------------------- the real thing


@dataclass
class Completed:
    """The latest checkpoint, and what the model had there."""

    parts: list[SubtaskSnapshot]
    parallelism: int
    has: Expected
    inputs: int


class Job:
    """The tasks of a program, its storage, and what has come of it outside."""

    def __init__(
        self, program: Program, backend: str, parallelism: int, refused: frozenset[int], at: str
    ) -> None:
        self.program, self.refused, self.directory = program, refused, at
        self.config = CheckpointConfig(backend=backend, directory=at)  # type: ignore[arg-type]
        self.trouble = Trouble(program.until)
        self.model = Interpreter(program, self.trouble, refused)
        self.storage = MemoryStorage()
        self.committed: Counter[Record] = Counter()
        self.letters: dict[bytes, ChainLetter] = {}
        self.checkpoint = 0
        self.latest: Completed | None = None
        self.inputs: list[tuple[Any, ...]] = []
        self.backends: list[Any] = []
        self.taken: list[WaitingRecord] = []
        self.start(parallelism)

    @property
    def now(self) -> Any:
        return now(self.trouble.now_ms)

    def start(self, parallelism: int) -> None:
        """Make the tasks, with what the latest checkpoint holds."""
        self.parallelism = parallelism
        self.uid = f"{self.program.kinds[0]}0"
        mode = BarrierTaskMode(
            self._restores(),
            self._open,
            partial(open_sink, run="run", checkpoint_key=SEAL),
            lambda _: NO_SUSPECTS,
        )
        self.tasks: list[Any] = [build_task(self._graph(), self.uid, i, mode) for i in range(parallelism)]
        self.sinks: list[Any] = [build_task(self._graph(), "out", i, mode) for i in range(SINKS)]
        self.parts = mode.checkpointed
        for task in (*self.sinks, *self.tasks):
            self._deliver(task.handle(TaskStart(), self.now))

    def _graph(self) -> JobGraph:
        """Return the graph of a subtask: functions are its own, as in a slot."""
        operators = chain_of(self.program, self.trouble)
        uid = operators[0].uid
        sources = [
            JobVertex(f"in{i}", (Source(f"in{i}", IterableSource(()), SCHEMA),), 1)
            for i in range(self.program.inputs)
        ]
        sink = Sink("out", WriterSink(Refusing(self.refused), 1_000, 1_000), SCHEMA)
        vertices = (
            *sources,
            JobVertex(uid, operators, self.parallelism, POLICY),
            JobVertex("out", (sink,), SINKS, POLICY),
        )
        key = HashByKeyGroup(KeySelector(("k",)), GROUPS)
        edges = [JobEdge(i, f"in{i}", uid, i, key, SCHEMA) for i in range(self.program.inputs)]
        road = Custom(KeySelector(("id",)), self._way)
        edges.append(JobEdge(len(edges), uid, "out", 0, road, SCHEMA))
        return JobGraph("job", vertices, tuple(edges), tracked=False, max_parallelism=GROUPS)

    def _way(self, number: int, channels: int) -> int:
        self.trouble.at("route", number, "")
        return number % channels

    def _restores(self) -> dict[Any, SubtaskRestore]:
        latest = self.latest
        if latest is None:
            return {}
        uid = self.uid
        keyed = tuple(part.keyed for part in latest.parts if part.uid == uid and part.keyed is not None)
        same = latest.parallelism == self.parallelism
        operators = {part.subtask: part.operators for part in latest.parts if part.uid == uid} if same else {}
        found = {
            (uid, i): SubtaskRestore(uid, i, keyed, operators.get(i, ())) for i in range(self.parallelism)
        }
        for part in latest.parts:
            if part.uid == "out":
                kept = () if part.keyed is None else (part.keyed,)
                found["out", part.subtask] = SubtaskRestore("out", part.subtask, kept)
        return found

    def _open(self, uid: str, subtask: int, keys: Mapping[str, pa.Schema]) -> Any:
        groups = groups_of(subtask, SINKS if uid == "out" else self.parallelism, GROUPS)
        spec = BackendSpec(groups.start, groups.stop, GROUPS, keys, self.directory)
        storage: Any = self.storage
        backend = open_backend(self.config, spec, self._restores().get((uid, subtask)), storage, "")
        self.backends.append(backend)
        if uid != "out":
            self.states = [] if subtask == 0 else self.states
            self.states.append(backend)
        return backend

    # ------------------------------------------------------------ what happens

    def give(self, input: int, records: list[Record]) -> None:
        self.inputs.append((self.give, input, records))
        input = min(input, self.program.inputs - 1)
        rows = rows_of(records)
        groups = key_groups(KeySelector(("k",)).hash(rows), GROUPS)
        subtasks = subtasks_of(groups, self.parallelism, GROUPS).tolist()
        for subtask, task in enumerate(self.tasks):
            mine = [record for record, at in zip(records, subtasks, strict=True) if at == subtask]
            if mine:
                batch = Batch(rows_of(mine), times=np.array([v for _, v, _ in mine], np.int64))
                self._deliver(task.handle(ElementCame(Channel(input, 0, subtask), batch), self.now))
        self.model.give(input, records)

    def watermark(self, time_ms: int) -> None:
        self.inputs.append((self.watermark, time_ms))
        if time_ms <= self.model.watermark_ms:
            return
        for subtask, task in enumerate(self.tasks):
            for input in range(self.program.inputs):
                element = ElementCame(Channel(input, 0, subtask), Watermark(time_ms))
                self._deliver(task.handle(element, self.now))
        self.model.watermark(time_ms)

    def after(self, ms: int) -> None:
        self.trouble.now_ms += ms
        self.taken = []
        for task in self.tasks:
            self._deliver(task.handle(TimeCame(), self.now))
        self.model.time_came(self._again)

    def rest(self) -> None:
        """Let time pass until nothing waits; what came through last may have set timers."""
        self.after(max(PAUSES))
        while self.model.has.waiting:
            self.after(max(PAUSES))
            self.after(max(PAUSES))

    def _again(self) -> list[Waiting]:
        """Return what the chain has tried again, as the model has it, in the order in which the chain does."""
        records = [each for each in self.taken if each.kind is LetterKind.RECORD]
        timers = [each for each in self.taken if each.kind is LetterKind.TIMER]
        records.sort(key=lambda each: each.input)
        # Event time first; one that was set twice is fired behind all others.
        before: Counter[Any] = Counter()
        rounds = []
        for each in timers:
            timer = each.is_event_timer, each.key, each.event_time_ms
            rounds.append((not each.is_event_timer, before[timer]))
            before[timer] += 1
        order = sorted(range(len(timers)), key=rounds.__getitem__)
        return [self._as_waiting(each) for each in (*records, *(timers[place] for place in order))]

    def _as_waiting(self, each: WaitingRecord) -> Waiting:
        if each.kind is LetterKind.TIMER:
            kind = "event" if each.is_event_timer else "processing"
            what: Any = (kind, (each.key, each.event_time_ms))
        else:
            what = (each.input, record_of(each.payload))
        watermark_ms = MIN_MS if each.kind is LetterKind.TIMER else each.watermark_ms
        return Waiting(what, each.attempt, each.due_ms, watermark_ms)

    def barrier(self, *, completes: bool) -> None:
        """Take a checkpoint, and look at it if it completes."""
        self.checkpoint += 1
        barrier = Barrier(self.checkpoint, self.trouble.now_ms)
        writer = self.storage.writer(barrier)
        pending = []
        for key in [(self.uid, i) for i in range(self.parallelism)] + [("out", i) for i in range(SINKS)]:
            actions, part = self.parts[key].snapshot(barrier, self.now)
            self._deliver(actions)
            pending.append(part)
        parts = []
        for each in pending:
            parts.append(each.write(writer, no_cancel))
            each.release()
        for checkpointed in self.parts.values():
            (checkpointed.completed if completes else checkpointed.aborted)(self.checkpoint)
        if completes:
            self.latest = Completed(parts, self.parallelism, copy.deepcopy(self.model.has), len(self.inputs))
            self._complete(parts)

    def _complete(self, parts: list[SubtaskSnapshot]) -> None:
        for part in parts:
            for committable in part.committables:
                self.committed.update(unseal(committable.message, SEAL).rows)
            for letter in part.letters:
                assert letter.letter not in self.letters, "the letter was in a complete checkpoint before"
                self.letters[letter.letter] = letter
        has = self.model.has
        assert self.committed == has.rows
        assert sum(part.waiting for part in parts) == len(has.waiting)
        assert Counter(map(dead_of, self.letters.values())) == has.dead

    def lose(self, parallelism: int) -> None:
        """All tasks are lost; they begin with the latest checkpoint, and get what came behind it again."""
        self.close()
        given, self.inputs = self.inputs, []
        self.model.has, self.model.watermark_ms = Expected(), MIN_MS
        if self.latest is not None:
            self.model.has = copy.deepcopy(self.latest.has)
            given, self.inputs = given[self.latest.inputs :], given[: self.latest.inputs]
            for each in self.model.has.waiting:
                each.due_ms = min(each.due_ms, self.trouble.now_ms + max(PAUSES))
        self.start(parallelism)
        self.check_state()
        for what, *arguments in given:
            what(*arguments)

    def check_state(self) -> None:
        """What the tables hold of each key is the model's."""
        for (uid, name), held in self.model.has.chain.tables.items():
            for key in KEYS:
                assert self._held(uid, name, key) == held_of(name, held, key), (uid, name, key)

    def _held(self, uid: str, name: str, key: str) -> Any:
        subtasks = subtasks_of(
            key_groups(KeySelector(("k",)).hash(rows_of([(key, 0, 0)])), GROUPS), self.parallelism, GROUPS
        )
        state = self.states[int(subtasks[0])].state(uid)
        match name:
            case "items":
                return state.lists(name).get(key)
            case "times":
                return dict(state.maps(name).items(key))
            case "number" | "seen" | "aggregate":
                return state.values(name).get(key)
            case _:
                return None

    def close(self) -> None:
        for checkpointed in self.parts.values():
            checkpointed.discard(self.checkpoint, self.checkpoint)
        for backend in self.backends:
            backend.close()
        self.backends = []

    def _deliver(self, actions: list[Action]) -> None:
        """What the chain sends comes to the sinks at once."""
        for action in actions:
            if isinstance(action, Send):
                receiver = self.sinks[action.channel.receiver]
                receiver.handle(ElementCame(action.channel, action.element), self.now)


def held_of(name: str, held: Any, key: str) -> Any:
    """Return what a table of the model has of a key."""
    empty: dict[str, Any] = {"items": [], "times": {}}
    return (
        held.get(key, empty.get(name)) if name in ("items", "times", "number", "seen", "aggregate") else None
    )


def record_of(payload: bytes) -> Record:
    (row,) = read_one_batch(payload).to_pylist()
    return tuple(row.values())


def dead_of(letter: ChainLetter) -> Any:
    if letter.kind is LetterKind.TIMER:
        return ("event" if letter.is_event_timer else "processing"), (
            unpack(letter.key),
            letter.event_time_ms,
        )
    record = record_of(letter.payload)
    return record if letter.kind is LetterKind.ROW else (letter.input, record)


# ---------------------------------------------------------------- drawing


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, frozenset[int]]:
    core = draw(st.sampled_from(["process", "process", "windows", "join", "reduce", "gather"]))
    behind = st.sampled_from(["batches", "flat", "filter", "map"])
    kinds = (core, *draw(st.lists(behind, max_size=3)))
    places = PLACES | {"windows": (), "join": ("pair",)}
    numbers, times = st.integers(0, 25), st.integers(0, 12)
    spots = [(f"{kind}{place}", where) for place, kind in enumerate(kinds) for where in places[kind]]
    of_timers = {"process": TIMER_PLACES, "windows": ("emit",)}.get(core, ())
    uid = f"{core}0"
    hits = st.tuples(st.sampled_from([*spots, ("route", "")]), numbers)
    if of_timers:
        starts = st.integers(0, 3).map(lambda window: window * SIZE_MS) if core == "windows" else times
        hits = hits | st.tuples(st.sampled_from([(uid, where) for where in of_timers]), starts)
    until = st.sampled_from([1, 15, 40, NEVER_WELL])
    chosen = draw(st.lists(st.tuples(hits, until), max_size=12))
    return (
        Program(kinds, {(uid, number, where): ms for ((uid, where), number), ms in chosen}),
        draw(st.frozensets(numbers, max_size=3)),
    )


RECORDS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 12)), min_size=1, max_size=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.integers(0, 1), RECORDS),
        st.tuples(st.just("give"), st.integers(0, 1), RECORDS),
        st.tuples(st.just("watermark"), st.integers(0, 13), st.none()),
        st.tuples(st.just("after"), st.sampled_from([1, 5, 10, 30]), st.none()),
        st.tuples(st.just("barrier"), st.booleans(), st.none()),
        st.tuples(st.just("lose"), st.integers(1, 3), st.none()),
    ),
    min_size=3,
    max_size=14,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), STEPS, st.sampled_from(["heap", "heap", "lmdb"]), st.integers(1, 3))
def test_whatever_fails_and_is_lost_each_record_is_through_waits_or_is_dead_once(
    drawn: tuple[Program, frozenset[int]], steps: list[tuple[str, Any, Any]], backend: str, parallelism: int
) -> None:
    program, refused = drawn
    take_due = WaitingRecords.take_due
    with tempfile.TemporaryDirectory() as at, pytest.MonkeyPatch.context() as patch:
        job = Job(program, backend, parallelism, refused, at)

        def watched(waiting: WaitingRecords, now_ms: int, most: int) -> list[WaitingRecord]:
            found = take_due(waiting, now_ms, most)
            job.taken += found
            return found

        patch.setattr(WaitingRecords, "take_due", watched)
        number = 0
        for what, argument, records in steps:
            match what:
                case "give":
                    job.give(argument, [(k, v, number + place) for place, (k, v) in enumerate(records)])
                    number += len(records)
                case "watermark":
                    job.watermark(argument)
                case "after":
                    job.after(argument)
                case "barrier":
                    job.barrier(completes=argument)
                case _:
                    job.lose(argument)
        job.rest()
        job.watermark(MAX_TIME_MS)
        job.rest()
        job.barrier(completes=True)
        assert not job.model.has.waiting
        job.check_state()
        job.close()
