"""The demo from beginning to end."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ftlayer.demo.kills import Kill, KillPlan
from ftlayer.demo.layout import MAX_ATTEMPTS, RunDirectory
from ftlayer.demo.ledger import Ledger, recount, settle
from ftlayer.demo.report import as_json, print_ledger, print_next
from ftlayer.demo.screen import Screen
from ftlayer.demo.supervisor import Supervisor
from ftlayer.demo.tally import Tally
from ftlayer.demo.text import prepare, prepared_files
from ftlayer.errors import ConfigError

EXIT_BALANCED = 0
EXIT_UNBALANCED = 3


@dataclass(frozen=True)
class DemoOptions:
    """What the command line says. ``directory`` None: a temporary one, removed at the end unless ``keep``."""

    pattern: str | None = None
    kill: Kill = Kill.ALL
    lines: int = 200_000
    batches: int = 20
    directory: Path | None = None
    keep: bool = False
    json_path: Path | None = None


def run_demo(options: DemoOptions, console: Console) -> int:
    """Run the demo; return 0 when the ledger balances, 3 when it does not.

    The run's directory is kept when anything goes wrong. Raises `ConfigError` for options that make no sense
    and `QueryError` when the driver fails by itself.
    """
    root = _new_directory(options.directory)
    kept = options.keep or options.directory is not None
    directory = RunDirectory(root)
    try:
        run = _run(options, directory, console)
    except (ConfigError, KeyboardInterrupt):
        if not kept:
            _remove(root)
        raise
    except BaseException:
        console.print(f"The run's directory is kept: {root}", soft_wrap=True)
        raise
    kept = kept or not run.ledger.balanced
    print_ledger(console, run.ledger, run.tally, run.seconds)
    print_next(console, directory, kept=kept)
    if options.json_path is not None:
        values = as_json(run.ledger, run.tally, run.seconds, root if kept else None)
        options.json_path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
    if not kept:
        _remove(root)
    return EXIT_BALANCED if run.ledger.balanced else EXIT_UNBALANCED


@dataclass(frozen=True)
class _Run:
    ledger: Ledger
    tally: Tally
    seconds: float


def _run(options: DemoOptions, directory: RunDirectory, console: Console) -> _Run:
    prepared = prepare(options.pattern, directory.input, max_lines=options.lines, batches=options.batches)
    kills = KillPlan.of(options.kill, prepared.batches)
    directory.service.mkdir()
    with Screen(console, prepared, options.kill) as screen, Supervisor(directory, kills) as supervisor:
        for happening in supervisor.happenings():
            if happening is not None:
                screen.show(happening)
        seconds = screen.seconds
        expected = recount(prepared_files(directory.input))
        ledger = settle(
            expected, directory.sink_batches(), directory.dead_letters(), max_attempts=MAX_ATTEMPTS
        )
    return _Run(ledger, screen.tally, seconds)


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
