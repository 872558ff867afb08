"""The options of commands that ask running vertices: which ones, and what they want to see."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftlayer.common.printable import printable
from ftlayer.common.secret_files import read_file, read_secret
from ftlayer.errors import ConfigError, StoreLockedError, UnreadableReplyError

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer, StoredReports
    from ftlayer.monitor.sources import VertexSource

EXIT_ERROR = 1
DEADLINE_MS = 3_000
"""So long a vertex may take to say how it is: it answers in a millisecond, or hangs."""

Vertices = Annotated[
    list[str] | None,
    typer.Option(
        "--vertex",
        "--address",
        metavar="PATH|ADDRESS",
        help="A vertex: its address, or the store of a program of yours that runs; repeatable. Without it, all that "
        "programs of yours serve on this machine.",
        envvar="FTLAYER_ADDRESS",
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the vertex's token; without it, FTLAYER_TOKEN is used.")
]
RootCerts = Annotated[Path | None, typer.Option(help="PEM of the certificate to trust, for grpc+tls.")]
ClientPem = Annotated[
    Path | None, typer.Option(help="PEM of a certificate and its key, for a vertex with --tls-client-ca.")
]
Store = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The store of a program that has ended, which is opened for this command: it alone is asked.",
    ),
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="A directory with checkpoints: the dead letters there, of jobs without a vertex; repeatable.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the bytes of CheckpointConfig.key, for --checkpoints of jobs that had one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: times in UTC, durations in seconds.")]


def token_of(token_file: Path | None) -> str:
    """Return the vertex's token, of a file or the environment; `ConfigError` where there is none."""
    if token_file is not None:
        return read_secret(token_file, "--token-file").decode("utf-8", "replace").strip()
    token = os.environ.get("FTLAYER_TOKEN", "")
    if not token:
        raise ConfigError(
            "a vertex has a token: name the file that has the one it was started with by --token-file, or set "
            "FTLAYER_TOKEN. Make one for a new vertex with: python -c 'import secrets; print(secrets.token_urlsafe())' "
            "> token; chmod 600 token"
        )
    return token


@dataclass(frozen=True, slots=True)
class Asking:
    """Which vertices a command asks, and whether it prints JSON; `asking` makes its fields options of the command."""

    vertex: list[str] | None
    token_file: Path | None
    root_certs: Path | None
    client_pem: Path | None
    store: Path | None
    as_json: bool
    checkpoints: list[str] | None = None
    key_file: Path | None = None

    @contextmanager
    def gatherer(
        self,
        *,
        follow: bool = False,
        shows_killed: bool = False,
        checkpoints: Sequence[str] = (),
        only_there: bool = False,
    ) -> Iterator[Gatherer]:
        """Give what asks the vertices, after it has asked them all once.

        With ``follow`` programs that begin later are found too, where no vertex is named. ``checkpoints`` are
        directories with what drivers have said last; with ``only_there`` no vertex is asked beside them that is not
        named. Of each that gives no answer it is said why, but of those that were found and whose driver was killed: a
        command that ``shows_killed`` does. Where one that was named gives none, the exit code is 1. Raises
        `ConfigError`, and where none answers, and none is to be shown as killed, what the first one raised.
        """
        # gRPC's log is on stderr, a line an attempt; the error at the end says the same. Read when gRPC loads.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from ftlayer.monitor.gather import Gatherer, StoredReports
        from ftlayer.monitor.sources import sources_here

        key = None if self.key_file is None else read_secret(self.key_file, "--key-file")
        stored = tuple(StoredReports(url, key) for url in self.checkpoints or checkpoints)
        sources: tuple[VertexSource, ...] = ()
        is_named = bool(self.vertex or self.store)
        named = self.vertex if self.vertex != [os.environ.get("FTLAYER_ADDRESS")] else None
        if self.store and (named or stored):
            raise ConfigError("--store: it alone is asked: leave --vertex and --checkpoints out")

        def look() -> tuple[VertexSource | StoredReports, ...]:
            found = sources_here() if follows else None
            return (*(sources if found is None else (*found.sources, *found.killed)), *stored)

        follows = follow and not is_named and self.token_file is None
        gatherer = Gatherer(look, label="cli", deadline_ms=DEADLINE_MS)
        with _opened(self.store) as opened, contextlib.closing(gatherer):
            if opened is not None:
                sources = (opened,)
            elif is_named or not (stored and only_there):
                sources = self._sources(shows_killed=shows_killed, may_be_none=bool(stored))
            views = gatherer.gather()
            errors = [error for view in views if (error := gatherer.error(view.vertex)) is not None]
            silent = [view for view in views if not view.is_up and (is_named or not view.is_killed)]
            way = "" if is_named else "; --vertex asks others without it"
            said = [f"{view.silence}{way if view.is_unreadable else ''}" for view in silent]
            if errors and not any(view.is_up or (view.is_killed and shows_killed) for view in views):
                raise UnreadableReplyError(said[0]) if silent and silent[0].is_unreadable else errors[0]
            for sentence in () if is_named else said:
                warn(sentence)
            yield gatherer
            if is_named and said:
                for sentence in said:
                    warn(sentence)
                raise typer.Exit(EXIT_ERROR)

    def _sources(self, *, shows_killed: bool, may_be_none: bool) -> tuple[VertexSource, ...]:
        from ftlayer.config import TCP_LISTEN
        from ftlayer.monitor.sources import sources_here
        from ftlayer.vertex.service.directory import served_here

        places = list(self.vertex or ())
        if not places and self.token_file is None:
            found = sources_here()
            for sentence in found.left_out:
                warn(sentence)
            if len(found.sources) == 1 and not shows_killed and not found.sources[0].is_near:
                (only,) = found.sources
                warn(f"{only.name} ({only.path or only.address}) is asked, which is the only one that runs")
            if found.sources or (found.killed and shows_killed):
                return (*found.sources, *found.killed)
            if not os.environ.get("FTLAYER_TOKEN"):
                if may_be_none:
                    return ()
                killed = "".join(f"; of {source.name}, {source.killed}" for source in found.killed)
                raise ConfigError(
                    "no program of yours serves a vertex on this machine now: name the store of one that has ended by "
                    "--store PATH, or a vertex elsewhere by --vertex ADDRESS, and the file with its token by "
                    f"--token-file, or set FTLAYER_TOKEN{killed}"
                )
        return self.given(places or [str(store) for store in served_here()] or [f"grpc://{TCP_LISTEN}"])

    def given(self, places: Sequence[str]) -> tuple[VertexSource, ...]:
        """Return the vertices at ``places``, with the token and the certificates. Raises `ConfigError`."""
        from ftlayer.monitor.sources import sources_given

        return sources_given(
            places,
            token=lambda: token_of(self.token_file),
            root_certs=None if self.root_certs is None else read_file(self.root_certs, "--root-certs"),
            client_pem=None if self.client_pem is None else read_secret(self.client_pem, "--client-pem"),
        )


