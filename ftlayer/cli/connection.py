"""The options of commands that ask a running vertex: where it is, and what it wants to see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftlayer.errors import ConfigError
from ftlayer.secret_files import read_secret

if TYPE_CHECKING:
    from ftlayer.vertex.client.client import VertexClient

EXIT_ERROR = 1
DEFAULT_ADDRESS = "grpc://127.0.0.1:7077"

Address = Annotated[str, typer.Option(help="Where the vertex is.", envvar="FTLAYER_ADDRESS")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the vertex's token; without it, FTLAYER_TOKEN is used.")
]
RootCerts = Annotated[Path | None, typer.Option(help="PEM of the certificate to trust, for grpc+tls.")]
ClientPem = Annotated[
    Path | None, typer.Option(help="PEM of a certificate and its key, for a vertex with --tls-client-ca.")
]


def read_file(path: Path, option: str) -> bytes:
    """Return what is in a file that an option names; `ConfigError` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error


def token_of(token_file: Path | None) -> str:
    """Return the vertex's token, of a file or the environment; `ConfigError` where there is none."""
    if token_file is not None:
        return read_secret(token_file, "--token-file").decode("utf-8", "replace").strip()
    token = os.environ.get("FTLAYER_TOKEN", "")
    if not token:
        raise ConfigError(
            "a vertex has a token: name the file it is in with --token-file, or set FTLAYER_TOKEN. Make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe())' > token; chmod 600 token"
        )
    return token


def connect(
    address: str, token_file: Path | None, root_certs: Path | None, client_pem: Path | None
) -> VertexClient:
    """Return a connection to the vertex that the options name. Raises `ConfigError`."""
    # gRPC's log is on stderr, a line an attempt; the error at the end says the same. Read when gRPC loads.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from ftlayer.vertex.client.client import VertexClient

    certificates = None if root_certs is None else read_file(root_certs, "--root-certs")
    return VertexClient(
        address,
        token_of(token_file),
        root_certs=certificates,
        client_pem=None if client_pem is None else read_secret(client_pem, "--client-pem"),
        client_id="cli",
        deadline_ms=10_000,
    )
