"""The command ``ftlayer console``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftlayer.cli.connection import ClientPem, RootCerts, TokenFile, read_file, token_of
from ftlayer.secret_files import read_secret

if TYPE_CHECKING:
    from ftlayer.monitor.sources import VertexSource
    from ftlayer.monitor.stored import StoredReports


def console(
    vertex: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|ADDRESS",
            help="A vertex to show: its address, or the store of a program of yours that runs; repeatable. Without it, "
            "all that programs of yours serve on this machine.",
        ),
    ] = None,
    token_file: TokenFile = None,
    root_certs: RootCerts = None,
    client_pem: ClientPem = None,
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
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM of the certificate chain; required off loopback.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM of its private key.")] = None,
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
) -> None:
    """Show queries, topologies, vertices and records in a browser, and mend them from there."""
    import logging

    # gRPC's log is on stderr, a line an attempt; the console says the same. Read when gRPC loads.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ftlayer.console.options import ConsoleOptions, check_extra

    check_extra()
    from ftlayer.console.serve import serve
    from ftlayer.transport.systemd import Notifier

    options = ConsoleOptions(
        listen, login_file, tls_cert, tls_key, tls_client_ca, mask_payloads, tuple(checkpoints or ())
    )
    look = _look(vertex or [], token_file, root_certs, client_pem, checkpoints or ())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    serve(
        options,
        look,
        on_ready=lambda link: typer.echo(f"ftlayer console at {link}"),
        notifier=Notifier.of(os.environ),
    )


def _look(
    places: Sequence[str],
    token_file: Path | None,
    root_certs: Path | None,
    client_pem: Path | None,
    checkpoints: Sequence[str],
) -> Callable[[], Sequence[VertexSource | StoredReports]]:
    from ftlayer.monitor.sources import sources_given, sources_here
    from ftlayer.monitor.stored import StoredReports

    stored = [StoredReports(url) for url in checkpoints]
    if not places:
        return lambda: [*sources_here().sources, *stored]
    given = sources_given(
        places,
        token=lambda: token_of(token_file),
        root_certs=None if root_certs is None else read_file(root_certs, "--root-certs"),
        client_pem=None if client_pem is None else read_secret(client_pem, "--client-pem"),
    )
    return lambda: [*given, *stored]
