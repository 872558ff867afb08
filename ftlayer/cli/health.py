"""The command ``ftlayer health``: a probe for places that have no HTTP client, like an image of a container."""

from __future__ import annotations

import json
from typing import Annotated
from urllib.parse import urlsplit

import typer

from ftlayer.cli.connection import EXIT_ERROR
from ftlayer.errors import ConfigError
from ftlayer.printable import printable, shown_url

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
    if parts.scheme == "https":
        # A certificate names the service, hardly 127.0.0.1.
        unchecked = ssl.create_default_context()
        unchecked.check_hostname = False
        unchecked.verify_mode = ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, port, timeout=_WAIT_S, context=unchecked
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=_WAIT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
            return False, [
                f"{url} answers, and not by HTTP: where this is a vertex' own port, name its metrics port"
            ]
        return False, [f"{url}{path} gives no answer: {error or type(error).__name__}"]
    finally:
        connection.close()
    return answer.status == 200, _lines(url, path, answer.status, body)


def _lines(url: str, path: str, status: int, body: bytes) -> list[str]:
    try:
        told = json.loads(body)
        return [
            f"{told['phase']}: {told['status']}",
            *told["reasons"],
            *(f"note: {note}" for note in told["notes"]),
        ]
    except (ValueError, KeyError, TypeError):
        return [f"{url}{path} answers {status}, and no probe's JSON: is this the port of another service?"]
