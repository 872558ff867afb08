"""The command ``ftlayer``. Everything but the command line itself is imported when it is needed."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from typer.core import TyperGroup

from ftlayer import __version__, errors
from ftlayer.cli import checkpoints as cli_checkpoints
from ftlayer.cli import connection, records
from ftlayer.cli import dead as cli_dead
from ftlayer.cli import jobs as cli_jobs
from ftlayer.cli import new as cli_new
from ftlayer.cli import top as cli_top
from ftlayer.cli.connection import EXIT_ERROR, Asking, asking, warn
from ftlayer.cli.demo.choices import Engine, Kill, Mode
from ftlayer.cli.jobs import JobName
from ftlayer.cli.printing import Wide, new_table, print_json, print_table
from ftlayer.common.clock import system_now
from ftlayer.common.printable import printable, printing_console, shown_url
from ftlayer.common.secret_files import read_file, read_secret
from ftlayer.errors import ConfigError, FTLayerError

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer, StoredReports
    from ftlayer.monitor.rules.names import JobKey, VertexView
    from ftlayer.monitor.rules.plans import Search
    from ftlayer.monitor.sources import VertexSource
    from ftlayer.vertex.calls import JobOrder, OrderRecord


TlsCert = Annotated[Path | None, typer.Option(help="PEM of the certificate chain; required off loopback.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM of its private key.")]


def console(
    vertex: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|ADDRESS",
            help="A vertex to show: its address, or the store of a program of yours that runs; repeatable. Without it, "
            "all that programs of yours serve on this machine.",
        ),
    ] = None,
    token_file: connection.TokenFile = None,
    root_certs: connection.RootCerts = None,
    client_pem: connection.ClientPem = None,
    listen: Annotated[
        str, typer.Option(help="host:port; port 0 is any free one. Or unix:/path.")
    ] = "127.0.0.1:7080",
    login_file: Annotated[
        Path | None,
        typer.Option(
            help="Who may log in, a line 'operator|reader NAME TOKEN' a user; required off loopback. Without it, a "
            "token is drawn for one operator, and a link printed."
        ),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM of what browsers' certificates are signed by; they then need one."),
    ] = None,
    checkpoints: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A directory whose checkpoints are listed, with what their drivers have said last; repeatable.",
        ),
    ] = None,
    mask_payloads: Annotated[
        bool, typer.Option("--mask-payloads", help="Show types and lengths in place of what records hold.")
    ] = False,
    edit_with: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that operators may edit many dead letters by, as `ftlayer dead edit --with` does; "
            "repeatable. No other is called.",
        ),
    ] = None,
) -> None:
    """Show queries, topologies, vertices and records in a browser, and mend them from there."""
    import logging

    # gRPC's log is on stderr, a line an attempt; the console says the same. Read when gRPC loads.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ftlayer.monitor.console.options import ConsoleOptions, check_extra

    check_extra()
    from ftlayer.monitor.console.serve import serve
    from ftlayer.transport.sockets import Notifier

    given = tuple(checkpoints or ()), tuple(edit_with or ())
    options = ConsoleOptions(listen, login_file, tls_cert, tls_key, tls_client_ca, mask_payloads, *given)
    sys.path.append(os.getcwd())  # last: it hides nothing
    look = _look(Asking(vertex, token_file, root_certs, client_pem, None, False), checkpoints or ())
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)

    def on_ready(link: str) -> None:
        typer.echo(f"ftlayer console at {link}")

    serve(options, look, on_ready=on_ready, notifier=Notifier.of(os.environ))


def _look(asking: Asking, checkpoints: Sequence[str]) -> Callable[[], Sequence[VertexSource | StoredReports]]:
    from ftlayer.monitor.gather import StoredReports
    from ftlayer.monitor.sources import sources_here

    stored = [StoredReports(url) for url in checkpoints]
    if not asking.vertex:
        return lambda: [*sources_here().sources, *stored]
    given = asking.given(asking.vertex)
    return lambda: [*given, *stored]


_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
DEFAULT_URL = "http://127.0.0.1:9464"
_WAIT_S = 5.0


def health(
    url: Annotated[
        str,
        typer.Argument(
            help="Where the probes are: of a vertex its metrics port, of a console its address; http:// or https://."
        ),
    ] = DEFAULT_URL,
    live: Annotated[
        bool, typer.Option("--live", help="Ask whether it is alive, not whether it serves clients.")
    ] = False,
) -> None:
    """Ask a vertex or a console how it is. Exit code 0: all is well. 1: it is not, or there is no answer.

    The certificate of https:// is not checked: nothing secret is sent.
    """
    passes, lines = _probe(url.rstrip("/"), "/livez" if live else "/readyz")
    for line in lines:
        typer.echo(printable(line), err=not passes)
    if not passes:
        raise typer.Exit(EXIT_ERROR)


def _probe(url: str, path: str) -> tuple[bool, list[str]]:
    import http.client
    import ssl

    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(f"URL: expected one like {DEFAULT_URL!r}, got {shown_url(url)}")
    asked = http.client.HTTPConnection(parts.hostname, port, timeout=_WAIT_S)
    if parts.scheme == "https":
        # A certificate names the service, hardly 127.0.0.1.
        unchecked = ssl.create_default_context()
        unchecked.check_hostname = False
        unchecked.verify_mode = ssl.CERT_NONE
        asked = http.client.HTTPSConnection(parts.hostname, port, timeout=_WAIT_S, context=unchecked)
    try:
        asked.request("GET", path)
        answer = asked.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        text = f"{shown_url(url)}{path} gives no answer: {error or type(error).__name__}"
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
            text = f"{shown_url(url)} answers, and not by HTTP: where this is a vertex' own port, name its metrics port"
        return False, [text]
    finally:
        asked.close()
    try:
        told = json.loads(body)
        notes = [f"note: {note}" for note in told["notes"]]
        lines = [f"{told['phase']}: {told['status']}", *told["reasons"], *notes]
    except (ValueError, KeyError, TypeError):
        said = f"answers {answer.status}, and no probe's JSON: is this the port of another service?"
        lines = [f"{shown_url(url)}{path} {said}"]
    return answer.status == 200, lines


# Orders to a running job go to its vertex; its driver takes them with its next announcement, about a second later.

POLL_S = 0.1
ASK_DEADLINE_MS = 5_000

Directory = Annotated[str, typer.Option(help="Where the savepoint goes; else where the job has its own.")]
Wait = Annotated[str, typer.Option(help="How long to wait here for the end of it; it goes on behind that.")]


@asking
def savepoint(name: JobName, directory: Directory = "", wait: Wait = "10m", *, asking: Asking) -> None:
    """Take a savepoint of a running topology, and print where it is."""
    _carry_out(asking, name, "savepoint", wait, directory=directory)


@asking
def stop(name: JobName, directory: Directory = "", wait: Wait = "10m", *, asking: Asking) -> None:
    """Stop a job: a topology in barrier mode with a savepoint, a wrapped query at once (drain lets it finish)."""
    _carry_out(asking, name, "stop", wait, directory=directory)


@asking
def drain(
    name: JobName,
    timeout: Annotated[str, typer.Option(help="How long the job may take, like 5m; else as it has it.")] = "",
    wait: Wait = "10m",
    *,
    asking: Asking,
) -> None:
    """Let a job end when all that it has taken in is done."""
    from ftlayer.common.checks import duration_ms

    _carry_out(asking, name, "drain", wait, timeout_ms=duration_ms(timeout, "--timeout") if timeout else 0)


@asking
def cancel(
    name: JobName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    wait: Wait = "10m",
    *,
    asking: Asking,
) -> None:
    """End a job now, whatever is under way."""
    question = "" if yes else "Cancel {} of {} now, whatever is under way?"
    _carry_out(asking, name, "cancel", wait, question=question)


@asking
def stack(
    name: JobName,
    slot: Annotated[int | None, typer.Option(min=0, help="Which slot; else the only one.")] = None,
    wait: Wait = "1m",
    *,
    asking: Asking,
) -> None:
    """Show what a slot's threads are at: their Python stacks."""
    _carry_out(asking, name, "stack", wait, slot=slot)


