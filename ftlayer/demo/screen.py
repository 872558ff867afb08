"""The screen of the demo: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ftlayer.demo.events import BatchDone, Finished, Progress, Restarted, Started, Starting
from ftlayer.demo.supervisor import BackAgain, Happening, Killed, WentOn
from ftlayer.demo.tally import Tally
from ftlayer.printable import printable

REFRESHES_A_SECOND = 8
KEPT_EVENTS = 10
PLAIN_EVERY_S = 3.0
"""Without a terminal, one line of progress in so many seconds at most."""


class Screen:
    """Shows happenings. Use it as a context; `show` is for what happens, `idle` for when nothing does."""

    def __init__(self, console: Console, tally: Tally, explanation: str, lines: int) -> None:
        """Say what is about to happen to so many ``lines``."""
        self._tally = tally
        self._console = console
        self._lines = lines
        self._since = time.monotonic()
        self._state = "starting"
        self._starting = ""
        self._starting_since = self._since
        self._events: deque[Text] = deque(maxlen=KEPT_EVENTS)
        self._said_at = 0.0
        self._live: Live | None = None
        console.print(Panel(Text(explanation), title="ftlayer demo", padding=(1, 2)))
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
        self._tally.count(happening)
        match happening:
            case Starting(what):
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
            case Restarted():
                self._say(
                    f"the query failed and was started again: {_last_line(happening.failure)}", "yellow"
                )
            case BatchDone():
                if happening.again:
                    self._say(
                        f"batch {happening.batch} was taken up where its driver left it, and written over",
                        "green",
                    )
                self._show_progress()
            case Progress():
                self._show_progress()
            case Finished():
                self._state = "done; now counting"

    def _show_progress(self) -> None:
        if self._tally.seen >= self._lines and self._tally.waiting:
            self._state = "all input read; replaying what waits"
        if self._live is None and time.monotonic() - self._said_at >= PLAIN_EVERY_S:
            self._said_at = time.monotonic()
            self._console.print(f"[{self.seconds:5.1f} s] {self._tally.sentence()}", soft_wrap=True)

    def _say_started(self) -> None:
        """Say how long it took to start what was being started."""
        if self._starting:
            took = time.monotonic() - self._starting_since
            self._say(f"{self._starting} started in {took:.1f} s", "dim")
            self._starting = ""

    def _say(self, sentence: str, style: str) -> None:
        line = Text(
            printable(f"[{self.seconds:5.1f} s] {sentence}"), style=style, no_wrap=True, overflow="ellipsis"
        )
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


def _last_line(failure: str) -> str:
    """Return the line of a failure that names it: the last one, where there is a traceback of Python's."""
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
