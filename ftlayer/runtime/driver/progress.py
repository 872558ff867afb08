"""Following a job: one live line in a terminal or a notebook, plain lines where there is neither."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol

from ftlayer.notebook import NotebookLine, in_notebook
from ftlayer.printable import printable
from ftlayer.runtime.driver.job import Job

# A live line is drawn this often; plain lines are for logs, and come less often (s).
LIVE_S = 0.5
PLAIN_S = 10.0


class Line(Protocol):
    """Where the progress of a job is shown."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, text: str) -> None:
        """Show where the job is now."""


class PlainLines:
    """A line of stderr each time."""

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def show(self, text: str) -> None:
        """Print ``text``."""
        print(printable(text), file=sys.stderr, flush=True)


class TerminalLine:
    """The last line of a terminal, drawn again; on leaving, the last text stays as a line of its own."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.status import Status
        from rich.text import Text

        self._to_text = Text
        self._status = Status("starting", console=Console(stderr=True))
        self._last = ""

    def __enter__(self) -> TerminalLine:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Stopped before the error of a failed job is raised, or it would be drawn over.
        self._status.stop()
        if self._last:
            print(self._last, file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """Draw ``text``, as it is: brackets in it are no markup."""
        self._last = printable(text)
        self._status.update(self._to_text(self._last))


def follow(job: Job, line: Line | None = None) -> Job:
    """Show progress until the job is over, and how it ended. Raises what the job fails with.

    Ctrl-C, or the interrupt of a notebook's cell, cancels the job and is raised again, without the frames of where it
    met this thread.
    """
    try:
        _follow(job, line or _line())
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None
    job.wait()
    return job


def _follow(job: Job, line: Line) -> None:
    every_s = PLAIN_S if isinstance(line, PlainLines) else LIVE_S
    with line:
        try:
            while not job.over(every_s):
                line.show(job.status().line())
        except KeyboardInterrupt:
            job.interrupt()
            line.show(job.status().line())
            raise
        line.show(job.status().line())


def hide_spark_bar(spark: Any) -> None:
    """End the session's progress bar, which draws over ours: to it slots are stages that never come to their end."""
    context = getattr(spark, "_sc", None)  # over Spark Connect there is none
    if context is None:
        return
    bar = context._jsc.sc().progressBar()
    if bar.isDefined():
        bar.get().stop()


def _line() -> Line:
    if in_notebook():
        return NotebookLine()
    return TerminalLine() if sys.stderr.isatty() else PlainLines()
