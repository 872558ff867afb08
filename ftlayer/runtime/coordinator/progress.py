"""Following a job on the terminal: one live line, or plain lines where there is no terminal."""

from __future__ import annotations

import sys

from ftlayer.runtime.coordinator.job import Job

# A live line is drawn this often; plain lines are for logs, and come less often (s).
LIVE_S = 0.5
PLAIN_S = 10.0


def follow(job: Job) -> Job:
    """Show progress until the job is over; Ctrl-C cancels it. Raises what the job fails with."""
    try:
        if sys.stderr.isatty():
            _live(job)
        else:
            _plain(job)
    except KeyboardInterrupt:
        job.cancel()
    job.wait()
    return job


def _live(job: Job) -> None:
    from rich.console import Console
    from rich.status import Status

    # Stopped before the error of a failed job is raised, or it would be drawn over.
    with Status("starting", console=Console(stderr=True)) as line:
        while not job.over(LIVE_S):
            line.update(job.status().line())
    _print(job)


def _plain(job: Job) -> None:
    while not job.over(PLAIN_S):
        _print(job)
    _print(job)


def _print(job: Job) -> None:
    print(job.status().line(), file=sys.stderr, flush=True)
