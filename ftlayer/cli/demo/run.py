from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ftlayer.cli.demo import driver, ledger
from ftlayer.cli.demo.choices import Engine, Kill, Kind, Mode, Victim, doomed, kind_of
from ftlayer.cli.demo.driver import MAX_ATTEMPTS, BatchDone, KillPlan, Progress, RunDirectory, Started
from ftlayer.cli.demo.ledger import Ledger, Service
from ftlayer.cli.demo.programs import PreparedInput, prepare, prepared_files
from ftlayer.cli.demo.supervisor import BackAgain, Happening, Killed, Supervisor, WentOn
from ftlayer.common.printable import printable
from ftlayer.errors import ConfigError

if TYPE_CHECKING:
    from ftlayer.monitor.sources import VertexSource


@contextmanager
def in_browser(supervisor: Supervisor, directory: RunDirectory) -> Iterator[str]:
    """Serve the console while the block runs; gives the link to it.

    It is a thread of the screen's process, which knows the driver of the moment: that is killed and started again.
    Raises `MachineError` where the extra ``console`` is not installed.
    """
    # Read when gRPC loads: the console says itself what does not answer.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ftlayer.monitor.console.options import ConsoleOptions, check_extra

    check_extra()
    from ftlayer.monitor.console.serve import serve
    from ftlayer.monitor.sources import sources_here

    def look() -> list[VertexSource]:
        store, pid = str(directory.store), supervisor.driver_pid
        return [source for source in sources_here().sources if source.path == store or source.pid == pid]

    stop = threading.Event()
    started: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            serve(ConsoleOptions("127.0.0.1:0"), look, on_ready=started.put, stop=stop)
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=run, name="demo-console", daemon=True)
    thread.start()
    link = started.get()
    if isinstance(link, BaseException):
        raise link
    try:
        yield link
    finally:
        stop.set()
        thread.join()


TOTALS = ("slot restarts", "checkpoints", "failed", "restores")
"""Figures that each driver of a topology counts from 0."""


@dataclass(frozen=True)
class Recovery:
    """One kill: seconds until what was killed ran again, and until the first output behind it was committed."""

    victim: str
    when: str
    back_s: float
    went_on_s: float


