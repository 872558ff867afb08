"""The demo from beginning to end."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ftlayer.demo.browser import in_browser
from ftlayer.demo.choices import Engine, Kill, Kind, Mode, doomed, kind_of
from ftlayer.demo.functions import Service
from ftlayer.demo.kills import KillPlan
from ftlayer.demo.layout import MAX_ATTEMPTS, RunDirectory
from ftlayer.demo.ledger import Ledger, recount, settle_checkpointed, settle_query, settle_tracked
from ftlayer.demo.report import Checkpoints, RunOutcome, as_json, print_next, print_outcome
from ftlayer.demo.screen import Screen
from ftlayer.demo.supervisor import Supervisor
from ftlayer.demo.tally import BatchTally, Tally, TopologyTally
from ftlayer.demo.text import prepare, prepared_files
from ftlayer.demo.wording import explanation
from ftlayer.errors import ConfigError

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
        ledger = _settle(kind, directory, killed=len(kills.left) < len(victims))
    checkpoints: Checkpoints = []
    if kind is Kind.CHECKPOINTED:
        checkpoints = json.loads(directory.checkpoint_list.read_text("utf-8"))
    return RunOutcome(kind, ledger, tally, seconds, checkpoints)


def _settle(kind: Kind, directory: RunDirectory, *, killed: bool) -> Ledger:
    expected = recount(prepared_files(directory.input))
    match kind:
        case Kind.QUERY:
            return settle_query(
                expected,
                directory.sink_batches(),
                directory.dead_lines(),
                max_attempts=MAX_ATTEMPTS,
                changes=directory.hand_changes(),
            )
        case Kind.TRACKED:
            return settle_tracked(
                expected,
                directory.sink_files(),
                directory.dead_lines(),
                max_attempts=MAX_ATTEMPTS,
                changes=directory.hand_changes(),
                has_failed=Service(str(directory.service)).has_failed,
                killed=killed,
            )
        case Kind.CHECKPOINTED:
            return settle_checkpointed(
                expected,
                directory.sink_files(),
                directory.dead_lines_in_files(),
                max_attempts=MAX_ATTEMPTS,
                has_failed=Service(str(directory.service)).has_failed,
            )


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
