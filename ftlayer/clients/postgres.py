"""PostgreSQL: connections of psycopg, and which of its errors mean that the server is away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
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
    if "://" in dsn:
        return shown_url(dsn)
    info = psycopg_library().conninfo.conninfo_to_dict(dsn)
    return f"{shown_url(info.get('dbname', 'postgres'))} at {info.get('host', 'this machine')}"


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


def is_refusal(error: Any) -> bool:
    """Whether an error of psycopg says that rows will not do: it comes again with them, wherever they go in."""
    state = getattr(error, "sqlstate", None) or ""
    if state[:1].isalpha():
        # P0: raised in PL/pgSQL. Others that the standard leaves free are chosen by who wrote a trigger.
        return state > "I" and not state.startswith("XX")
    # 54000: a value too large for an index; 38: raised in another language.
    return state == "54000" or state[:2] in ("22", "23", "38", "44", "45") or state[:1] > "5"


def refusal(error: Any, columns: Iterable[str] = ()) -> str:
    """Return why rows are refused, without a value of them: what a server says of them may quote all."""
    psycopg, said = psycopg_library(), error.diag
    try:
        name = psycopg.errors.lookup(error.sqlstate).__name__
    except KeyError:
        name = "an error of its own"
    # COPY tells a column by its context alone, behind a line's number and before the value.
    lines = [each.partition(":")[0] for each in (said.context or "").splitlines() if each.startswith("COPY ")]
    line = lines[-1] if lines else ""
    column = said.column_name or max(
        (each for each in columns if line.endswith(f" {each}")), key=len, default=""
    )
    named = {
        "column": column,
        "constraint": said.constraint_name,
        "type": said.datatype_name,
        "table": said.table_name,
    }
    places = "".join(f", {kind} {each!r}" for kind, each in named.items() if each)
    if name == "CheckViolation" and not said.constraint_name:
        places += ", which has no partition for it"
    return f"PostgreSQL refuses it: {name} (SQLSTATE {error.sqlstate}){places}"


def reason(error: Any) -> str:
    """Return what an error of psycopg says, in one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{said} (SQLSTATE {error.sqlstate})" if getattr(error, "sqlstate", None) else said