def _carry_out(
    asking: Asking,
    name: str,
    action: str,
    wait: str,
    *,
    directory: str = "",
    timeout_ms: int = 0,
    slot: int | None = None,
    question: str = "",
) -> None:
    """Order it, wait until it has come to an end, and print that; exit code 1 unless it is done."""
    from ftlayer.common.checks import duration_ms
    from ftlayer.monitor.rules.facts import order_facts
    from ftlayer.monitor.sources import user_name
    from ftlayer.vertex.calls import JobKind, JobOrder, OrderAction, OrderState

    wait_ms = duration_ms(wait, "--wait", least=0)
    with asking.gatherer() as gatherer:
        names = gatherer.names()
        key = names.find(name)
        label = names.label(key.vertex, key.owner)
        job, place = gatherer.job(key.vertex, key.owner).job, names.place(key.vertex)
        if job.final:
            raise errors.UnknownJobError(f"{action}: {job.kind} {label} of {place} has ended ({job.state})")
        if asking.store:
            raise errors.UnknownJobError(
                f"{action}: {job.kind} {label} of {place} does not run, since its program has ended: start that again, "
                "and ask it without --store"
            )
        if job.kind is JobKind.QUERY and (directory or action == "cancel"):
            raise ConfigError(
                f"--directory: {label} is a wrapped query, which takes no savepoints"
                if directory
                else f"{label} is a wrapped query, which is not cancelled: ftlayer stop gives its batch up at once"
            )
        if action == "stack" and slot is None:
            if not job.slots:
                raise ConfigError(f"{label} has no slots: stack is of topologies that run")
            if len(job.slots) != 1:
                raise ConfigError(
                    f"--slot: say which; {label} has {', '.join(str(each.slot) for each in job.slots)}"
                )
            slot = job.slots[0].slot
        asked = question or f"{action} of {{}} of {{}} …"
        if action not in ("savepoint", "stack"):
            connection.confirm(asked.format(f"{job.kind} {label}", place), ask=bool(question))
        order = JobOrder(
            id=uuid.uuid4().hex,
            owner=key.owner,
            run=job.run,
            action=OrderAction(action),
            by=user_name(),
            asked_ms=system_now().wall_ms,
            directory=directory,
            timeout_ms=timeout_ms,
            slot=-1 if slot is None else slot,
        )
        record = await_end(gatherer, key, order, wait_ms)
    answer = record.answer
    if asking.as_json:
        print_json(order_facts(record))
    elif answer.state is OrderState.DONE:
        typer.echo(printable(answer.text or f"{action} of {label}: done"))
    elif answer.state.is_final:
        warn(f"{action} of {label} {_ENDS.get(answer.state, answer.state)}: {answer.text}")
    else:
        warn(f"{action} of {label} is still under way after {wait}; it goes on: see ftlayer jobs {label}")
    if answer.state is not OrderState.DONE:
        raise typer.Exit(EXIT_ERROR)


