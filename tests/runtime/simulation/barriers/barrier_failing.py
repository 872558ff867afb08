"""Topologies whose functions fail by a script, with a model of them: each chain takes a record whole or not at all.

What a record meets is a function of the record and of the attempt alone, so that it meets the same in a job that goes
back and reads it again. The model is so simple that it is a set: a record comes through, or is dead where it meets
something that fails always.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import pyarrow as pa
from barrier_outside import MeantToFailError, Outside, Writer
from barrier_topologies import COUNTED, NUMBERED, WINDOWED, Case, Extent, Passing, numbers

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.common.failures import PermanentFailure, RowsRejected
from ftlayer.functions.current import current_record
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.runtime.connectors.offset_reader import partition_index, unpack_rows
from ftlayer.runtime.protocol.messages import unseal
from ftlayer.state.snapshots.serializer import unpack
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.streams.windowed_stream import tumbling

ALWAYS = sys.maxsize
MAX_ATTEMPTS = 9
"""So many that faults of the simulation's own, which are no part of the script, make no record dead."""
Place = tuple[str, int, int]
"""A record: its source, partition and number there."""
Alarm = tuple[str, int]
"""A timer: its key and time. Those of the first second are of processing time, and due at once."""

IN_PROCESS = ("before", "changed", "half", "in place", "misfit", "output", "finally")
BATCH_COLUMNS = ("_ft_row", "_ft_attempt", "_ft_first_failed_at")


def place_of(record: Any) -> Place:
    """Return which record of a source it is."""
    _, source, part, number, *_ = record
    return source, part, number


@dataclass(frozen=True)
class Script:
    """What records meet at a place: in how many of 100 something, and which of ``ways``."""

    place: str
    share: int
    ways: tuple[str, ...] = ("before",)
    always: bool = False

    def fate(self, record: Any) -> tuple[str, int]:
        """Return how it fails here, and in how many attempts; none at all: 0."""
        random = Random(f"{self.place} {place_of(record)}")
        if random.randrange(100) >= self.share:
            return "", 0
        how, times = random.choice(self.ways), ALWAYS if self.always else random.choice((1, 2, ALWAYS))
        # (A fault of the simulation's may take the first attempt.)
        return how, ALWAYS if how == "permanent" else times

    def fails(self, record: Any, attempt: int) -> str:
        """Return how it fails in this attempt; "": it does not."""
        how, times = self.fate(record)
        return how if attempt <= times else ""

    def is_deadly(self, record: Any) -> bool:
        """Whether it never comes through."""
        return self.fate(record)[1] == ALWAYS


@dataclass
class Mapping:
    """Passes records on, raises for some; where its column is null ``assign_watermarks`` behind it refuses them."""

    world: int
    script: Script

    def __call__(self, record: Any) -> Any:
        outside = Outside.worlds[self.world]
        outside.die("die-in-function")
        match self.script.fails(record, current_record().attempt):
            case "":
                return record
            case "null":
                return *record[:-1], None
            case "misfit":
                return *record[:-1], "no number"
            case "permanent":
                raise PermanentFailure("for good")
            case _:
                raise MeantToFailError(str(record))


@dataclass
class Batches:
    """Passes batches on, and raises for some of them: for all of their rows."""

    script: Script

    def __call__(self, batch: pa.RecordBatch) -> Any:
        for row in batch.to_pylist():
            record = [value for name, value in row.items() if name not in BATCH_COLUMNS]
            if self.script.fails(record, row["_ft_attempt"]):
                raise MeantToFailError(f"a batch with {record}")
        return batch.drop_columns(list(BATCH_COLUMNS[1:]))


@dataclass
class Routing:
    """Says where keys go, and raises for some."""

    script: Script

    def __call__(self, names: tuple[Any, ...], channels: int) -> int:
        if self.script.fails(("", *names), 1):
            raise MeantToFailError(f"no way for {names}")
        return int(names[-1]) % channels


