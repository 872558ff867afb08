"""A PostgreSQL of the tests' own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SERVER_USER = "postgres"
"""PostgreSQL does not run as root."""


@dataclass
class Server:
    """A server that listens on a socket of its own directory."""

    programs: Path
    directory: Path
    is_root: bool

    @property
    def dsn(self) -> str:
        return f"host={self.directory} dbname=postgres user={SERVER_USER}"

    def run(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), *arguments]
        if self.is_root:
            command = ["runuser", "-u", SERVER_USER, "--", *command]
        # Its standard output stays open in the server: a file, not a pipe that would be waited for.
        with (self.directory / "log").open("ab") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/")

    def start(self) -> None:
        options = f"-k {self.directory} -c listen_addresses='' -c fsync=off -c max_connections=20"
        self.run("pg_ctl", "-D", str(self.directory / "data"), "-w", "-t", "60", "-o", options, "start")

    def stop(self, mode: str) -> None:
        self.run("pg_ctl", "-D", str(self.directory / "data"), "-w", "-m", mode, "stop")

    def execute(self, statement: str, *values: Any) -> list[Any]:
        """Run one statement on a connection of its own; returns its rows."""
        import psycopg

        with psycopg.connect(self.dsn) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []


def _programs() -> Path | None:
    """Return the directory of initdb: the newest of Debian's versions, or what is on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    named = shutil.which("initdb")
    return found[-1].parent if found else None if named is None else Path(named).resolve().parent


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A running server. Skipped where there is none to start, outside of CI."""
    pytest.importorskip("psycopg")
    programs = _programs()
    if programs is None:
        reason = "PostgreSQL is not installed: apt-get install postgresql"
        if os.environ.get("CI"):
            pytest.fail(f"CI is set and {reason}", pytrace=False)
        pytest.skip(reason)
    # A socket's path is short, so not in pytest's directory.
    directory = Path(tempfile.mkdtemp(prefix="ftlayer-pg-"))
    running = Server(programs, directory, os.geteuid() == 0)
    try:
        if running.is_root:
            account = pwd.getpwnam(SERVER_USER)
            os.chown(directory, account.pw_uid, account.pw_gid)
        running.run(
            "initdb", "-D", str(directory / "data"), "-U", SERVER_USER, "-A", "trust", "-N", "-E", "UTF8"
        )
        running.start()
        yield running
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            running.stop("immediate")
        shutil.rmtree(directory, ignore_errors=True)