_ENDS = {"failed": "has failed", "refused": "was refused", "expired": "was not taken in time"}


def await_end(gatherer: Gatherer, key: JobKey, order: JobOrder, wait_ms: int) -> OrderRecord:
    """Ask until the order has come to an end, or the wait is over; once at least.

    The vertex of a program ends with it: where it is gone after an order that ends the job, the order was carried out.
    """
    from ftlayer.vertex.calls import AskJob

    until = time.monotonic() + wait_ms / 1_000
    record = gatherer.client(key.vertex).call(AskJob(order), deadline_ms=ASK_DEADLINE_MS)
    while not record.answer.state.is_final and time.monotonic() < until:
        time.sleep(POLL_S)
        try:
            record = gatherer.client(key.vertex).call(AskJob(order), deadline_ms=ASK_DEADLINE_MS)
        except errors.VertexUnavailableError:
            if not any(view.vertex == key.vertex and view.is_gone for view in gatherer.gather()):
                raise
            return _ended_with_its_program(record)
    return record


def _ended_with_its_program(record: OrderRecord) -> OrderRecord:
    from ftlayer.vertex.calls import OrderAction, OrderState

    ends = record.order.action in (OrderAction.STOP, OrderAction.DRAIN, OrderAction.CANCEL)
    state, text = OrderState.FAILED, "its program has ended, and what has become of the order is not known"
    if ends and record.answer.state is OrderState.TAKEN:
        state, text = OrderState.DONE, "its driver has taken the order, and its program has ended"
    return replace(record, answer=replace(record.answer, state=state, text=text))