@dataclass
class Tally(ABC):
    """The screen's figures, and the kills. ``seen`` lines have been read, ``waiting`` of them wait for a replay."""

    seen: int = 0
    waiting: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    _killed: str = ""
    _back_s: float = 0.0

    def count(self, happening: Happening) -> None:
        match happening:
            case Killed():
                self._killed = happening.when
            case BackAgain():
                self._back_s = happening.seconds
            case WentOn():
                times = self._back_s, happening.seconds
                self.recoveries.append(Recovery(str(happening.victim), self._killed, *times))

    @abstractmethod
    def figures(self) -> dict[str, str]:
        """Return what is shown, by its heading."""

    @abstractmethod
    def sentence(self) -> str:
        """Return the same in a sentence, for a screen that is no terminal."""

    @abstractmethod
    def summary(self) -> str:
        """Return what it took, in a few words."""

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return what it took, as plain values."""


@dataclass
class BatchTally(Tally):
    """Counts of lines of a query so far: ``done`` are through; ``retried`` counts replays."""

    batches: int = 0
    done: int = 0
    dead: int = 0
    retried: int = 0
    query_restarts: int = 0
    batch_seconds: list[float] = field(default_factory=list)
    _last: int = 0
    _timed_lines: int = 0
    _first_batch: bool = True

    @property
    def lines_per_second(self) -> float:
        """Lines through a second, the first batch of each driver left out (Spark warms up in it)."""
        seconds = sum(self.batch_seconds)
        return self._timed_lines / seconds if seconds else 0.0

    @property
    def p50_batch_s(self) -> float:
        return statistics.median(self.batch_seconds) if self.batch_seconds else 0.0

    def count(self, happening: Happening) -> None:
        super().count(happening)
        match happening:
            case BatchDone():
                self._count_batch(happening)
            case Started():
                self._first_batch = True
            case driver.Restarted():
                self.query_restarts += 1

    def _count_batch(self, batch: BatchDone) -> None:
        self.batches += 1
        self._last = batch.batch
        self.done += batch.rows_in - batch.waiting - batch.dead
        self.waiting += batch.waiting - batch.delivered
        self.dead += batch.dead
        self.retried += batch.delivered
        self.seen = self.done + self.waiting + self.dead
        if not self._first_batch:
            self.batch_seconds.append(batch.seconds)
            self._timed_lines += batch.rows_in
        self._first_batch = False

    def figures(self) -> dict[str, str]:
        return {
            "batches": str(self.batches),
            "lines/s": f"{self.lines_per_second:,.0f}",
            "read": f"{self.seen:,}",
            "done": f"{self.done:,}",
            "retried": f"{self.retried:,}",
            "waiting": f"{self.waiting:,}",
            "dead letters": f"{self.dead:,}",
        }

    def sentence(self) -> str:
        return (
            f"batch {self._last}: {self.seen:,} lines read, {self.done:,} done, {self.retried:,} retried, "
            f"{self.waiting:,} waiting, {self.dead:,} dead letters"
        )

    def summary(self) -> str:
        return f"{self.lines_per_second:,.0f} lines/s, {self.p50_batch_s:.2f} s a batch (median)"

    def values(self) -> dict[str, Any]:
        return {
            "lines_per_s": round(self.lines_per_second, 1),
            "p50_batch_s": round(self.p50_batch_s, 3),
            "batches": self.batches,
        }


@dataclass
class TopologyTally(Tally):
    """The figures of a topology: of some the latest value, of `TOTALS` the sum over all drivers."""

    _latest: dict[str, int] = field(default_factory=dict)
    _earlier: dict[str, int] = field(default_factory=dict)

    def count(self, happening: Happening) -> None:
        super().count(happening)
        match happening:
            case Progress():
                self.seen = happening.lines
                self._latest = happening.figures
                self.waiting = self.figure("waiting")
            case Started():
                self._earlier = {name: self.figure(name) for name in TOTALS}
                self._latest = {}

    def figure(self, name: str) -> int:
        return self._latest.get(name, 0) + self._earlier.get(name, 0)

    def figures(self) -> dict[str, str]:
        return {"read": f"{self.seen:,}"} | {name: f"{self.figure(name):,}" for name in self._latest}

    def sentence(self) -> str:
        others = [f"{self.figure(name):,} {name}" for name in self._latest]
        return ", ".join([f"{self.seen:,} lines read", *others])

    def summary(self) -> str:
        return f"slots restarted: {self.figure('slot restarts')}"

    def values(self) -> dict[str, Any]:
        return {name.replace(" ", "_"): self.figure(name) for name in TOTALS if name in self._latest}


_THROUGH = {
    Kind.QUERY: "an ordinary PySpark streaming query on two cores, in {batches} micro-batches: parse → enrich → key_by "
    "→ sink. ftlayer is wrapped around it.",
    Kind.TRACKED: "a continuous topology in two slots of Spark, as they come in: parse → enrich → key_by → sink. Its "
    "vertex stores and follows every record (acker mode).",
    Kind.CHECKPOINTED: "a continuous topology in two slots of Spark, as they come in: parse → enrich → key_by → count "
    "→ sink. Twice a second barriers take a snapshot of all state (barrier mode).",
}

_BAD_LINES = {
    Kind.QUERY: "Some lines cannot be parsed. Plain Spark would fail the task, then the query, and do so again after "
    f"each restart. Here such a line fails alone: it is tried {MAX_ATTEMPTS} times, then kept as a dead letter.",
    Kind.TRACKED: f"Some lines cannot be parsed. Such a line fails alone: it is tried {MAX_ATTEMPTS} times, then kept "
    "as a dead letter.",
    Kind.CHECKPOINTED: "Some lines cannot be parsed. Such a line fails alone, and all that it had changed is taken "
    f"back: it is tried {MAX_ATTEMPTS} times, then it is a dead letter, in a sink of its own.",
}

_SERVICE = "The enrichment service does not answer now and then. Just the line concerned is tried again."
_COUNTS = (
    "Each word gets a number: the how-manyth of its kind it is. What was lost or counted twice would show."
)

_PHRASES = {
    Victim.SLOT: "a slot (one of the two processes that all operators run in)",
    Victim.VERTEX: "the ftlayer vertex (the process that stores what failed)",
    Victim.DRIVER: "the driver with all of Spark",
}


def explanation(kind: Kind, prepared: PreparedInput, victims: Sequence[Victim]) -> str:
    through = _THROUGH[kind].format(batches=prepared.batches)
    text = f"{prepared.lines:,} lines of text ({prepared.title}, {prepared.sources} files)"
    lines = [f"{text} go through {through}", f"• {_BAD_LINES[kind]}", f"• {_SERVICE}"]
    if kind is Kind.CHECKPOINTED:
        lines.append(f"• {_COUNTS}")
    if victims:
        names = ", then ".join(_PHRASES[victim] for victim in dict.fromkeys(victims))
        where = "In the middle of a batch" if kind is Kind.QUERY else "In the middle of it"
        first = "first " if ", then " in names else ""
        lines.append(f"• {where} {first}{names} is killed with SIGKILL. The run goes on by itself.")
    lines.append("At the end every line is looked up in the sink and held against a recount without Spark.")
    return "\n".join(lines)


_DONE = {
    "first_try": "done at the first try",
    "after_replay": "done after a replay: failed at first, passed later",
}
_REPEATED = "done, and some rows written again: on their way at a kill (acker mode: at least once)"
_RETRIED = "done after a retry: failed at first, passed later"
ACCOUNTS: dict[Kind, dict[str, str]] = {
    Kind.QUERY: _DONE,
    Kind.TRACKED: {**_DONE, "repeated": _REPEATED},
    Kind.CHECKPOINTED: {**_DONE, "after_replay": _RETRIED},
}
"""The ledger's counts of lines that are done."""

