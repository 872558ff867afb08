"""What a user of the demo sees while it runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ftlayer.demo.events import BatchDone, Finished, Restarted, Started
from ftlayer.demo.kills import Kill
from ftlayer.demo.layout import MAX_ATTEMPTS
from ftlayer.demo.supervisor import BackAgain, Happening, Killed, WentOn
from ftlayer.demo.tally import Tally
from ftlayer.demo.text import Prepared

REFRESHES_A_SECOND = 8
KEPT_EVENTS = 10
PLAIN_EVERY_S = 3.0
"""Without a terminal, one line of progress in so many seconds at most."""


def explanation(prepared: Prepared, kill: Kill) -> str:
    """Say what is about to happen."""
    lines = [
        f"{prepared.lines:,} lines of text ({prepared.title}, {prepared.sources} files) go through an ordinary "
        f"PySpark streaming query on two cores, in {prepared.batches} micro-batches: parse → enrich → key_by → sink. "
        "ftlayer is wrapped around it.",
        "• Some lines cannot be parsed. Plain Spark would fail the task, then the query, and do so again after "
        f"each restart. Here such a line fails alone: it is tried {MAX_ATTEMPTS} times, then kept as a dead letter.",
        "• The enrichment service does not answer now and then. Just the line concerned is tried again.",
    ]
    vertex, driver = (
        "the ftlayer vertex (the process that stores what failed)",
        "the driver with all of Spark",
    )
    doomed = {
        Kill.NONE: "",
        Kill.VERTEX: f"{vertex} is",
        Kill.DRIVER: f"{driver} is",
        Kill.ALL: f"first {vertex}, then {driver} is",
    }[kill]
    if doomed:
        lines.append(f"• In the middle of a batch {doomed} killed with SIGKILL. The run goes on by itself.")
    lines.append("At the end every line is looked up in the sink and held against a recount without Spark.")
    return "\n".join(lines)


class Screen:
    """Shows happenings. Use it as a context; `show` is for what happens, `idle` for when nothing does."""

    def __init__(self, console: Console, prepared: Prepared, kill: Kill) -> None:
        self.tally = Tally()
        self._console = console
        self._prepared = prepared
        self._since = time.monotonic()
        self._state = "starting Spark and the vertex"
        self._events: deque[Text] = deque(maxlen=KEPT_EVENTS)
        self._said_at = 0.0
        self._live: Live | None = None
        console.print(Panel(Text(explanation(prepared, kill)), title="ftlayer demo", padding=(1, 2)))
        if console.is_terminal:
            self._live = Live(
                console=console, refresh_per_second=REFRESHES_A_SECOND, get_renderable=self._table
            )

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self._since

    def show(self, happening: Happening) -> None:
        """Show what happened."""
        self.tally.count(happening)
        match happening:
            case Started():
                self._state = "running"
            case Killed():
                if happening.victim == "driver":
                    self._state = "starting Spark again"
                self._say(
                    f"{happening.victim} killed (SIGKILL) while batch {happening.batch} was written",
                    "bold red",
                )
            case BackAgain():
                self._say(f"{happening.victim} is back after {happening.seconds:.1f} s", "green")
            case WentOn():
                self._say(f"the next batch was through {happening.seconds:.1f} s after that kill", "green")
            case Restarted():
                self._say(
                    f"the query failed and was started again: {_last_line(happening.failure)}", "yellow"
                )
            case BatchDone():
                self._show_batch(happening)
            case Finished():
                self._state = "done; now counting"

    def _show_batch(self, batch: BatchDone) -> None:
        if batch.again:
            self._say(f"batch {batch.batch} was taken up where its driver left it, and written over", "green")
        if self.tally.seen >= self._prepared.lines and self.tally.waiting:
            self._state = "all input read; replaying what waits"
        if self._live is None and time.monotonic() - self._said_at >= PLAIN_EVERY_S:
            self._said_at = time.monotonic()
            tally = self.tally
            self._console.print(
                f"[{self.seconds:5.1f} s] batch {batch.batch}: {tally.seen:,} lines read, {tally.done:,} done, "
                f"{tally.retried:,} retried, {tally.waiting:,} waiting, {tally.dead:,} dead letters",
                soft_wrap=True,
            )

    def _say(self, sentence: str, style: str) -> None:
        line = Text(f"[{self.seconds:5.1f} s] {sentence}", style=style, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._events.append(line)

    def _table(self) -> Group:
        tally = self.tally
        figures = Table(box=None, padding=(0, 3, 0, 0))
        for heading in ("batches", "lines/s", "read", "done", "retried", "waiting", "dead letters"):
            figures.add_column(heading, justify="right", min_width=8)
        figures.add_row(
            str(tally.batches),
            f"{tally.lines_per_second:,.0f}",
            f"{tally.seen:,}",
            f"{tally.done:,}",
            f"{tally.retried:,}",
            f"{tally.waiting:,}",
            f"{tally.dead:,}",
        )
        bar = ProgressBar(total=self._prepared.lines, completed=min(tally.seen, self._prepared.lines))
        state = Text(f"{self.seconds:5.0f} s  {self._state}", style="bold")
        return Group(state, bar, figures, *self._events)


def _last_line(failure: str) -> str:
    """Return the line of a failure that names it: the last one, where there is a traceback of Python's."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
