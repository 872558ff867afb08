"""The rows of a table of PostgreSQL: none is left out, however late its transaction commits."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgpack
import psycopg
import pytest

from ftlayer.connectors.postgres.source import PostgresTableReader
from ftlayer.connectors.queue_stream import pack_position
from ftlayer.errors import ConfigError, SourceChangedError
from ftlayer.sources import PostgresTableSource
from ftlayer.topology.operators import Member

Until = Callable[[Callable[[], Any], str], Any]
COUNT = count()
FETCHES = 600

BY_NUMBER = ("id", "id bigserial PRIMARY KEY, word text")
BY_TIME = ("at", "id uuid PRIMARY KEY, word text, at timestamptz NOT NULL DEFAULT now()")
BY_XID = ("xid", "id uuid PRIMARY KEY, word text, xid xid8 NOT NULL DEFAULT pg_current_xact_id()")


@pytest.fixture
def table() -> str:
    return f"rows_{os.getpid()}_{next(COUNT)}"


def opened(
    server: Any, table: str, column: str, position: bytes | None = None, **options: Any
) -> PostgresTableReader:
    given = {"poll_interval": "20ms", **({"delay": 0} if column == "at" else {}), **options}
    source = PostgresTableSource(server.dsn, table, column, **given)
    return source.open(Member("job/rows", 0, 1), {} if position is None else {0: position}, stored=True)


def words(reader: PostgresTableReader, rows: int, most: int = 3) -> list[str]:
    """Read so many rows."""
    found: list[str] = []
    empty = 0
    while empty < FETCHES:
        if len(found) >= rows:
            return found
        if (fetched := reader.fetch(most, 0.1)) is None:
            empty += 1
            continue
        assert fetched.rows.num_rows <= most
        found += fetched.rows.column("word").to_pylist()
    raise AssertionError(f"{rows} rows were not read, only {found}")


def inserting(connection: Any, table: str, word: str) -> None:
    made = (
        "(id, word)"
        if connection.execute(
            "SELECT data_type = 'uuid' FROM information_schema.columns WHERE table_name = %s AND column_name = 'id'",
            (table,),
        ).fetchone()[0]
        else "(word)"
    )
    values = f"('{uuid.uuid4()}', %s)" if "id" in made else "(%s)"
    connection.execute(f"INSERT INTO {table} {made} VALUES {values}", (word,))


@contextlib.contextmanager
def transaction(server: Any) -> Iterator[Any]:
    with psycopg.connect(server.dsn) as connection:
        yield connection


@pytest.mark.parametrize(("column", "columns"), [BY_NUMBER, BY_TIME, BY_XID])
def test_a_row_that_is_committed_late_is_read(
    postgres_server: Any, table: str, column: str, columns: str
) -> None:
    """It has the lower value, as its transaction is the older one."""
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({columns})")
    reader = opened(server, table, column)
    with transaction(server) as late:
        inserting(late, table, "late")
        with transaction(server) as other:
            inserting(other, table, "other")
        for _ in range(20):
            assert reader.fetch(10, 0.01) is None
        assert reader.waiting() == 1
    assert words(reader, 2) == ["late", "other"]
    assert reader.fetch(10, 0.05) is None
    reader.close()


def test_a_transaction_that_has_not_written_yet_is_waited_for(postgres_server: Any, table: str) -> None:
    """It has its time, and no number yet: the snapshot of another knows nothing of it."""
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({BY_TIME[1]})")
    reader = opened(server, table, "at")
    with transaction(server) as late:
        late.execute("SELECT now()")
        with transaction(server) as other:
            inserting(other, table, "other")
        for _ in range(20):
            assert reader.fetch(10, 0.01) is None
        inserting(late, table, "late")
        assert reader.fetch(10, 0.05) is None
    assert words(reader, 2) == ["late", "other"]
    reader.close()


def test_one_who_only_reads_holds_nothing_back_where_the_column_is_an_xid(
    postgres_server: Any, table: str
) -> None:
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({BY_XID[1]})")
    reader = opened(server, table, "xid")
    with transaction(server) as other:
        other.execute(f"SELECT * FROM {table}")
        with transaction(server) as writer:
            inserting(writer, table, "one")
        assert words(reader, 1) == ["one"]
    reader.close()


@pytest.mark.parametrize(("column", "columns"), [BY_NUMBER, BY_TIME, BY_XID])
def test_a_transaction_that_is_prepared_is_waited_for(
    postgres_server: Any, table: str, column: str, columns: str
) -> None:
    """Also over a restart of the server, which ends all others."""
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({columns})")
    reader = opened(server, table, column)
    with psycopg.connect(server.dsn, autocommit=True) as late:
        late.execute("BEGIN")
        inserting(late, table, "late")
        with transaction(server) as other:
            inserting(other, table, "other")
        assert reader.fetch(10, 0.05) is None
        late.execute(f"PREPARE TRANSACTION '{table}'")
    for _ in range(5):
        assert reader.fetch(10, 0.01) is None
    server.restart()
    for _ in range(5):
        assert reader.fetch(10, 0.01) is None
    server.execute(f"COMMIT PREPARED '{table}'")
    assert words(reader, 2) == ["late", "other"]
    reader.close()


@pytest.mark.parametrize(("column", "columns"), [BY_NUMBER, BY_TIME, BY_XID])
def test_rows_come_in_order_however_few_at_once(
    postgres_server: Any, table: str, column: str, columns: str
) -> None:
    """In the order of the numbers, which that of their texts is not."""
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({columns})")
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        for number in range(120):
            inserting(connection, table, str(number))
    reader = opened(server, table, column)
    assert words(reader, 120, most=7) == [str(number) for number in range(120)]
    assert reader.fetch(7, 0.05) is None
    reader.close()


def test_rows_that_are_deleted_move_no_others(postgres_server: Any, table: str) -> None:
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({BY_NUMBER[1]})")
    server.execute(f"INSERT INTO {table} (word) SELECT n FROM generate_series(1, 10) n")
    reader = opened(server, table, "id")
    first = reader.fetch(3, 1.0)
    assert first is not None
    reader.close()
    server.execute(f"DELETE FROM {table} WHERE id IN (1, 2, 5)")
    reader = opened(server, table, "id", first.position)
    assert words(reader, 6) == ["4", "6", "7", "8", "9", "10"]
    reader.close()


def test_an_update_is_read_where_it_makes_the_column_grow(postgres_server: Any, table: str) -> None:
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({BY_TIME[1]})")
    for word in "abcde":
        server.execute(f"INSERT INTO {table} VALUES (gen_random_uuid(), %s)", word)
    reader = opened(server, table, "at")
    assert words(reader, 2, most=2) == ["a", "b"]
    server.execute(f"UPDATE {table} SET word = 'a2', at = now() WHERE word = 'a'")
    server.execute(f"UPDATE {table} SET word = 'd2', at = now() WHERE word = 'd'")
    server.execute(f"UPDATE {table} SET word = 'b2' WHERE word = 'b'")
    assert words(reader, 4) == ["c", "e", "a2", "d2"]
    reader.close()


def test_a_time_of_whole_seconds_waits_until_its_second_is_over(postgres_server: Any, table: str) -> None:
    server = postgres_server
    server.execute(
        f"CREATE TABLE {table} (id uuid PRIMARY KEY, word text, at timestamptz(0) NOT NULL DEFAULT now())"
    )
    reader = opened(server, table, "at")
    found: list[str] = []
    for number in range(60):
        # A random key may be below that of the last row of the same second.
        server.execute(f"INSERT INTO {table} VALUES (gen_random_uuid(), %s)", str(number))
        if (fetched := reader.fetch(100, 0.02)) is not None:
            found += fetched.rows.column("word").to_pylist()
    found += words(reader, 60 - len(found))
    assert sorted(found, key=int) == [str(number) for number in range(60)]
    reader.close()


def test_a_source_begins_behind_a_value(postgres_server: Any, table: str) -> None:
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({BY_NUMBER[1]})")
    server.execute(f"INSERT INTO {table} (word) SELECT n FROM generate_series(1, 10) n")
    reader = opened(server, table, "id", after="7")
    assert words(reader, 3) == ["8", "9", "10"]
    reader.close()


@pytest.mark.parametrize(
    "columns",
    ["id bigserial PRIMARY KEY, word text", "id int GENERATED ALWAYS AS IDENTITY UNIQUE, word text"],
)
def test_numbers_that_begin_again_below_those_read_are_an_error(
    postgres_server: Any, table: str, columns: str
) -> None:
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({columns})")
    server.execute(f"INSERT INTO {table} (word) SELECT n FROM generate_series(1, 10) n")
    reader = opened(server, table, "id")
    first = reader.fetch(20, 5.0)
    assert first is not None
    server.execute(f"DELETE FROM {table}")
    assert reader.fetch(20, 0.05) is None, "rows may go, and their numbers are not given out again"
    reader.close()
    server.execute(f"TRUNCATE {table} RESTART IDENTITY")
    reader = opened(server, table, "id", first.position)
    assert reader.fetch(20, 0.05) is None, "there is no row that would not be read"
    reader.close()
    server.execute(f"INSERT INTO {table} (word) SELECT n FROM generate_series(1, 3) n")
    reader = opened(server, table, "id", first.position)
    with pytest.raises(
        SourceChangedError, match=r"read up to 'id' 10, .* given out is 3: .*setval.* another uid"
    ):
        reader.fetch(20, 5.0)
    reader.close()
    server.execute(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), 10)")
    server.execute(f"INSERT INTO {table} (word) VALUES ('new')")
    reader = opened(server, table, "id", first.position)
    assert words(reader, 1) == ["new"]
    reader.close()


def test_transactions_that_begin_again_below_those_read_are_an_error(
    postgres_server: Any, table: str
) -> None:
    server = postgres_server
    server.execute(f"CREATE TABLE {table} ({BY_XID[1]})")
    server.execute(
        f"INSERT INTO {table} VALUES (gen_random_uuid(), 'a', (pg_current_xact_id()::text::bigint + 10^9)::text::xid8)"
    )
    reader = opened(server, table, "xid")
    last = server.execute(f"SELECT xid::text, id::text FROM {table}")[0]
    position = pack_position(reader._named, msgpack.packb(last))
    reader.close()
    reader = opened(server, table, "xid", position)
    with pytest.raises(SourceChangedError, match=r"read up to 'xid' \d+, and the last one given out is \d+"):
        reader.fetch(20, 5.0)
    reader.close()


def test_a_table_that_rows_would_be_lost_of_is_refused(postgres_server: Any, table: str) -> None:
    server = postgres_server

    def refused(columns: str, column: str, said: str, **options: Any) -> None:
        server.execute(f"DROP TABLE IF EXISTS {table}")
        server.execute(f"CREATE TABLE {table} ({columns})")
        with pytest.raises(ConfigError, match=said):
            opened(server, table, column, **options)

    refused("id bigint UNIQUE, word text", "id", "'id' may be null")
    refused(
        "id int PRIMARY KEY, word text",
        "word",
        "expected an integer, a timestamp or xid8, and 'word' is text",
    )
    refused("id int PRIMARY KEY, word text", "other", "column: table .* has no column 'other'")
    refused("id int NOT NULL, word text", "id", "key: expected columns .*it has none")
    refused(
        "id int PRIMARY KEY, at timestamptz NOT NULL, n int NOT NULL", "at", "apart, by a unique", key=["n"]
    )
    refused("id int PRIMARY KEY, word text", "id", "delay: is for columns with a time", delay="1s")
    cached = "takes 32 values at once.*CACHE 1"
    refused("id int GENERATED ALWAYS AS IDENTITY (CACHE 32) PRIMARY KEY", "id", cached)
    server.execute(f"CREATE SEQUENCE {table}_ids CACHE 32")
    refused(f"id int PRIMARY KEY DEFAULT nextval('{table}_ids')", "id", cached)
    server.execute(f"CREATE VIEW {table}_view AS SELECT 1 AS id")
    with pytest.raises(ConfigError, match="is no table"):
        opened(server, f"{table}_view", "id")


class Writer(threading.Thread):
    """Commits rows, and rolls some back; its transactions are open for a while."""

    def __init__(self, server: Any, table: str, seed: int, transactions: int) -> None:
        super().__init__()
        self._server, self._table = server, table
        self._chance, self._transactions = random.Random(seed), transactions
        self._seed = seed
        self.committed: list[str] = []

    def run(self) -> None:
        with psycopg.connect(self._server.dsn, autocommit=True) as connection:
            for number in range(self._transactions):
                connection.execute("BEGIN")
                if self._chance.random() < 0.3:
                    connection.execute("SELECT now()")
                    time.sleep(self._chance.random() / 20)
                names = [f"{self._seed}-{number}-{place}" for place in range(self._chance.randint(1, 3))]
                for name in names:
                    inserting(connection, self._table, name)
                    time.sleep(self._chance.random() / 100)
                is_kept = self._chance.random() < 0.8
                connection.execute("COMMIT" if is_kept else "ROLLBACK")
                self.committed += names if is_kept else []


def race(server: Any, table: str, column: str, columns: str, writers: int, transactions: int) -> None:
    server.execute(f"CREATE TABLE {table} ({columns})")
    threads = [Writer(server, table, seed, transactions) for seed in range(writers)]
    for thread in threads:
        thread.start()
    reader = opened(server, table, column)
    chance = random.Random(1)
    found: list[str] = []
    while any(thread.is_alive() for thread in threads):
        if (fetched := reader.fetch(5, 0.02)) is not None:
            found += fetched.rows.column("word").to_pylist()
            if chance.random() < 0.1:
                reader.close()
                reader = opened(server, table, column, fetched.position)
    expected = sorted(name for thread in threads for name in thread.committed)
    found += words(reader, len(expected) - len(found))
    assert sorted(found) == expected
    assert reader.fetch(5, 0.05) is None
    reader.close()


@pytest.mark.parametrize(("column", "columns"), [BY_NUMBER, BY_TIME, BY_XID])
def test_all_that_is_committed_is_read_once(
    postgres_server: Any, table: str, column: str, columns: str
) -> None:
    race(postgres_server, table, column, columns, writers=4, transactions=10)


@pytest.mark.campaign
@pytest.mark.parametrize(("column", "columns"), [BY_NUMBER, BY_TIME, BY_XID])
def test_all_that_many_commit_is_read_once(
    postgres_server: Any, table: str, column: str, columns: str
) -> None:
    race(postgres_server, table, column, columns, writers=12, transactions=300)