class State(StrEnum):
    PENDING = "pending"
    WAITING = "waiting"
    DELIVERY = "delivery"


@asking
def pending(
    oldest: Annotated[bool, typer.Option("--oldest", help="List the oldest records.")] = False,
    where: records.WhereText = "",
    state: Annotated[State | None, typer.Option(help="With --oldest or --where: these alone.")] = None,
    limit: records.Limit = 20,
    wide: Wide = False,
    *,
    asking: Asking,
) -> None:
    """Count what is not done yet, by stream; with --oldest or --where, list such records, the oldest first."""
    with asking.gatherer() as gatherer:
        views, names = gatherer.views(), gatherer.names()
        records.keepers(gatherer)
        if not oldest and not where:
            _print_streams(asking, gatherer)
            return
        listing = _oldest(gatherer, where, (state,) if state else tuple(State), limit)
    counts = {each: sum(_count(view, each) for view in views) for each in State}
    total = counts[state] if state else sum(counts.values())
    if not where:
        listing = replace(listing, count=max(total, listing.count), is_all=True)
    if asking.as_json:
        from ftlayer.monitor.rules.facts import record_facts

        items = [record_facts(record.vertex, record.info, names) for record in listing.records]
        print_json({"items": items, "examined": listing.examined, "total": total})
    else:
        records.print_listing(printing_console(), listing, names, system_now().wall_ms, total, wide=wide)
        there = [f"{count:,} with --state {other}" for other, count in counts.items() if count]
        if state and not counts[state] and there:
            typer.echo(f"none of state {state}; there are {', '.join(there)}")


def _print_streams(asking: Asking, gatherer: Gatherer) -> None:
    from ftlayer.monitor.rules.facts import stream_facts
    from ftlayer.monitor.rules.names import spoken

    names, found = gatherer.names(), [(view, each) for view in gatherer.views() for each in view.streams]
    if asking.as_json:
        print_json([stream_facts(view.vertex, stream, names, view.as_of_ms) for view, stream in found])
        return
    numbers = ("pending", "waiting", "in delivery", "dead", "oldest")
    table = new_table("stream", *numbers, numbers=numbers)
    for view, stream in found:
        counts = (stream.pending, stream.waiting, stream.in_delivery, stream.dead)
        age = spoken(view.as_of_ms - stream.oldest_ms) if stream.oldest_ms else ""
        table.add_row(names.stream(view.vertex, stream.stream), *(f"{count:,}" for count in counts), age)
    console = printing_console()
    print_table(console, table) if found else console.print("no stream has been opened")
    for name in cli_jobs.HELD:
        console.print(f"{sum(getattr(stream, name) for _, stream in found):,} {name.replace('_', ' ')}")


