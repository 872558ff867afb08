"""PostgreSQL: connections of psycopg, and which of its errors mean that the server is away."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable
from typing import Any

from ftlayer.common.checks import shown
from ftlayer.common.printable import shown_url
from ftlayer.connectors.connections import client_library
from ftlayer.errors import ConfigError

TIMEOUT_S = 10
"""A server that does not answer for this long while it is connected to is taken for away."""

# Texts as the readers of columns expect them, whatever the database or the role sets.
_SESSION = (
    "SET DateStyle = 'ISO, MDY'; SET TimeZone = 'UTC'; SET IntervalStyle = 'postgres'; "
    "SET bytea_output = 'hex'; SET extra_float_digits = 1; SET statement_timeout = 0"
)


class Fault(enum.Enum):
    """What an error of PostgreSQL's is about, and so whether what failed may be tried again."""

    AWAY = "the server cannot be reached now, or cannot serve yet"
    PASSES = "chance, or what else runs: another try may succeed"
    CLOSED = "the server does not let in who connects like that"
    TARGET = "a table, a column, a right: no rows go there until someone mends it"
    ROW = "rows: it comes again with them, wherever they go in"


# By classes and codes of SQLSTATE, of which the longest decides. PASSES are transactions that are read-only, ended or
# rolled back, resources, locks, operators, disks, foreign servers, internal errors (but damaged data and indexes).
# ROW are values, constraints, views' and triggers' checks, and what goes wrong within functions (20, 21, 2F, 38).
_FAULTS = {
    state: fault
    for fault, states in {
        Fault.AWAY: "08 57P01 57P02 57P03 53300 55006",
        Fault.PASSES: "25 40 53 55P03 57 58 72 HV XX",
        Fault.CLOSED: "28",
        Fault.TARGET: "54 55 57P04 XX001 XX002",
        Fault.ROW: "20 21 22 23 2F 38 44 45 54000",
    }.items()
    for state in states.split()
}

# What a server says before there is a SQLSTATE to see, and will say again.
_UNSTATED = {
    "password authentication failed": Fault.CLOSED,
    "no password supplied": Fault.CLOSED,
    "no pg_hba.conf entry": Fault.CLOSED,
    "authentication failed for user": Fault.CLOSED,
    "certificate": Fault.CLOSED,
    "must be superuser or replication role": Fault.CLOSED,
    "permission denied": Fault.TARGET,
    "not permitted to log in": Fault.TARGET,
    "does not exist": Fault.TARGET,
}


def psycopg_library() -> Any:
    return client_library("PostgreSQL", "psycopg 3", "postgres", "psycopg", "psycopg.conninfo")


def check_dsn(dsn: object) -> None:
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


def fault_of(error: BaseException | None) -> Fault:
    """Return what an error is about; of one that is not psycopg's, or says nothing, that it passes."""
    psycopg = psycopg_library()
    if not isinstance(error, psycopg.Error):
        return Fault.PASSES
    state = error.sqlstate
    if state is None:
        if not isinstance(error, psycopg.OperationalError):
            return Fault.PASSES
        return next((fault for said, fault in _UNSTATED.items() if said in str(error)), Fault.AWAY)
    for end in (5, 2):
        if state[:end] in _FAULTS:
            return _FAULTS[state[:end]]
    # The standard has the classes up to 4 and H; others are chosen by who wrote a trigger.
    return Fault.ROW if "4" < state[0] < "A" or state[0] > "H" else Fault.TARGET


def is_away(error: Exception) -> bool:
    return fault_of(error) is Fault.AWAY


def is_refusal(error: Exception) -> bool:
    return fault_of(error) is Fault.ROW


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
    """Return what an error of psycopg says, in one line, without the statement and its values."""
    told = (error.diag.message_primary, error.diag.message_hint) if error.sqlstate else (error,)
    said = " ".join(" ".join(str(each) for each in told if each).split()) or type(error).__name__
    return f"{said} (SQLSTATE {error.sqlstate})" if error.sqlstate else said
