"""The commands ``ftlayer checkpoints``: look at, check and remove what checkpointing has left in a directory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ftlayer.cli.connection import confirm
from ftlayer.cli.printing import new_table, print_json, print_long, size_text, time_text
from ftlayer.common.printable import printable, printing_console, shown_url
from ftlayer.common.secret_files import read_secret
from ftlayer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from ftlayer.checkpoint.snapshots import Checkpoint
    from ftlayer.checkpoint.storage.report import Facts
    from ftlayer.connectors.postgres.sink import RefusedRow

EXIT_DAMAGED = 1


class _ListsByDefault(TyperGroup):
    """``ftlayer checkpoints PATH`` is short for ``ftlayer checkpoints list PATH``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ListsByDefault,
    no_args_is_help=True,
    help="Checkpoints and savepoints: list, show, verify, delete, dispose, clean, refused. PATH is a path, or a URL "
    "that fsspec or --storage knows.",
)

Place = Annotated[
    str, typer.Argument(metavar="PATH", help="A directory with checkpoints somewhere below it.")
]
One = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint's or savepoint's directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: bytes, milliseconds, wall clock since 1970.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
_KEY = "File with the bytes of CheckpointConfig.key, if the job had one; else the kept key is used."
KeyFile = Annotated[Path | None, typer.Option(help=_KEY)]
Storage = Annotated[
    str,
    typer.Option(
        metavar="MODULE:CLASS",
        help="CheckpointConfig.storage of the job: what keeps URLs with the scheme of PATH, unless a package tells.",
    ),
]


@app.command("list")
def list_checkpoints(
    path: Place, as_json: Json = False, key_file: KeyFile = None, storage: Storage = ""
) -> None:
    """List the checkpoints and savepoints below PATH, the latest first."""
    from ftlayer.checkpoint.storage.loading import find_checkpoints, load_checkpoint, read_each
    from ftlayer.checkpoint.storage.report import summary

    key = _opened(path, storage, key_file)
    rows: list[Facts] = [
        {"location": shown_url(location), "error": str(found)}
        if isinstance(found, CheckpointError)
        else summary(found)
        for location, found in read_each(find_checkpoints(path), lambda each: load_checkpoint(each, key))
    ]
    if as_json:
        print_json(rows)
    else:
        _print_list(path, rows)


@app.command()
def show(path: One, as_json: Json = False, key_file: KeyFile = None, storage: Storage = "") -> None:
    """Show one: sizes by operator, durations by subtask, positions of the sources."""
    from ftlayer.checkpoint.storage.loading import load_checkpoint
    from ftlayer.checkpoint.storage.report import details

    facts = details(load_checkpoint(path, _opened(path, storage, key_file, one=True)))
    if as_json:
        print_json(facts)
    else:
        _print_details(facts)


@app.command()
def verify(path: Place, as_json: Json = False, key_file: KeyFile = None, storage: Storage = "") -> None:
    """Read everything that the checkpoints at or below PATH refer to. Exit code 1: something is damaged."""
    from ftlayer.checkpoint.storage import loading
    from ftlayer.checkpoint.storage.files import StoragePool

    key = _opened(path, storage, key_file)
    found = loading.find_checkpoints(loading.located(path))
    if not found:
        # Else a mistyped path would go unnoticed.
        raise ConfigError(loading.not_there(loading.located(path)))
    crew = StoragePool()

    def verified(location: str) -> Checkpoint:
        checkpoint = loading.load_checkpoint(location, key)
        loading.verify_checkpoint(checkpoint, key, crew)
        return checkpoint

    results: list[Facts] = [
        {"location": shown_url(location), "error": str(read) if isinstance(read, CheckpointError) else None}
        for location, read in loading.read_each(found, verified)
    ]
    crew.close()
    if as_json:
        print_json(results)
    else:
        for result in results:
            location, said = str(result["location"]), str(result["error"] or "good")
            # Most errors name the checkpoint by themselves.
            typer.echo(printable(said if location in said else f"{location}: {said}"))
    if any(result["error"] for result in results):
        raise typer.Exit(EXIT_DAMAGED)


@app.command()
def delete(path: One, yes: Yes = False, key_file: KeyFile = None, storage: Storage = "") -> None:
    """Delete a checkpoint of a job that is not running, with the files that no other one needs."""
    from ftlayer.checkpoint.storage.loading import delete_checkpoint

    key = _opened(path, storage, key_file, one=True)
    if not yes:
        confirm(f"Delete {_shown(path)} permanently? The job must not be running.")
    typer.echo(f"deleted {shown_url(delete_checkpoint(path, key))}")


@app.command()
def dispose(path: One, yes: Yes = False, storage: Storage = "") -> None:
    """Delete a savepoint."""
    from ftlayer.checkpoint.storage.loading import dispose_savepoint

    _opened(path, storage, one=True)
    if not yes:
        confirm(f"Delete the savepoint {_shown(path)} permanently?")
    typer.echo(f"disposed of {shown_url(dispose_savepoint(path))}")