def _oldest(gatherer: Gatherer, where: str, states: tuple[State, ...], limit: int) -> records.RecordListing:
    """Find the oldest of each stream, which is listed from its oldest on, and of all these the oldest."""
    from ftlayer.monitor.rules.plans import Search, Selection
    from ftlayer.monitor.rules.where import parse_where

    filter_, names, now_ms = parse_where(where), gatherer.names(), system_now().wall_ms
    found: list[records.FoundRecords] = []
    examined, is_all = 0, True
    for view in gatherer.views():
        for stream, state in product(view.streams if view.is_up else (), states):
            selection = Selection(view.vertex, str(state), filter_, stream_id=stream.stream)
            search = Search(selection, names, now_ms)
            found += _first(gatherer, view.vertex, search, limit)
            examined += search.examined
            is_all = is_all and search.is_over

    def since_ms(record: records.FoundRecords) -> int:
        info = record.info
        return info.registered_ms or (info.history[-1].at_ms if info.history else info.not_before_ms)

    found.sort(key=since_ms)
    is_all = is_all and len(found) <= limit
    return records.RecordListing(tuple(found[:limit]), len(found), examined, is_all)


def _first(gatherer: Gatherer, vertex: str, search: Search, limit: int) -> list[records.FoundRecords]:
    found: list[records.FoundRecords] = []
    while len(found) < limit and (call := search.next_call(limit)) is not None:
        found += [
            records.FoundRecords(vertex, info) for info in search.take(gatherer.client(vertex).call(call))
        ]
    return found


def _count(view: VertexView, state: State) -> int:
    name = "in_delivery" if state is State.DELIVERY else str(state)
    return int(view.stats.get(name, 0)) if view.is_up else 0


EXIT_USAGE = 2

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