BY_HAND = {
    "mended": "done after somebody had edited their dead letters",
    "purged": "dead letters that somebody purged",
}
"""The ledger's counts of lines that people have decided about; shown where there are some."""

DEAD = f"dead letters, after {MAX_ATTEMPTS} attempts each:"

FAULTS = {
    "lost": "neither in the sink nor a dead letter",
    "duplicated": "there more than once",
    "altered": "other rows, or another reason, than the recount has",
    "misplaced": "in the sink instead of a dead letter, the other way round, or both",
    "unknown": "never in the input",
}
"""Counts that must be 0, and what others would mean."""

MISCOUNTED = "words whose occurrences are not numbered 1, 2, 3, … without gaps"

BALANCED = {
    Kind.QUERY: "every line is in the sink exactly once, or is a dead letter exactly once{purged}.",
    Kind.TRACKED: "every line is in the sink, or is a dead letter exactly once{purged}.",
    Kind.CHECKPOINTED: "every line is in the sink exactly once, or is a dead letter exactly once, and every count is "
    "exact.",
}


def faults(kind: Kind) -> dict[str, str]:
    if kind is Kind.TRACKED:
        return {**FAULTS, "duplicated": "there more than once, though nothing was replayed"}
    return {**FAULTS, "miscounted": MISCOUNTED} if kind is Kind.CHECKPOINTED else FAULTS


KIB = 1 << 10
MOST_CHECKPOINTS = 20
"""So many of the last ones are listed."""

Checkpoints = list[dict[str, Any]]
"""As `ftlayer.cli.demo.programs` writes them down, the latest last."""


@dataclass(frozen=True)
class RunOutcome:
    """The results of a run. ``checkpoints`` are those of its last driver."""

    kind: Kind
    ledger: Ledger
    tally: Tally
    seconds: float
    checkpoints: Checkpoints


