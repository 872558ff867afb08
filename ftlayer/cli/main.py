"""The command ``ftlayer``. Everything but the command line itself is imported when it is needed."""

from __future__ import annotations

import os
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ftlayer import __version__
from ftlayer.cli import checkpoints as cli_checkpoints
from ftlayer.cli import console as cli_console
from ftlayer.cli import dead as cli_dead
from ftlayer.cli import health as cli_health
from ftlayer.cli import jobs as cli_jobs
from ftlayer.cli import new as cli_new
from ftlayer.cli import orders as cli_orders
from ftlayer.cli import pending as cli_pending
from ftlayer.cli import top as cli_top
from ftlayer.cli.connection import EXIT_ERROR, Asking, Json, TokenFile, asking, read_file, token_of
from ftlayer.demo.choices import Engine, Kill, Mode
from ftlayer.errors import ConfigError, FTLayerError, UnauthorizedError, VertexUnavailableError
from ftlayer.printable import printable, printing_console
from ftlayer.secret_files import read_secret

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer
    from ftlayer.vertex.calls import Explained

EXIT_USAGE = 2

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


_ANYWHERE = {
    "tls_cert": "--tls-cert",
    "tls_key": "--tls-key",
    "tls_client_ca": "--tls-client-ca",
    "metrics_port": "--metrics-port",
    "otlp_endpoint": "--otlp",
    "max_store_bytes": "--max-store",
    "persist_timeout_ms": "--persist-timeout",
    "root_certs": "--root-certs",
    "client_pem": "--client-pem",
    "login_file": "--login-file",
}
_IN_FRONT = {
    "listen": "--listen",
    "shards": "--shards",
    "durability": "--durability",
    "address": "--vertex",
    "token": "--token-file (or FTLAYER_TOKEN)",
}
"""How options of Python are called here; those in front are words of other meanings too."""


def _in_words_of_options(error: FTLayerError) -> str:
    """Return an error's text with the options of the command line in place of Python's."""
    if isinstance(error, UnauthorizedError):
        return (
            "the vertex does not take the token: give the one that it was started with, by --token-file or "
            "FTLAYER_TOKEN"
        )
    text = str(error)
    if not isinstance(error, ConfigError | VertexUnavailableError):
        return text
    text = re.sub(r"\b(\w+_\w+)\b", lambda found: _ANYWHERE.get(found[1], found[1]), text)
    return re.sub(r"^(\w+)(?=:)", lambda found: _IN_FRONT.get(found[1], found[1]), text)


class _CommandGroup(TyperGroup):
    """Prints ftlayer's own errors as what they say, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FTLayerError as error:
            typer.echo(printable(f"ftlayer: {_in_words_of_options(error)}"), err=True)
            raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR) from error


app = typer.Typer(
    cls=_CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Record-level fault tolerance for PySpark streams.",
)
app.command()(cli_new.new)
app.command()(cli_jobs.jobs)
app.command()(cli_top.top)
app.command()(cli_pending.pending)
for order in (
    cli_orders.savepoint,
    cli_orders.stop,
    cli_orders.drain,
    cli_orders.cancel,
    cli_orders.stack,
):
    app.command()(order)
app.add_typer(cli_dead.app, name="dead")
app.add_typer(cli_checkpoints.app, name="checkpoints")
app.command()(cli_console.console)
app.command()(cli_health.health)


class RecordState(StrEnum):
    """The values of ``inspect --list``."""

    PENDING = "pending"
    WAITING = "waiting"
    DELIVERY = "delivery"
    DEAD = "dead"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ftlayer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print ftlayer's version and exit."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def version(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print what a report of a bug needs: versions of ftlayer and of all that it runs on."""
    from ftlayer.cli.printing import print_json
    from ftlayer.cli.version import all_facts, as_text

    facts = all_facts()
    if json:
        print_json(facts)
    else:
        typer.echo(printable(as_text(facts)))


@app.command()
def demo(
    input: Annotated[
        str | None, typer.Option(help="Files to read, a GLOB in quotes; without it, Python's own sources.")
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="acker: every record is followed. barrier: checkpoints of all state.")
    ] = Mode.ACKER,
    engine: Annotated[
        Engine | None, typer.Option(help="What runs it; acker: microbatch by default, barrier: continuous.")
    ] = None,
    kill: Annotated[Kill, typer.Option(help="What is killed with SIGKILL in the middle.")] = Kill.ALL,
    lines: Annotated[int, typer.Option(min=100, help="How many lines to read at most.")] = 200_000,
    batches: Annotated[
        int, typer.Option(min=4, max=1_000, help="In how many micro-batches; continuous: seconds of input.")
    ] = 20,
    dir: Annotated[Path | None, typer.Option(help="Directory of the run, new or empty; it is kept.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the run's temporary directory.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the ledger to this file too.")] = None,
    console: Annotated[
        bool, typer.Option("--console", help="Show it in a browser too; prints a link.")
    ] = False,
) -> None:
    """Run a query or a topology over real text, kill it in the middle, and account for every line.

    Exit code 0: the ledger balances. 3: it does not.
    """
    from ftlayer.java.machine import ensure_java

    ensure_java()
    from ftlayer.demo.run import DemoOptions, run_demo

    options = DemoOptions(input, kill, lines, batches, dir, keep, json, mode, engine, console)
    raise typer.Exit(run_demo(options, printing_console()))