@app.command()
def clean(path: Place, yes: Yes = False, key_file: KeyFile = None, storage: Storage = "") -> None:
    """Delete what drivers that were killed have left of the jobs at or below PATH, and no checkpoint needs.

    Exit code 1: a checkpoint of a job is damaged, so that it is not known what it needs.
    """
    from ftlayer.checkpoint.storage.keys import Ownership
    from ftlayer.checkpoint.storage.layout import last_name
    from ftlayer.checkpoint.storage.loading import job_above, job_directories, left_behind, remove_left

    key = _opened(path, storage, key_file)
    jobs = [(files, *left_behind(files, key)) for files in job_directories(path)]
    if not jobs:
        above = job_above(path)
        hint = "" if above is None else f": it is a part of the job at {shown_url(above)}; name that"
        raise ConfigError(f"{_shown(path)}: no job has its checkpoints here, nor below{hint}")
    for files, found, unknown in jobs:
        for name, size in sorted(found.items()):
            typer.echo(f"{size_text(size):>10}  {shown_url(f'{files.url}/{name}')}")
        for run, error in unknown.items():
            text = f"what {shown_url(files.url)}/{run} needs is not known, so all of it stays: {error}"
            typer.echo(printable(text), err=True)
    is_unknown = any(unknown for _, _, unknown in jobs)
    if any(found for _, found, _ in jobs):
        if not yes:
            confirm("Delete this permanently? A driver that still runs one of these jobs ends.")
        for files, found, _ in jobs:
            if found:
                # Behind the claim no driver of before publishes anything more; what one has just published is kept.
                Ownership(files, last_name(files.url), f"ftlayer checkpoints clean {shown_url(files.url)}")
                still, _ = left_behind(files, key)
                removed = sum(1 for _ in remove_left(files, sorted(found.keys() & still.keys())))
                typer.echo(f"deleted {removed:,} files of {shown_url(files.url)}")
    elif not is_unknown:
        typer.echo("nothing was left behind; files with names that ftlayer gives to none are not looked at")
    if is_unknown:
        raise typer.Exit(EXIT_DAMAGED)


@app.command()
def refused(
    path: One,
    dsn: Annotated[
        str, typer.Option(help="Of the PostgresSink; libpq takes a password from PGPASSWORD, too.")
    ],
    table: Annotated[str, typer.Option(help="Of the PostgresSink.")],
    name: Annotated[str, typer.Option(help="Of the PostgresSink, if it has one.")] = "",
    sink: Annotated[str, typer.Option(help="Its uid in the topology, if there are several.")] = "",
    drop: Annotated[bool, typer.Option("--drop", help="Remove the rows.")] = False,
    divert: Annotated[
        Path | None, typer.Option(help="Write the rows into this new file, as JSON lines, and remove them.")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
    key_file: KeyFile = None,
    storage: Storage = "",
) -> None:
    """Show the rows that a checkpoint has yet to commit and PostgreSQL refuses; drop or divert them.

    The job must not be running. Started again it commits all other rows.
    """
    from ftlayer.checkpoint.storage.keys import key_of
    from ftlayer.checkpoint.storage.layout import pieces_directory
    from ftlayer.checkpoint.storage.loading import load_checkpoint
    from ftlayer.connectors.postgres.sink import PostgresSink
    from ftlayer.runtime.protocol.messages import unseal

    if drop and divert is not None:
        raise ConfigError("--drop and --divert: give one of them")
    given = _opened(path, storage, key_file, one=True)
    checkpoint = load_checkpoint(path, given)
    written = [one for part in checkpoint.subtasks for one in part.committables if sink in ("", one.sink)]
    sinks = sorted({one.sink for one in written})
    if sink and not sinks:
        raise ConfigError(f"--sink: {_shown(path)} has no rows to be committed of a sink {sink!r}")
    if len(sinks) > 1:
        raise ConfigError(
            f"--sink: {_shown(path)} has rows to be committed of several: {', '.join(sinks)}; name one"
        )
    key = key_of(pieces_directory(checkpoint), given)
    is_to_go = drop or divert is not None
    facts: list[Facts] = []

    def take_out(rows: list[RefusedRow]) -> bool:
        if not is_to_go:
            return False
        if not yes:
            _print_rows(printing_console(), "refused", [_refused_facts(row) for row in rows])
            what = (
                f"{len(rows):,} rows of sink {sinks[0]!r} from what checkpoint {checkpoint.checkpoint} holds"
            )
            confirm(f"Remove {what}, for good? The job must not be running.")
        if divert is not None:
            lines = [f'{{"why": {json.dumps(row.why)}, "row": {row.values}}}\n' for row in rows]
            _write_new(divert, "".join(lines))
        return True

    if written:
        messages = [unseal(one.message, key) for one in written]
        facts = [*map(_refused_facts, PostgresSink(dsn, table, name=name).refused(messages, take_out))]
    if as_json:
        print_json(facts)
    elif not facts:
        typer.echo(printable(f"{_shown(path)}: no row that it has yet to commit to table {table} is refused"))
    elif is_to_go:
        where = "" if divert is None else f", which are in {divert} now"
        typer.echo(printable(f"removed {len(facts):,} rows{where}: the job commits all others"))
    else:
        _print_rows(printing_console(), "refused", facts)


def _write_new(path: Path, text: str) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"--divert: {path} cannot be written: {error.strerror}") from error