def print_outcome(console: Console, outcome: RunOutcome) -> None:
    say, tally, found = partial(console.print, soft_wrap=True), outcome.tally, outcome.ledger
    if outcome.kind is Kind.CHECKPOINTED:
        console.print(_checkpoint_table(outcome.checkpoints))
        restored = f"the state was restored from one {tally.values().get('restores', 0)} times in all."
        say(f"{len(outcome.checkpoints)} checkpoints of the last driver; {restored}\n")
    console.print(_ledger_table(outcome.kind, found))
    words = f" with {found.words:,} different words" if found.words else ""
    say(f"{found.rows_out:,} rows in the sink{words}; {tally.summary()}; {outcome.seconds:.0f} s in all")
    for each in tally.recoveries:
        again = f"running again after {each.back_s:.1f} s, next output committed after {each.went_on_s:.1f} s"
        say(f"{each.victim} killed {each.when}: {again}")
    console.print()
    purged = ", or was purged" if found.purged else ""
    if found.balanced:
        say(f"The ledger balances: {BALANCED[outcome.kind].format(purged=purged)}", style="bold green")
    else:
        console.print("THE LEDGER DOES NOT BALANCE: see the lines in red above.", style="bold red")


def _ledger_table(kind: Kind, found: Ledger) -> Table:
    table = Table(title="The ledger", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    table.add_row(f"{found.records_in:,}", "records in", style="bold")
    for account, meaning in ACCOUNTS[kind].items():
        table.add_row(f"{getattr(found, account):,}", meaning)
    for account, meaning in BY_HAND.items():
        if count := getattr(found, account):
            table.add_row(f"{count:,}", meaning)
    table.add_row(f"{found.dead:,}", DEAD)
    for reason, count in found.dead_by_reason.most_common():
        table.add_row("", f"{count:,}  {reason}")
    for fault, meaning in faults(kind).items():
        wrong = getattr(found, fault)
        table.add_row(f"{wrong:,}", f"{fault}: {meaning}", style="bold red" if wrong else None)
        for line in found.examples.get(fault, []):
            table.add_row("", f"  {line}")
    return table


def _checkpoint_table(checkpoints: Checkpoints) -> Table:
    table = Table(
        title="Checkpoints (times in ms, sizes in KiB)", title_justify="left", box=None, padding=(0, 1)
    )
    for heading in ("id", "took", "aligned", "sync", "async", "state", "written", "kind", "outcome"):
        table.add_column(heading, justify="left" if heading in ("kind", "outcome") else "right")
    left_out = len(checkpoints) - MOST_CHECKPOINTS
    if left_out > 0:
        table.add_row("…", f"{left_out} more")
    for row in checkpoints[-MOST_CHECKPOINTS:]:
        table.add_row(
            str(row["checkpoint"]),
            f"{row['duration_ms']:,}",
            f"{row['alignment_ms']:,}",
            f"{row['sync_ms']:,.1f}",
            f"{row['async_ms']:,.1f}",
            f"{row['state_bytes'] / KIB:,.1f}",
            f"{row['written_bytes'] / KIB:,.1f}",
            row["kind"],
            f"{row['outcome']}{': ' if row['failure'] else ''}{row['failure']}",
            style="red" if row["failure"] else None,
        )
    return table


def print_next(console: Console, kind: Kind, directory: RunDirectory, *, kept: bool) -> None:
    root, store = (directory.root, directory.store) if kept else ("PATH", "PATH/ft")
    dead, where = f"ftlayer dead list --store {store}", "in the vertex' store"
    if kind is Kind.CHECKPOINTED:
        dead, where = f"{root}/dead-letters", "in files"
    if not kept:
        gone = "The run's directory is gone; with --keep (or --dir PATH) it stays, to be looked at with:"
        console.print(f"{gone}\n  {dead}")
        return
    rows = "a directory a batch" if kind is Kind.QUERY else "in files"
    console.print(f"The run is kept in {root}:", soft_wrap=True)
    console.print(f"  {dead}     the dead letters, {where}", soft_wrap=True)
    console.print(f"  {root}/output     the rows that were written, {rows}", soft_wrap=True)
    console.print(f"  {root}/driver.log     what Spark had to say", soft_wrap=True)


def as_json(outcome: RunOutcome, directory: Path | None) -> dict[str, Any]:
    found, tally = outcome.ledger, outcome.tally
    values: dict[str, Any] = {
        "kind": outcome.kind,
        "balanced": found.balanced,
        "records_in": found.records_in,
        **{f"done_{count}": getattr(found, count) for count in ACCOUNTS[outcome.kind]},
        **{count: getattr(found, count) for count in BY_HAND},
        "dead_letters": dict(found.dead_by_reason),
        **{fault: getattr(found, fault) for fault in faults(outcome.kind)},
        "examples": found.examples,
        "rows_out": found.rows_out,
        **tally.values(),
        "seconds": round(outcome.seconds, 1),
        "recoveries": [dataclasses.asdict(recovery) for recovery in tally.recoveries],
        "directory": None if directory is None else str(directory),
    }
    if outcome.kind is Kind.CHECKPOINTED:
        values |= {"words": found.words, "last_checkpoints": outcome.checkpoints}
    return values


REFRESHES_A_SECOND = 8
KEPT_EVENTS = 10
PLAIN_EVERY_S = 3.0
"""Without a terminal, one line of progress in so many seconds at most."""


class Screen:
    """Shows happenings. Use it as a context; `show` is for what happens, `idle` for when nothing does."""

    def __init__(self, console: Console, tally: Tally, explanation: str, lines: int) -> None:
        self._console, self._tally, self._lines = console, tally, lines
        self._since = self._starting_since = time.monotonic()
        self._state, self._starting = "starting", ""
        self._events: deque[Text] = deque(maxlen=KEPT_EVENTS)
        self._said_at = 0.0
        self._live: Live | None = None
        console.print(Panel(Text(explanation), title="ftlayer demo", padding=(1, 2)))
        if console.is_terminal:
            shown: dict[str, Any] = {"get_renderable": self._table}
            self._live = Live(console=console, refresh_per_second=REFRESHES_A_SECOND, **shown)

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def show(self, happening: Happening) -> None:
        self._tally.count(happening)
        match happening:
            case driver.Starting(what):
                self._say_started()
                self._starting, self._starting_since = what, time.monotonic()
                self._state = f"starting {what}"
            case Started():
                self._say_started()
                self._state = "running"
            case Killed():
                if happening.victim == "driver":
                    self._state, self._starting = "starting again", ""
                self._say(f"{happening.victim} killed (SIGKILL) {happening.when}", "bold red")
            case BackAgain():
                self._say(f"{happening.victim} is back after {happening.seconds:.1f} s", "green")
            case WentOn():
                self._say(f"the next output was committed {happening.seconds:.1f} s after that kill", "green")
            case driver.Restarted():
                # Where there is a traceback of Python's, its last line names the failure.
                lines = [line.strip() for line in happening.failure.splitlines() if line.strip()]
                why = lines[-1] if lines else "no reason given"
                self._say(f"the query failed and was started again: {why}", "yellow")
            case BatchDone():
                if happening.again:
                    again = f"batch {happening.batch} was taken up where its driver left it, and written over"
                    self._say(again, "green")
                self._show_progress()
            case Progress():
                self._show_progress()
            case driver.Finished():
                self._state = "done; now counting"

    def _show_progress(self) -> None:
        if self._tally.seen >= self._lines and self._tally.waiting:
            self._state = "all input read; replaying what waits"
        if self._live is None and time.monotonic() - self._said_at >= PLAIN_EVERY_S:
            self._said_at = time.monotonic()
            self._console.print(f"[{self.seconds:5.1f} s] {self._tally.sentence()}", soft_wrap=True)

    def _say_started(self) -> None:
        if self._starting:
            took = time.monotonic() - self._starting_since
            self._say(f"{self._starting} started in {took:.1f} s", "dim")
            self._starting = ""

    def _say(self, sentence: str, style: str) -> None:
        said = printable(f"[{self.seconds:5.1f} s] {sentence}")
        line = Text(said, style=style, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._events.append(line)

    def _table(self) -> Group:
        figures = Table(box=None, padding=(0, 3, 0, 0))
        values = self._tally.figures()
        for heading in values:
            figures.add_column(heading, justify="right", min_width=8)
        figures.add_row(*values.values())
        # A bar by itself does not end its line.
        bar = Padding(ProgressBar(total=self._lines, completed=min(self._tally.seen, self._lines)), 0)
        state = Text(printable(f"{self.seconds:5.0f} s  {self._state}"), style="bold")
        return Group(state, bar, figures, *self._events)


EXIT_BALANCED = 0
EXIT_UNBALANCED = 3


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command line. ``directory`` None: a temporary one, removed at the end unless ``keep``."""

    pattern: str | None = None
    kill: Kill = Kill.ALL
    lines: int = 200_000
    batches: int = 20
    directory: Path | None = None
    keep: bool = False
    json_path: Path | None = None
    mode: Mode = Mode.ACKER
    engine: Engine | None = None
    console: bool = False


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo; return 0 when the ledger balances, 3 when it does not.

    The run's directory is kept when anything goes wrong. Raises `ConfigError` for options that make no sense
    and `QueryError` when the driver fails by itself.
    """
    kind = kind_of(options.mode, options.engine)
    doomed(kind, options.kill)
    root = _new_directory(options.directory)
    kept = options.keep or options.directory is not None
    directory = RunDirectory(root)
    try:
        outcome = _run(options, kind, directory, console)
    except (ConfigError, KeyboardInterrupt):
        if not kept:
            _remove(root)
        raise
    except BaseException:
        console.print(f"The run's directory is kept: {root}", soft_wrap=True)
        raise
    kept = kept or not outcome.ledger.balanced
    print_outcome(console, outcome)
    print_next(console, kind, directory, kept=kept)
    if options.json_path is not None:
        values = as_json(outcome, root if kept else None)
        options.json_path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
    if not kept:
        _remove(root)
    return EXIT_BALANCED if outcome.ledger.balanced else EXIT_UNBALANCED


def _run(options: DemoOptions, kind: Kind, directory: RunDirectory, console: Console) -> RunOutcome:
    prepared = prepare(options.pattern, directory.input, max_lines=options.lines, batches=options.batches)
    total = prepared.batches if kind is Kind.QUERY else prepared.lines
    kills = KillPlan.of(kind, options.kill, total)
    victims = [victim for victim, _ in kills.left]
    for path in (directory.service, directory.marks):
        path.mkdir()
    tally: Tally = BatchTally() if kind is Kind.QUERY else TopologyTally()
    text = explanation(kind, prepared, victims)
    with contextlib.ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(directory, kind, kills))
        if options.console:
            link = stack.enter_context(in_browser(supervisor, directory))
            console.print(f"Open the console: {link}", soft_wrap=True)
        screen = stack.enter_context(Screen(console, tally, text, prepared.lines))
        for happening in supervisor.happenings():
            if happening is not None:
                screen.show(happening)
        seconds = screen.seconds
        settled = _settle(kind, directory, killed=len(kills.left) < len(victims))
    checkpoints: Checkpoints = []
    if kind is Kind.CHECKPOINTED:
        checkpoints = json.loads(directory.checkpoint_list.read_text("utf-8"))
    return RunOutcome(kind, settled, tally, seconds, checkpoints)


def _settle(kind: Kind, directory: RunDirectory, *, killed: bool) -> Ledger:
    expected = ledger.recount(prepared_files(directory.input))
    attempts: dict[str, Any] = {"max_attempts": MAX_ATTEMPTS}
    has_failed = Service(str(directory.service)).has_failed
    if kind is Kind.CHECKPOINTED:
        rows, letters = directory.sink_files(), directory.dead_lines_in_files()
        return ledger.settle_checkpointed(expected, rows, letters, has_failed=has_failed, **attempts)
    letters, changes = directory.dead_lines(), directory.hand_changes()
    if kind is Kind.QUERY:
        return ledger.settle_query(expected, directory.sink_batches(), letters, changes=changes, **attempts)
    failed: dict[str, Any] = {"has_failed": has_failed, "killed": killed}
    rows = directory.sink_files()
    return ledger.settle_tracked(expected, rows, letters, changes=changes, **failed, **attempts)


def _remove(root: Path) -> None:
    # A vertex that has just lost its driver may still be putting its store in order in there.
    shutil.rmtree(root, ignore_errors=True)


def _new_directory(path: Path | None) -> Path:
    if path is None:
        return Path(tempfile.mkdtemp(prefix="ftlayer-demo-"))
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"--dir: {path} is not empty; name a new directory for this run")
    except OSError as error:
        raise ConfigError(f"--dir: {path} cannot be used: {error.strerror}") from error
    return path
