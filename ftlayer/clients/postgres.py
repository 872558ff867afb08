"""PostgreSQL: connections of psycopg, and which of its errors mean that the server is away."""

from __future__ import annotations

import contextlib
from typing import Any

from ftlayer.checks import shown
from ftlayer.clients.libraries import client_library
from ftlayer.errors import ConfigError
from ftlayer.printable import shown_url

TIMEOUT_S = 10
"""A server that does not answer for this long while it is connected to is taken for away."""

# Texts as the readers of columns expect them, whatever the database or the role sets.
_SESSION = (
    "SET DateStyle = 'ISO, MDY'; SET TimeZone = 'UTC'; SET IntervalStyle = 'postgres'; "
    "SET bytea_output = 'hex'; SET extra_float_digits = 1; SET statement_timeout = 0"
)

# Classes and codes of SQLSTATE: connection lost, shut down, starting, too many connections, a slot that another has.
_AWAY = ("08", "57P01", "57P02", "57P03", "53300", "55006")

# What a server says before there is a SQLSTATE to see, and will say again.
_LASTING = (
    "password authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "authentication failed for user",
    "permission denied",
    "must be superuser or replication role",
    "does not exist",
    "certificate",
)


def psycopg_library() -> Any:
    """Return psycopg. Raises `ConfigError` if it is missing."""
    client_library("psycopg.conninfo", "PostgreSQL", "psycopg 3", "postgres")
    return client_library("psycopg", "PostgreSQL", "psycopg 3", "postgres")


def check_dsn(dsn: object) -> None:
    """Raise `ConfigError` unless libpq can read it."""
    psycopg = psycopg_library()
    if not isinstance(dsn, str):
        raise ConfigError(f"dsn: expected a connection string of PostgreSQL's as text, got {shown(dsn)}")
    with contextlib.suppress(psycopg.ProgrammingError):  # What libpq says quotes all of it.
        psycopg.conninfo.conninfo_to_dict(dsn)
        return
    raise ConfigError(
        "dsn: not a connection string of PostgreSQL's: expected 'host=… dbname=… user=…' or "
        f"postgresql://user@host/database, with options that libpq knows, got {shown_url(dsn)}"
    )


def database_of(dsn: str) -> str:
    """Return how errors name a database: without its password."""
    info = psycopg_library().conninfo.conninfo_to_dict(dsn)
    return f"{info.get('dbname', 'postgres')} at {info.get('host', 'this machine')}"


def connect(dsn: str, *, replication: bool = False) -> Any:
    """Return a connection without transactions of its own; texts of values come as the readers of columns expect.

    ``replication``: one that takes replication commands too, as the database's role may (``REPLICATION``).
    """
    more: dict[str, Any] = {"replication": "database"} if replication else {}
    info = psycopg_library().conninfo.conninfo_to_dict(dsn)
    more["connect_timeout"] = info.get("connect_timeout", TIMEOUT_S)
    connection = psycopg_library().connect(dsn, autocommit=True, client_encoding="UTF8", **more)
    try:
        connection.execute(_SESSION)
    except BaseException:
        connection.close()
        raise
    return connection


def is_away(error: Exception) -> bool:
    """Whether an error of psycopg means that the server cannot be reached now, or cannot serve yet."""
    if not isinstance(error, psycopg_library().OperationalError):
        return False
    state = getattr(error, "sqlstate", None)
    if state is not None:
        return bool(state.startswith(_AWAY))
    return not any(said in str(error) for said in _LASTING)


def reason(error: Any) -> str:
    """Return what an error of psycopg says, in one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{said} (SQLSTATE {error.sqlstate})" if getattr(error, "sqlstate", None) else said