def tally(record: Any, ctx: Any, script: Script, outside: Outside, *, has_side: bool) -> Iterator[Any]:
    """Count a key in state of every kind, which has to say the same; fail as the script says."""
    how = script.fails(record, ctx.attempt)
    if how == "before":
        raise MeantToFailError(str(record))
    count, seen, times, gone = ctx.value("count", 0), ctx.value("seen"), ctx.map("times"), ctx.list("gone")
    before = [] if seen.get() is None else seen.get()
    if how == "in place":
        before.append("never")
        raise MeantToFailError(str(record))
    counts = [count.get(), len(before), sum(times.values()), len(gone.get())]
    outside.check(len(set(counts)) == 1, f"{record}: state of {counts} records")
    count.set(count.get() + 1)
    before.append(list(place_of(record)))
    seen.set(before)
    gone.append(record[3])
    times[record[3]] = times.get(record[3], 0) + 1
    try:
        if how == "changed":
            raise MeantToFailError(str(record))
        counted = *record, count.get()
        if how == "misfit":
            yield *record, "no number"
        if has_side and count.get() % 2:
            ctx.output("odd", counted)
        else:
            yield counted
        if how:
            raise MeantToFailError(str(record))
    finally:
        if how == "finally":
            count.set(count.get() + 100)


@dataclass
class Tallying(ProcessFunction):
    """See `tally`."""

    world: int
    script: Script
    has_side: bool = False

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        yield from tally(record, ctx, self.script, Outside.worlds[self.world], has_side=self.has_side)


@dataclass
class TallyingBoth(CoProcessFunction):
    """`Tallying` of two inputs together."""

    world: int
    script: Script

    def process_left(self, record: Any, ctx: Any) -> Iterator[Any]:
        yield from tally(record, ctx, self.script, Outside.worlds[self.world], has_side=False)

    process_right = process_left


def alarm_of(record: Any) -> Alarm:
    """Return which timer gives a record back: one of its own, or one that it may share with others of its key."""
    key, _, _, number, at = record
    return key, number if number % 2 else 1_000 + at // 500 * 500


@dataclass
class Alarming(ProcessFunction):
    """Keeps records, and counts them and puts them out by timers, which fail."""

    world: int
    script: Script
    alarms: Script

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        _, time_ms = alarm_of(record)
        kept, timers = ctx.map("kept"), ctx.timers
        how = self.script.fails(record, ctx.attempt)
        if how == "before":
            raise MeantToFailError(str(record))
        kept[time_ms] = [*(kept.get(time_ms) or []), list(record)]
        (timers.event if time_ms >= 1_000 else timers.processing)(time_ms)
        if how == "changed":
            raise MeantToFailError(str(record))
        yield from ()

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        fired = Outside.worlds[self.world].fired_timers
        fired[ctx.key, time_ms] += 1
        how = self.alarms.fails(as_record((ctx.key, time_ms)), fired[ctx.key, time_ms])
        count, kept = ctx.value("count", 0), ctx.map("kept")
        if how == "before":
            raise MeantToFailError(f"{ctx.key} {time_ms}")
        records = kept.get(time_ms) or []
        if how == "in place":
            records.append("never")
            raise MeantToFailError(f"{ctx.key} {time_ms}")
        if time_ms in kept:
            del kept[time_ms]
        for record in records:
            count.set(count.get() + 1)
            yield *record, count.get()
        if how == "misfit":
            yield ctx.key, "a", 0, 0, 0, "no number"
        if how:
            raise MeantToFailError(f"{ctx.key} {time_ms}")


def as_record(alarm: Alarm) -> Any:
    """Return a timer as scripts take records."""
    key, time_ms = alarm
    return key, key, 0, time_ms


class Refusing(Writer):
    """Refuses some rows."""

    def __init__(self, world: int, sink: str, script: Script) -> None:
        super().__init__(world, sink)
        self._script = script

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        batches = list(iterator)
        rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        refused = {place: "meant to fail" for place, row in enumerate(rows) if self._script.fails(row, 1)}
        if refused:
            raise RowsRejected(refused)
        return super().write(iter(batches))