@app.command()
def serve(
    path: Annotated[Path, typer.Argument(help="Directory of the store; made if it is missing.")],
    listen: Annotated[
        str, typer.Option(help="host:port; port 0 is any free one. Or unix:/path.")
    ] = "127.0.0.1:7077",
    token_file: TokenFile = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM of the certificate chain; required off loopback.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM of its private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM of what clients' certificates are signed by; they then need one.")
    ] = None,
    shards: Annotated[int, typer.Option(help="A power of two; fixed when the store is made.")] = 1,
    durability: Annotated[
        str,
        typer.Option(help='"batch", a duration like "100ms", or "none"; see docs/guarantees/durability.md.'),
    ] = "batch",
    max_store: Annotated[
        str,
        typer.Option(
            help="How large the store may become, like 8GiB; GB is the same: units are powers of 1,024."
        ),
    ] = "8GiB",
    persist_timeout: Annotated[
        str, typer.Option(help="How long intake waits for room before it fails, like 30s; below 120s.")
    ] = "60s",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the HTTP endpoint: /metrics for Prometheus, /livez and /readyz for probes."
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(
            help="URL of an OpenTelemetry collector, like http://localhost:4318; without it as "
            "OTEL_EXPORTER_OTLP_ENDPOINT and the other variables say. Needs ftlayer[otel]."
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep every id, for `ftlayer explain`; some hundred times slower.")
    ] = False,
) -> None:
    """Run a vertex of its own, for queries that say FTLayer.connect."""
    import faulthandler
    import logging

    from ftlayer.checks import duration_ms
    from ftlayer.config import ServeOptions, VertexOptions
    from ftlayer.transport.systemd import Notifier
    from ftlayer.vertex.service.serve import serve as run

    # systemd's watchdog ends with SIGABRT what has hung: the log then shows where.
    faulthandler.enable(file=2)
    vertex = VertexOptions(
        path,
        shards=shards,
        durability=durability,
        max_store_bytes=parse_size(max_store, "--max-store"),
        persist_timeout_ms=duration_ms(persist_timeout, "--persist-timeout"),
        tracker="exact" if exact else "table",
        metrics_port=metrics_port,
        otlp_endpoint=otlp,
    )
    options = ServeOptions(
        vertex,
        token_of(token_file),
        listen,
        None if tls_cert is None else read_file(tls_cert, "--tls-cert"),
        None if tls_key is None else read_secret(tls_key, "--tls-key"),
        None if tls_client_ca is None else read_file(tls_client_ca, "--tls-client-ca"),
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    code = run(
        options,
        on_ready=lambda address: typer.echo(f"ftlayer vertex at {address}, store {path}"),
        notifier=Notifier.of(os.environ),
    )
    logging.shutdown()
    sys.stdout.flush()
    # Streams that clients have open keep threads busy that an ordinary exit would wait for.
    os._exit(code)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Directory of a vertex's store.")],
    list_state: Annotated[
        RecordState | None,
        typer.Option("--list", help="List the records in this state, not just their number."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many to list at most.")] = 20,
    tables: Annotated[bool, typer.Option("--tables", help="Show the tables of the store too.")] = False,
    as_json: Json = False,
) -> None:
    """Look into a store, without a vertex or beside a live one; changes nothing."""
    from ftlayer.cli.offline import inspect_vertex, stored_records
    from ftlayer.cli.printing import print_json
    from ftlayer.cli.tables import listed_facts, print_records, print_shards, shard_facts

    console = printing_console()
    if list_state is not None:
        records = stored_records(path, list_state)
        if as_json:
            print_json(listed_facts(path, records, limit))
        else:
            print_records(console, path, records, f"{list_state} in {path}", limit)
    elif as_json:
        print_json(shard_facts(path, inspect_vertex(path)))
    else:
        print_shards(console, path, inspect_vertex(path), tables=tables)


@app.command()
@asking
def explain(
    root: Annotated[str, typer.Argument(help="The root: 16 hexadecimal digits, 0x…, or a decimal number.")],
    *,
    asking: Asking,
) -> None:
    """Show which ids a pending root waits for, and which operator owes them (vertices with --exact)."""
    from ftlayer.cli.printing import print_json
    from ftlayer.cli.tables import print_explained
    from ftlayer.monitor.facts import explained_facts
    from ftlayer.vertex.calls import Explained

    wanted = parse_root(root)
    with asking.gatherer() as gatherer:
        answers = [
            _explained(gatherer, view.vertex, wanted)
            for view in gatherer.views()
            if view.is_up and view.has_records
        ]
    explained = next((answer for answer in answers if answer.known), Explained(known=False))
    if asking.as_json:
        print_json(explained_facts(wanted, explained))
    else:
        print_explained(printing_console(), wanted, explained)
    if not explained.known:
        raise typer.Exit(EXIT_ERROR)


def _explained(gatherer: Gatherer, vertex: str, root: int) -> Explained:
    from ftlayer.vertex.calls import Explain, Explained

    answer = gatherer.client(vertex).call(Explain(root))
    assert isinstance(answer, Explained)
    return answer


def main() -> None:
    """Run the command line."""
    app()


def parse_size(text: str, option: str) -> int:
    """Return bytes for ``"512MiB"``, ``"8G"`` or a number; units are powers of 1024. `ConfigError` otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option}: expected a size like '512MiB' or '8GiB', got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


def parse_root(text: str) -> int:
    """Return the id written as 16 hexadecimal digits, ``0x…`` or a decimal number. `ConfigError` otherwise."""
    hexadecimal = len(text) == 16 or text[:2] in ("0x", "0X")
    try:
        root = int(text, 16 if hexadecimal else 10)
    except ValueError:
        root = 0
    if not 0 < root < 1 << 64:
        raise ConfigError(
            f"ROOT: expected an id as 16 hexadecimal digits, 0x… or a decimal number, got {text!r}"
        )
    return root


if __name__ == "__main__":
    main()
