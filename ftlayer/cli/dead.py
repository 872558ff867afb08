"""The commands ``ftlayer dead``: list, show, requeue and purge the dead letters of a running vertex."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftlayer.cli.connection import EXIT_ERROR, Asking, asking
from ftlayer.errors import ConfigError
from ftlayer.printable import printing_console

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Client, Gatherer
    from ftlayer.vertex.calls import RecordInfo

PAGE = 1_000

app = typer.Typer(no_args_is_help=True, help="Dead letters of a running vertex: list, show, requeue, purge.")

Keys = Annotated[list[str], typer.Argument(help="Keys as `ftlayer dead list` shows them.")]
Everything = Annotated[bool, typer.Option("--all", help="All dead letters there are.")]


@app.command("list")
@asking
def list_dead(
    limit: Annotated[int, typer.Option(min=1, help="How many to list at most.")] = 20,
    *,
    asking: Asking,
) -> None:
    """List dead letters: key, record, reason."""
    from ftlayer.cli.tables import print_records
    from ftlayer.vertex.calls import Stats, StatsReply

    with asking.gatherer() as gatherer:
        client = _client(gatherer)

        def total() -> int:
            stats = client.call(Stats())
            assert isinstance(stats, StatsReply)
            return int(stats.values["dead_letters"])

        print_records(printing_console(), _dead_letters(client), "dead letters", limit, total)


@app.command()
@asking
def show(
    keys: Keys,
    *,
    asking: Asking,
) -> None:
    """Show everything that is known of dead letters: record, attempts, traceback."""
    from ftlayer.cli.tables import print_record

    wanted = dict.fromkeys(_parsed(keys))
    console = printing_console()
    with asking.gatherer() as gatherer:
        client = _client(gatherer)
        for record in _dead_letters(client):
            if record.key in wanted:
                del wanted[record.key]
                print_record(console, record)
    for key in wanted:
        typer.echo(f"ftlayer: there is no dead letter {key.hex()}", err=True)
    if wanted:
        raise typer.Exit(EXIT_ERROR)


@app.command()
@asking
def requeue(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys as `ftlayer dead list` shows them.")] = None,
    everything: Everything = False,
    *,
    asking: Asking,
) -> None:
    """Give dead letters their attempts back; their query gets them again at once."""
    from ftlayer.vertex.calls import Requeue

    with asking.gatherer() as gatherer:
        client = _client(gatherer)
        chosen = _chosen(client, keys, everything)
        count = _change(client, Requeue(chosen))
    _print_changed("requeued", count, len(chosen), everything)


@app.command()
@asking
def purge(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys as `ftlayer dead list` shows them.")] = None,
    everything: Everything = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    asking: Asking,
) -> None:
    """Delete dead letters permanently."""
    from ftlayer.vertex.calls import Purge

    with asking.gatherer() as gatherer:
        client = _client(gatherer)
        chosen = _chosen(client, keys, everything)
        if chosen and not yes:
            typer.confirm(f"Delete {len(chosen)} dead letters permanently?", abort=True)
        count = _change(client, Purge(chosen))
    _print_changed("purged", count, len(chosen), everything)


def _client(gatherer: Gatherer) -> Client:
    """Return the client of the one vertex that is asked; `ConfigError` where there are several."""
    there = [view.vertex for view in gatherer.views() if view.is_up and view.has_records]
    if len(there) != 1:
        raise ConfigError(
            f"--vertex: name one of the vertices that keep records: {', '.join(there) or 'there are none'}"
        )
    return gatherer.client(there[0])


def _dead_letters(client: Client) -> Iterator[RecordInfo]:
    from ftlayer.vertex.calls import ListRecords, RecordList

    after = b""
    while True:
        reply = client.call(ListRecords("dead", "", PAGE, after))
        assert isinstance(reply, RecordList)
        yield from reply.records
        after = reply.more
        if not after:
            return


def _parsed(keys: list[str]) -> tuple[bytes, ...]:
    try:
        return tuple(bytes.fromhex(key) for key in keys)
    except ValueError as error:
        raise ConfigError(f"keys are hexadecimal, as `ftlayer dead list` shows them ({error})") from error


def _chosen(client: Client, keys: list[str] | None, everything: bool) -> tuple[bytes, ...]:
    if bool(keys) == everything:
        raise ConfigError("name the dead letters by their keys, or say --all")
    if keys:
        return tuple(dict.fromkeys(_parsed(keys)))
    return tuple(record.key for record in _dead_letters(client))


def _change(client: Client, call: Any) -> int:
    from ftlayer.vertex.calls import Changed

    reply = client.call(call)
    assert isinstance(reply, Changed)
    return reply.count


def _print_changed(what: str, count: int, chosen: int, everything: bool) -> None:
    """Say how many dead letters were changed; exit code 1 if keys that were named are of none.

    With ``--all`` those that are missing were there a moment ago: another command has changed them meanwhile.
    """
    typer.echo(f"{what} {count} of {chosen}")
    missing = chosen - count
    if missing and not everything:
        typer.echo(
            f"ftlayer: {missing} of the keys {'is' if missing == 1 else 'are'} of no dead letter (now): "
            "`ftlayer dead list` shows those there are",
            err=True,
        )
        raise typer.Exit(EXIT_ERROR)