@dataclass
class Noting:
    """A sink's function: notes rows, and raises for some."""

    world: int
    script: Script

    def __call__(self, batch: pa.RecordBatch) -> None:
        rows = [tuple(row.values()) for row in batch.to_pylist()]
        for row in rows:
            if self.script.fails(row, 1):
                raise MeantToFailError(str(row))
        Outside.worlds[self.world].noted.update(map(place_of, rows))


PASSING = Script("passing", 12, ("before", "misfit", "permanent"))
NULLS = Script("times", 15, ("null", "before"))
PROCESS = Script("process", 25, IN_PROCESS)
BEHIND = Script("batches", 8)
ROAD = Script("road", 8, always=True)
ROWS = Script("rows", 10, always=True)
KEEPING = Script("alarms", 15, ("before", "changed"))
ALARMS = Script("timers", 25, ("before", "in place", "misfit", "half"))

SCRIPTS = {
    "keyed": (PASSING, PROCESS, BEHIND),
    "both": (PASSING, PROCESS),
    "odd": (PASSING, PROCESS),
    "routed": (PASSING, PROCESS, ROAD),
    "timed": (PASSING, NULLS),
    "refused": (PASSING, ROWS),
    "noted": (PASSING, ROWS),
    "alarmed": (PASSING, KEEPING),
}
"""What records meet, in this order, by topology."""