_CALLED_ALIKE = (
    *("tls_cert", "tls_key", "tls_client_ca", "metrics_port"),
    *("root_certs", "client_pem", "login_file", "edit_with"),
)
_ANYWHERE = {name: f"--{name.replace('_', '-')}" for name in _CALLED_ALIKE} | {
    "otlp_endpoint": "--otlp",
    "max_store_bytes": "--max-store",
    "persist_timeout_ms": "--persist-timeout",
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
    if isinstance(error, errors.UnauthorizedError):
        return (
            "the vertex does not take the token: give the one that it was started with, by --token-file or "
            "FTLAYER_TOKEN"
        )
    text = str(error)
    if not isinstance(error, ConfigError | errors.MachineError | errors.VertexUnavailableError):
        return text
    text = re.sub(r"\b(\w+_\w+)\b", lambda found: _ANYWHERE.get(found[1], found[1]), text)
    return re.sub(r"^(\w+)(?=:)", lambda found: _IN_FRONT.get(found[1], found[1]), text)


class _CommandGroup(TyperGroup):
    """Prints ftlayer's own errors as what they say, without a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, argument in zip(["ftlayer", *args], args, strict=False):
            if not argument or re.fullmatch(r"--[\w-]+=", argument):
                # Of a variable that is not set, say: taken as a path it would be the working directory.
                name = argument.rstrip("=") or f"the argument behind {before!r}"
                typer.echo(printable(f"ftlayer: {name} is empty: give it a value, or leave it out"), err=True)
                raise typer.Exit(EXIT_USAGE)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FTLayerError as error:
            typer.echo(printable(f"ftlayer: {_in_words_of_options(error)}"), err=True)
            raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR) from error
        except OSError as error:
            if error.filename is None:
                raise
            # A path that was given, and that cannot be looked at: closed to this user, too long, a loop.
            typer.echo(printable(f"ftlayer: {error.filename}: {error.strerror}"), err=True)
            raise typer.Exit(EXIT_USAGE) from error


app = typer.Typer(
    cls=_CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Record-level fault tolerance for PySpark streams.",
)
for command in (cli_new.new, cli_jobs.jobs, cli_top.top, pending, savepoint, stop, drain, cancel, stack):
    app.command()(command)
app.add_typer(cli_dead.app, name="dead")
app.add_typer(cli_checkpoints.app, name="checkpoints")
app.command()(console)
app.command()(health)


class RecordState(StrEnum):
    PENDING = "pending"
    WAITING = "waiting"
    DELIVERY = "delivery"
    DEAD = "dead"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ftlayer {__version__}")
        raise typer.Exit


_VERSION = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Print ftlayer's version and exit."
)


@app.callback()
def options(version: Annotated[bool, _VERSION] = False) -> None:
    """Options of the command itself."""


@app.command()
def version(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print what a report of a bug needs: versions of ftlayer and of all that it runs on."""
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
    from ftlayer.common.java import ensure_java

    ensure_java()
    from ftlayer.cli.demo.run import DemoOptions, run_demo

    options = DemoOptions(input, kill, lines, batches, dir, keep, json, mode, engine, console)
    raise typer.Exit(run_demo(options, printing_console()))


@app.command()
def serve(
    path: Annotated[Path, typer.Argument(help="Directory of the store; made if it is missing.")],
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="unix:PATH|HOST:PORT",
            help="Without it, a Unix socket in the store's directory, for processes of this user; with --tls-cert "
            "127.0.0.1:7077. To HOST:PORT (port 0 is any free one) all can connect that reach it, who before they "
            "show the token can make the vertex hold 128 MiB of messages and half of its free descriptors: keep it "
            "to networks that you trust, by a firewall or --tls-client-ca.",
        ),
    ] = None,
    token_file: connection.TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM of what clients' certificates are signed by; they then need one.")
    ] = None,
    shards: Annotated[int, typer.Option(help="A power of two; fixed when the store is made.")] = 1,
    durability: Annotated[
        str, typer.Option(help='"batch", a duration like "100ms", or "none"; see docs/guarantees/README.md.')
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
            "OTEL_EXPORTER_OTLP_ENDPOINT and the other variables say. Needs the extra otel."
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep every id, for `ftlayer explain`; some hundred times slower.")
    ] = False,
) -> None:
    """Run a vertex of its own, for queries that say FTLayer.connect."""
    import faulthandler
    import logging

    from ftlayer.common.checks import duration_ms
    from ftlayer.config import ServeOptions, VertexOptions
    from ftlayer.transport.sockets import Notifier
    from ftlayer.vertex.service.directory import check_limits

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
    check_limits(vertex)
    from ftlayer.vertex.service.serve import serve as run

    options = ServeOptions(
        vertex,
        connection.token_of(token_file),
        listen,
        None if tls_cert is None else read_file(tls_cert, "--tls-cert"),
        None if tls_key is None else read_secret(tls_key, "--tls-key"),
        None if tls_client_ca is None else read_file(tls_client_ca, "--tls-client-ca"),
    )
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
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
    as_json: connection.Json = False,
) -> None:
    """Look into a store, without a vertex or beside a live one; changes nothing."""
    from ftlayer.cli.offline import inspect_vertex, stored_records
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
    from ftlayer.cli.tables import print_explained
    from ftlayer.monitor.rules.facts import explained_facts
    from ftlayer.vertex.calls import Explain

    wanted = parse_root(root)
    with asking.gatherer() as gatherer:
        asked = [view.vertex for view in gatherer.views() if view.is_up and view.has_records]
        answers = [gatherer.client(vertex).call(Explain(wanted)).found for vertex in asked]
    explained = next(filter(None, answers), None)
    if asking.as_json:
        print_json(explained_facts(wanted, explained))
    else:
        print_explained(printing_console(), wanted, explained)
    if explained is None:
        raise typer.Exit(EXIT_ERROR)


_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def main() -> None:
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # with `>&-`
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITTEN:
            raise
        if error.errno != errno.EPIPE:
            typer.echo(
                f"ftlayer: {error.strerror}: what this command was to write is not all there", err=True
            )
        # What is left to be written would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_ERROR) from None


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
    if 0 < root < 1 << 64:
        return root
    raise ConfigError(f"ROOT: expected an id as 16 hexadecimal digits, 0x… or a decimal number, got {text!r}")


if __name__ == "__main__":
    main()