def _refused_facts(row: RefusedRow) -> Facts:
    return {"message": row.message, "number": row.row, "why": row.why, "row": json.loads(row.values)}


def _opened(path: str, storage: str, key_file: Path | None = None, *, one: bool = False) -> bytes | None:
    """Have ``storage`` keep what lies at ``path``, and return the job's key if it was given.

    Raises `ConfigError` where nothing is there; ``one`` checkpoint or savepoint is meant by the path then.
    """
    if storage:
        from ftlayer.checkpoint.custom_storage import serve

        if "" not in sys.path:  # A command finds no module beside it, as a program does.
            sys.path.insert(0, "")
        serve(storage, path, "--storage")
    from ftlayer.checkpoint.storage.files import open_files
    from ftlayer.checkpoint.storage.layout import METADATA
    from ftlayer.checkpoint.storage.loading import check_directory, located, not_there

    check_directory(path)
    if one and open_files(located(path)).size(METADATA) is None:
        raise ConfigError(not_there(located(path)))
    if key_file is None:
        return None
    from ftlayer.checkpoint.options import MIN_KEY_BYTES

    key = read_secret(key_file, "--key-file")
    if len(key) >= MIN_KEY_BYTES:
        return key
    raise ConfigError(
        f"--key-file: {key_file} has {len(key)} bytes, and CheckpointConfig.key {MIN_KEY_BYTES} or more"
    )


def _shown(path: str) -> str:
    from ftlayer.checkpoint.storage.layout import normal

    return shown_url(normal(path))


# ---------------------------------------------------------------- tables


def _print_list(path: str, rows: list[Facts]) -> None:
    console = printing_console()
    if not rows:
        console.print(f"{_shown(path)}: no checkpoints or savepoints", soft_wrap=True)
        return
    table = new_table("checkpoint", "kind", "job", "completed", "took", "state", "written", "location")
    for row in rows:
        if "error" in row:
            table.add_row("", "unreadable", "", "", "", "", "", row["location"], style="red")
            continue
        table.add_row(
            str(row["checkpoint"]),
            row["kind"] + (", unaligned" if row["unaligned"] else ""),
            row["job"],
            time_text(row["completed_ms"]),
            f"{row['duration_ms']:,} ms",
            size_text(row["state_bytes"]),
            size_text(row["written_bytes"]),
            row["location"],
        )
    print_long(console, table)
    for row in rows:
        if "error" in row:
            console.print(row["error"], style="red", soft_wrap=True)


def _print_details(facts: Facts) -> None:
    console = printing_console()
    console.print(f"{facts['kind']} {facts['checkpoint']} of {facts['job']}", style="bold")
    lines = {
        "location": facts["location"],
        "run": facts["run"],
        "completed": f"{time_text(facts['completed_ms'])}, after {facts['duration_ms']:,} ms",
        "state": f"{size_text(facts['state_bytes'])}, {size_text(facts['written_bytes'])} of it written anew",
        "key groups": str(facts["max_parallelism"]),
    }
    for name, value in lines.items():
        console.print(f"  {name:11}{value}", soft_wrap=True)
    _print_rows(console, "operators", facts["operators"])
    sizes = [
        {
            "chain": size["chain"],
            "keyed operators": ", ".join(size["keyed_operators"]),
            "keyed state": size_text(size["keyed_bytes"]),
            "entries": f"{size['keyed_entries']:,}",
            "operator state": ", ".join(
                f"{uid} {size_text(n)}" for uid, n in size["operator_state_bytes"].items()
            ),
            "in flight": f"{size['in_flight_records']:,} ({size_text(size['in_flight_bytes'])})",
            "to retry": f"{size['waiting_records']:,}",
        }
        for size in facts["sizes"]
    ]
    _print_rows(console, "sizes", sizes)
    durations = [
        {
            "subtask": f"{row['chain']}[{row['subtask']}]",
            **{name.replace("_", " "): f"{row[f'{name}_ms']:,} ms" for name in ("start_delay", "alignment")},
            **{name: f"{row[f'{name}_ms']:,.1f} ms" for name in ("sync", "async")},
            "in flight": size_text(row["in_flight_bytes"]),
            "unaligned": "yes" if row["unaligned"] else "",
        }
        for row in facts["subtasks"]
    ]
    _print_rows(console, "durations", durations)
    _print_rows(console, "positions", facts["positions"])
    _print_rows(console, "letters on their way", facts["letters"])
    _print_rows(console, "to be committed", facts["uncommitted"])


def _print_rows(console: Console, title: str, rows: list[Facts]) -> None:
    if not rows:
        return
    console.print(title, style="bold")
    table = new_table(*rows[0])
    for row in rows:
        cells = (
            each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in row.values()
        )
        table.add_row(*cells)
    print_long(console, table)