@dataclass
class FailingCase(Case):
    """In place of `barrier_topologies.Case`."""

    @property
    def ordered(self) -> bool:
        """A record that is tried again comes behind others."""
        return False

    @property
    def sources(self) -> tuple[str, ...]:
        return ("a", "b") if self.name == "both" else ("a",)

    @cached_property
    def read(self) -> list[Any]:
        """All records that there are."""
        return [
            record
            for source in self.sources
            for part in range(self.parts)
            for record in numbers(source, part, self.count, self.keys)
        ]

    @cached_property
    def dead(self) -> dict[Place, str]:
        """The model: where each record that does not come through is dead."""
        met = {
            place_of(record): [script for script in SCRIPTS[self.name] if script.is_deadly(record)]
            for record in self.read
        }
        return {place: scripts[0].place for place, scripts in met.items() if scripts}

    @cached_property
    def alarms(self) -> dict[Alarm, int]:
        """The model: timers that never come through, and how many records each of them keeps."""
        if self.name != "alarmed":
            return {}
        alarms = Counter(alarm_of(record) for record in self.read if place_of(record) not in self.dead)
        return {alarm: times for alarm, times in alarms.items() if ALARMS.is_deadly(as_record(alarm))}

    @property
    def records(self) -> set[Any]:
        left = {record for record in self.read if place_of(record) not in self.dead}
        return left if not self.alarms else {record for record in left if alarm_of(record) not in self.alarms}

    # ------------------------------------------------------------ building

    def _read(self, env: GraphBuilder, source: str, parallelism: int) -> Any:
        read = super()._read(env, source, parallelism)
        return read.map(
            Mapping(self.outside.number, PASSING),
            NUMBERED,
            uid=f"failing-{source}",
            parallelism=min(self.parts, parallelism),
        )

    def _tallied(self, env: GraphBuilder, parallelism: int, **options: Any) -> Any:
        function = Tallying(self.outside.number, PROCESS, bool(options))
        return (
            self._read(env, "a", parallelism).key_by("key").process(function, COUNTED, uid="tally", **options)
        )

    def _keyed(self, env: GraphBuilder, parallelism: int) -> None:
        tallied = self._tallied(env, parallelism)
        self._sink(
            tallied.map_batches(Batches(BEHIND), COUNTED, tagged=True, uid="batches"), "out", parallelism
        )

    def _both(self, env: GraphBuilder, parallelism: int) -> None:
        left, right = (self._read(env, source, parallelism).key_by("key") for source in self.sources)
        function = TallyingBoth(self.outside.number, PROCESS)
        self._sink(left.connect(right).process(function, COUNTED, uid="tally"), "out", parallelism)

    def _odd(self, env: GraphBuilder, parallelism: int) -> None:
        tallied = self._tallied(env, parallelism, side={"odd": COUNTED})
        self._sink(tallied, "out", parallelism)
        self._sink(tallied.side_output("odd"), "odds", parallelism)

    def _routed(self, env: GraphBuilder, parallelism: int) -> None:
        routed = self._tallied(env, parallelism).partition_custom(Routing(ROAD), "source", "part", "n")
        # With one channel nobody is asked.
        passed = routed.map(Passing(self.outside.number), COUNTED, uid="behind", parallelism=2)
        self._sink(passed, "out", parallelism)

    def _timed(self, env: GraphBuilder, parallelism: int) -> None:
        passing = min(self.parts, parallelism)
        windowed = (
            self._read(env, "a", parallelism)
            .map(Mapping(self.outside.number, NULLS), NUMBERED, uid="nulls", parallelism=passing)
            .assign_watermarks("at", "500ms", uid="times", parallelism=passing)
            .key_by("key")
            .window(tumbling("1s"))
            .late_to("late")
            .process(_windowed, WINDOWED, uid="windows")
        )
        self._sink(windowed, "out", parallelism)
        self._sink(windowed.side_output("late"), "late", parallelism)

    def _alarmed(self, env: GraphBuilder, parallelism: int) -> None:
        alarmed = (
            self._read(env, "a", parallelism)
            .assign_watermarks("at", "500ms", uid="times", parallelism=min(self.parts, parallelism))
            .key_by("key")
            .process(Alarming(self.outside.number, KEEPING, ALARMS), COUNTED, uid="alarms")
        )
        self._sink(alarmed, "out", parallelism)

    def _refused(self, env: GraphBuilder, parallelism: int) -> None:
        passed = self._read(env, "a", parallelism).rebalance()
        passed.sink(Refusing(self.outside.number, "out", ROWS), uid="out", parallelism=parallelism)

    def _noted(self, env: GraphBuilder, parallelism: int) -> None:
        passed = self._read(env, "a", parallelism).rebalance()
        passed.sink(Noting(self.outside.number, ROWS), uid="out", parallelism=parallelism)

    # ------------------------------------------------------------ checking

    def check(self, extent: Extent = Extent.WHOLE, *_: Any) -> None:
        """Lost, duplicated and half done are 0; `check_letters` looks at the dead."""
        if self.name == "noted":
            wanted = {place_of(record) for record in self.records}
            assert set(self.outside.noted) <= wanted
            assert extent is not Extent.WHOLE or set(self.outside.noted) == wanted
            return
        self._check_places(self._places(lambda name, rows: True), extent)
        if self.name == "timed":
            self._check_windows(lambda name, rows: True)
        elif self.name != "refused" and extent is not Extent.CUT:
            self._check_counts([row for sink in ("out", "odds") for row in self.outside.visible(sink)])

    def _places(self, counts: Any) -> Counter[Place]:
        found: Counter[Place] = Counter()
        for sink in ("out", "odds", "late"):
            first = 2 if self.name == "timed" and sink == "out" else 1
            found.update(row[first : first + 3] for row in self.outside.visible(sink, counts))
        return found

    def check_letters(self, letters: list[ChainLetter], extent: Extent) -> None:
        """Each record that the model gives up is dead once, where the model says so."""
        self._check_alarms([letter for letter in letters if letter.kind is LetterKind.TIMER], extent)
        letters = [letter for letter in letters if letter.kind is not LetterKind.TIMER]
        found = Counter(_place_of_letter(letter) for letter in letters)
        assert set(found) <= set(self.dead), f"dead for no reason: {sorted(set(found) - set(self.dead))[:5]}"
        if extent is Extent.WHOLE:
            lost = set(self.dead) - set(found)
            assert not lost, f"{len(lost)} neither visible nor dead: {sorted(lost)[:5]}"
        twice = {place: times for place, times in found.items() if times > 1}
        assert not self.exact or self.came_back or not twice, f"dead twice: {twice}"
        for letter in letters:
            script = self.dead[_place_of_letter(letter)]
            self.check_letter(letter, script)

    def _check_alarms(self, letters: list[ChainLetter], extent: Extent) -> None:
        """Each timer that always fails is dead: once, if not a record that came behind that has set it again."""
        found: Counter[Alarm] = Counter()
        for letter in letters:
            assert letter.event_time_ms is not None
            alarm = unpack(letter.key), letter.event_time_ms
            found[alarm] += 1
            assert letter.operator == "alarms"
            assert letter.is_event_timer == (letter.event_time_ms >= 1_000)
            assert self.came_back or len(letter.attempts) == MAX_ATTEMPTS, letter.attempts
        assert set(found) <= set(self.alarms), (
            f"dead for no reason: {sorted(set(found) - set(self.alarms))[:5]}"
        )
        if extent is Extent.WHOLE:
            lost = set(self.alarms) - set(found)
            assert not lost, f"{len(lost)} timers are neither through nor dead: {sorted(lost)[:5]}"
        often = {alarm: times for alarm, times in found.items() if times > self.alarms[alarm]}
        assert not self.exact or self.came_back or not often, f"dead too often: {often}"

    def check_letter(self, letter: ChainLetter, script: str) -> None:
        """It says who refused it, and how often."""
        # A fault of the simulation's may strike first, in the last attempt.
        is_known = letter.operator in (*OPERATORS[script], "passing-a", "passing-b", "behind")
        assert is_known, f"{letter.operator}, and it meets {script}"
        is_row = self.name == "refused" and script == "rows"
        assert letter.kind is (LetterKind.ROW if is_row else LetterKind.RECORD)
        if self.came_back:
            return
        numbers = [attempt.number for attempt in letter.attempts]
        assert numbers == list(range(1, len(numbers) + 1))
        is_permanent = is_row or "for good" in letter.attempts[-1].reason
        assert is_permanent or len(numbers) == MAX_ATTEMPTS, letter.attempts

    def completed(self, checkpoint: Checkpoint, letters: int, key: bytes) -> None:
        """What was read is visible or set aside by sinks, dead, or waits, if nothing of it is in flight."""
        if (
            checkpoint.unaligned
            or not self.exact
            or self.came_back
            or self.name in ("timed", "noted", "alarmed")
        ):
            return
        positions = {
            (part.uid, name): unpack_rows(part.uid, part.positions, partition_index(name), 0)
            for part in checkpoint.subtasks
            for name in part.positions
        }
        waiting = sum(part.waiting for part in checkpoint.subtasks)
        held = {
            unseal(committable.message, key).name
            for part in checkpoint.subtasks
            for committable in part.committables
        }
        held |= {name for name, rows in self.outside.staged.items() if rows.visible}
        rows = sum(len(self.outside.staged[name].rows) for name in held)
        read = sum(positions.values())
        self.outside.check(
            read == waiting + rows + letters,
            f"checkpoint {checkpoint.checkpoint}: read {read}, and {waiting} wait, {rows} are written, {letters} dead",
        )


OPERATORS = {
    "passing": ("failing-a", "failing-b", "nulls"),
    "times": ("nulls", "times"),
    "process": ("tally",),
    "alarms": ("alarms",),
    "batches": ("batches",),
    "road": ("tally", "batches"),
    "rows": ("out",),
}
"""Who refuses what a script lets fail."""


def _windowed(key: Any, window: Any, records: list[Any]) -> Iterator[Any]:
    for _, source, part, number, _ in records:
        yield key, window.start_ms, source, part, number


def _place_of_letter(letter: ChainLetter) -> Place:
    (row,) = pa.ipc.open_stream(letter.payload).read_all().to_pylist()
    return row["source"], row["part"], row["n"]