@contextmanager
def _opened(store: Path | None) -> Iterator[VertexSource | None]:
    """Serve the store of a program that has ended, under its lock, for as long as the block runs."""
    if store is None:
        yield None
        return
    from ftlayer.cli.offline import inspect_store, shard_paths
    from ftlayer.config import VertexOptions
    from ftlayer.monitor.sources import VertexSource, short_name
    from ftlayer.vertex.service.directory import ACCESS_FILE, check_unheld
    from ftlayer.vertex.service.embedded import EmbeddedVertex

    shards = shard_paths(store)
    try:
        check_unheld(store)
    except StoreLockedError as error:
        raise StoreLockedError(f"--store: {error}; name it by --vertex, not --store") from error
    reports = [inspect_store(shard) for shard in shards]
    if reports[0].path == store:
        raise ConfigError(f"--store: {store} is a shard of a store: name the directory that it is in")
    most = max(VertexOptions.max_store_bytes, sum(report.max_bytes for report in reports))
    options = VertexOptions(store, shards=len(reports), max_store_bytes=most)
    with EmbeddedVertex(options, visits=True) as vertex:
        path = os.path.realpath(store)
        left = "killed" if (store / ACCESS_FILE).exists() else "gone"  # one that ends itself removes it
        let_in = vertex.address, vertex.token, vertex.root_certs, vertex.client_pem
        yield VertexSource(short_name(os.path.basename(path)), *let_in, path, left=left)


_OPTIONS = {
    "vertex": Vertices,
    "token_file": TokenFile,
    "root_certs": RootCerts,
    "client_pem": ClientPem,
    "store": Store,
    "as_json": Json,
}


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Asking` in place of its parameter ``asking``."""
    return _with_options(command, _OPTIONS)


def asking_letters(command: Callable[..., None]) -> Callable[..., None]:
    """Do as `asking`, for a command about dead letters, which are beside checkpoints too."""
    return _with_options(command, {"checkpoints": Checkpoints, "key_file": KeyFile, **_OPTIONS})


def _with_options(command: Callable[..., None], options: dict[str, Any]) -> Callable[..., None]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.signature(command, eval_str=True)
    own = [each.replace(kind=keyword) for name, each in signature.parameters.items() if name != "asking"]
    added = [
        inspect.Parameter(name, keyword, default=False if option is Json else None, annotation=option)
        for name, option in options.items()
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        asked = Asking(**{name: given.pop(name) for name in options})
        command(**given, asking=asked)

    shown = signature.replace(parameters=[*own, *added])
    wrapped.__signature__ = shown  # type: ignore[attr-defined]
    wrapped.__annotations__ = {name: parameter.annotation for name, parameter in shown.parameters.items()}
    return wrapped


def warn(sentence: str) -> None:
    typer.echo(printable(f"ftlayer: {sentence}"), err=True)


def confirm(question: str, *, ask: bool = True) -> None:
    """Ask, or say what is going to be done. Exit code 1 where the answer is no, or there is none."""
    if not ask:
        warn(question.removesuffix("?"))
        return
    try:
        if typer.confirm(printable(question), err=True):
            return
        warn("nothing was changed")
    except typer.Abort:
        typer.echo(err=True)  # the line of the question
        warn("nobody has answered, and nothing was changed; --yes asks nothing")
    raise typer.Exit(EXIT_ERROR)
