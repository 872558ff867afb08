"""The changes of a table of PostgreSQL: what comes of transactions, of slots and of the initial copy."""

from __future__ import annotations

import datetime
import logging
import os
import random
import secrets
from collections.abc import Callable, Iterator
from decimal import Decimal
from itertools import count
from typing import Any

import msgpack
import psycopg
import pytest

from ftlayer.connectors.postgres import changes_reader
from ftlayer.connectors.postgres.changes_reader import PostgresChangesReader
from ftlayer.errors import ConfigError, SourceChangedError, SourceError
from ftlayer.sources import PostgresChangesSource
from ftlayer.topology.operators import Fetched, Member

Until = Callable[[Callable[[], Any], str], Any]
COUNT = count()
FETCHES = 600


@pytest.fixture
def table(postgres_server: Any) -> str:
    name = f"changes_{os.getpid()}_{next(COUNT)}"
    postgres_server.execute(f"CREATE TABLE {name} (n bigint PRIMARY KEY, word text)")
    return name


def opened(
    server: Any, table: str, position: bytes | None = None, *, stored: bool = True, **options: Any
) -> PostgresChangesReader:
    """A reader; what is written from here on is read."""
    source = PostgresChangesSource(server.dsn, table, table, **options)
    positions = {} if position is None else {0: position}
    reader = source.open(Member("job/changes", 0, 1), positions, stored=stored)
    if position is None and table not in slots(server, table) and options.get("initial") != "copy":
        assert reader.fetch(1, 0.0) is None
    return reader


def fetch(reader: PostgresChangesReader, rows: int = 100) -> Fetched:
    for _ in range(FETCHES):
        if (fetched := reader.fetch(rows, 0.1)) is not None:
            return fetched
    raise AssertionError("nothing was fetched")


def fetch_rows(reader: PostgresChangesReader, rows: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < rows:
        found += fetch(reader, rows).rows.to_pylist()
    return found


def numbers_of(found: list[Fetched]) -> list[int]:
    return [number for each in found for number in each.rows.column("n").to_pylist()]


def confirmed(server: Any, slot: str) -> int:
    ((lsn,),) = server.execute(
        "SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %s", slot
    )
    return int(lsn)


def log_end(server: Any) -> int:
    return int(server.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn")[0][0])


def slots(server: Any, table: str) -> list[str]:
    found = server.execute("SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE %s", f"{table}%")
    return sorted(name for (name,) in found)


def test_each_operation_says_what_it_did(postgres_server: Any, table: str) -> None:
    server = postgres_server
    reader = opened(server, table)
    large = secrets.token_hex(4_000)  # Random, so that it is not compressed: it is kept beside the row.
    server.execute(f"INSERT INTO {table} VALUES (1, 'one'), (2, %s)", large)
    server.execute(f"UPDATE {table} SET word = NULL WHERE n = 1")
    server.execute(f"UPDATE {table} SET n = 3 WHERE n = 2")
    server.execute(f"DELETE FROM {table} WHERE n = 1")
    server.execute(f"TRUNCATE {table}")
    rows = fetch_rows(reader, 6)
    shown = [(row["_operation"], row["n"], row["word"], row["_before"], row["_unchanged"]) for row in rows]
    assert shown == [
        ("insert", 1, "one", None, None),
        ("insert", 2, large, None, None),
        ("update", 1, None, None, None),
        ("update", 3, None, {"n": 2, "word": None}, ["word"]),
        ("delete", 1, None, {"n": 1, "word": None}, None),
        ("truncate", None, None, None, None),
    ]
    assert [row["_sequence"] for row in rows] == [1, 2, 1, 1, 1, 1]
    places = [(row["_lsn"], row["_sequence"]) for row in rows]
    assert places == sorted(set(places))
    assert len({row["_transaction"] for row in rows}) == 5
    age = datetime.datetime.now(datetime.UTC) - rows[0]["_commit_time"]
    assert datetime.timedelta() < age < datetime.timedelta(hours=1)
    reader.close()


def test_with_the_full_identity_all_of_the_row_before_is_there(postgres_server: Any, table: str) -> None:
    server = postgres_server
    server.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    reader = opened(server, table)
    large = secrets.token_hex(4_000)
    server.execute(f"INSERT INTO {table} VALUES (1, %s)", large)
    server.execute(f"UPDATE {table} SET n = 2")
    server.execute(f"DELETE FROM {table}")
    _, update, delete = fetch_rows(reader, 3)
    assert (update["n"], update["word"], update["_unchanged"]) == (2, large, None)
    assert update["_before"] == {"n": 1, "word": large}
    assert (delete["n"], delete["word"]) == (2, large)
    reader.close()


def test_types_are_those_of_the_table(postgres_server: Any) -> None:
    server, table = postgres_server, f"types_{os.getpid()}"
    server.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, yes bool, small smallint, price numeric(10, 2), "
        "any_number numeric, ratio double precision, raw bytea, day date, at timestamptz, plain timestamp(3), "
        "parts int[], data jsonb, twice int GENERATED ALWAYS AS (id * 2) STORED)"
    )
    reader = opened(server, table, as_text=["day"])
    server.execute(
        f"INSERT INTO {table} VALUES (1, true, -2, 12.5, 1e40, 'Infinity', '\\x00ff', 'infinity', "
        "'2026-11-23 12:00:00.123456+02', '2026-11-23 12:00:00.5', '{1,2}', '{\"a\": 1}')"
    )
    (row,) = fetch_rows(reader, 1)
    assert {name: value for name, value in row.items() if not name.startswith("_")} == {
        "id": 1,
        "yes": True,
        "small": -2,
        "price": Decimal("12.50"),
        "any_number": "1" + "0" * 40,
        "ratio": float("inf"),
        "raw": b"\x00\xff",
        "day": "infinity",
        "at": datetime.datetime(2026, 11, 23, 10, 0, 0, 123456, datetime.UTC),
        "plain": datetime.datetime(2026, 11, 23, 12, 0, 0, 500_000),
        "parts": "{1,2}",
        "data": '{"a": 1}',
    }
    server.execute(f"INSERT INTO {table} (id, price) VALUES (2, 'NaN')")
    with pytest.raises(SourceError, match=r"column 'price': the value 'NaN' .*as_text=\['price'\]"):
        fetch(reader)
    reader.close()


def test_a_transaction_comes_in_one_piece(postgres_server: Any, table: str) -> None:
    server = postgres_server
    reader = opened(server, table)
    for first in (0, 300, 305):
        server.execute(
            f"INSERT INTO {table} SELECT generate_series({first}, {first + 299 if not first else first + 4})"
        )
    found = [fetch(reader, 7), fetch(reader, 7)]
    assert numbers_of(found[:1]) == list(range(300))
    assert numbers_of(found[1:]) == list(range(300, 305))
    reader.acknowledge([found[0].receipt])
    assert numbers_of([fetch(reader, 7)]) == list(range(305, 310))
    reader.close()


def test_a_large_transaction_comes_in_pieces_and_is_read_on_in_its_middle(
    postgres_server: Any, table: str, wait_until: Until
) -> None:
    server = postgres_server
    reader = opened(server, table, max_transaction_rows=10)
    server.execute(f"INSERT INTO {table} VALUES (-1)")
    server.execute(f"INSERT INTO {table} SELECT generate_series(0, 99)")
    server.execute(f"INSERT INTO {table} VALUES (100)")
    before = confirmed(server, table)
    found: list[Fetched] = []
    # Each piece is stored, and its reader dies.
    while len(numbers_of(found)) < 102:
        found.append(fetch(reader, 20))
        reader.acknowledge([found[-1].receipt])
        reader.close()
        reader = opened(server, table, found[-1].position, max_transaction_rows=10)
    assert numbers_of(found) == list(range(-1, 101))
    assert all(each.rows.num_rows <= 20 for each in found)
    assert len({each.position for each in found}) == len(found) > 5
    wait_until(lambda: confirmed(server, table) > before, "acknowledgement")
    assert reader.fetch(10, 0.1) is None
    reader.close()


def test_within_a_large_transaction_nothing_of_it_is_confirmed(postgres_server: Any, table: str) -> None:
    server = postgres_server
    reader = opened(server, table, max_transaction_rows=10)
    before = log_end(server)
    server.execute(f"INSERT INTO {table} SELECT generate_series(0, 99)")
    first = fetch(reader, 10)
    reader.acknowledge([first.receipt])
    assert reader._confirmed <= before
    reader.close()
    # Nothing was stored: the whole of it comes.
    reader = opened(server, table, max_transaction_rows=10)
    rows = fetch_rows(reader, 100)
    assert [row["n"] for row in rows] == list(range(100))
    reader.close()


def test_what_is_not_the_tables_is_passed_and_confirmed(
    postgres_server: Any, table: str, wait_until: Until
) -> None:
    server, other = postgres_server, f"{table}_other"
    server.execute(f"CREATE TABLE {other} (n bigint PRIMARY KEY)")
    server.execute(f"CREATE PUBLICATION {table} FOR TABLE {table}, {other}")
    reader = opened(server, table)
    server.execute(f"INSERT INTO {table} VALUES (1)")
    (found,) = [fetch(reader)]
    server.execute(f"INSERT INTO {other} SELECT generate_series(1, 1000)")
    end = log_end(server)
    for _ in range(5):
        assert reader.fetch(10, 0.02) is None
    assert confirmed(server, table) < end, "a row is not durable"
    reader.acknowledge([found.receipt])
    wait_until(
        lambda: reader.fetch(10, 0.02) is None and confirmed(server, table) >= end, "the log is let go"
    )
    reader.close()


def test_a_slot_that_another_reads_is_waited_for(postgres_server: Any, table: str, wait_until: Until) -> None:
    server = postgres_server
    first = opened(server, table)
    second = opened(server, table)
    assert second.fetch(10, 0.01) is None
    server.execute(f"INSERT INTO {table} VALUES (1)")
    assert second.fetch(10, 0.05) is None
    assert numbers_of([fetch(first)]) == [1]
    third = opened(server, table, reconnect_timeout="50ms")
    with pytest.raises(SourceError, match=r"slot .*reconnect_timeout: .*is active for PID"):
        fetch(third)
    first.close()
    assert numbers_of([fetch(second)]) == [1]
    second.close()
    third.close()


def test_a_slot_that_is_gone_is_an_error(postgres_server: Any, table: str, wait_until: Until) -> None:
    server = postgres_server
    reader = opened(server, table)
    server.execute(f"INSERT INTO {table} VALUES (1)")
    position = fetch(reader).position
    reader.close()
    wait_until(
        lambda: server.execute("SELECT NOT active FROM pg_replication_slots WHERE slot_name = %s", table)[0][
            0
        ],
        "end of the connection",
    )
    server.execute("SELECT pg_drop_replication_slot(%s)", table)
    with pytest.raises(SourceError, match=r"the slot is not there any more: changes behind .* are lost"):
        opened(server, table, position).fetch(1, 0.0)


def test_positions_of_another_server_or_of_its_future_are_refused(postgres_server: Any, table: str) -> None:
    server = postgres_server
    reader = opened(server, table)
    server.execute(f"INSERT INTO {table} VALUES (1)")
    *named, packed = msgpack.unpackb(fetch(reader).position)
    system, lsn, done, oid = msgpack.unpackb(packed)

    def position(*state: Any) -> bytes:
        found: bytes = msgpack.packb([*named, msgpack.packb(state)])
        return found

    reader.close()
    with pytest.raises(SourceError, match="another server than the one that was read"):
        opened(server, table, position("7", lsn, done, oid)).fetch(1, 0.0)
    with pytest.raises(SourceError, match="the server is older than what was read of it"):
        opened(server, table, position(system, lsn + (1 << 40), 0, oid)).fetch(1, 0.0)


def test_a_table_that_cannot_be_published_is_refused(postgres_server: Any, table: str) -> None:
    server = postgres_server
    server.execute(f"CREATE TABLE {table}_bare (n bigint)")
    with pytest.raises(ConfigError, match=r"has no replica identity.*REPLICA IDENTITY FULL"):
        opened(server, f"{table}_bare")
    server.execute(f"CREATE PUBLICATION {table} FOR TABLE {table}_bare")
    with pytest.raises(ConfigError, match="does not publish the table: ALTER PUBLICATION"):
        opened(server, table)
    with pytest.raises(ConfigError, match="there is no table"):
        opened(server, f"{table}_nowhere")
    with pytest.raises(ConfigError, match=r"columns: table .* has no column 'm'"):
        opened(server, table, columns=["m"])
    server.execute("SELECT pg_create_physical_replication_slot(%s)", f"{table}_x")
    server.execute(f"ALTER PUBLICATION {table} SET TABLE {table}")
    server.execute(f"ALTER TABLE {table} RENAME TO {table}_x")
    server.execute(f"ALTER PUBLICATION {table} RENAME TO {table}_x")
    with pytest.raises(ConfigError, match="no slot of pgoutput in this database"):
        opened(server, f"{table}_x").fetch(1, 0.0)
    assert f"{table}_bare" not in slots(server, table)


def test_a_column_that_is_added_is_read_from_then_on(postgres_server: Any, table: str) -> None:
    server = postgres_server
    reader = opened(server, table)
    server.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    server.execute(f"ALTER TABLE {table} ADD COLUMN more int, DROP COLUMN word")
    server.execute(f"INSERT INTO {table} VALUES (2, 3)")
    rows = fetch_rows(reader, 2)
    assert [(row["n"], row["word"]) for row in rows] == [(1, "a"), (2, None)]
    reader.close()
    reader = opened(server, table)
    rows = fetch_rows(reader, 2)
    assert [(row["n"], row["more"]) for row in rows] == [(1, None), (2, 3)]
    reader.close()


# ---------------------------------------------------------------- what others do to the table

ALL_TABLES = "CREATE PUBLICATION {t} FOR ALL TABLES"


def after(
    server: Any, table: str, before: list[str], ddl: list[str], inserted: dict[str, int]
) -> tuple[PostgresChangesReader, list[dict[str, Any]]]:
    """Read a row, alter the table, write into tables; return the reader and all that came."""
    for statement in before:
        server.execute(statement.format(t=table))
    reader = opened(server, table)
    server.execute(f"INSERT INTO {table} VALUES (1)")
    rows = fetch_rows(reader, 1)
    server.execute(f"INSERT INTO {table} VALUES (2)")
    for statement in ddl:
        server.execute(statement.format(t=table))
    for name, number in inserted.items():
        server.execute(f"INSERT INTO {name.format(t=table)} (n) VALUES (%s)", number)
    return reader, rows


def fetch_on(reader: PostgresChangesReader, rows: list[dict[str, Any]]) -> None:
    for _ in range(FETCHES):
        if (fetched := reader.fetch(100, 0.1)) is not None:
            rows += fetched.rows.to_pylist()


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch, postgres_server: Any, table: str) -> Iterator[None]:
    monkeypatch.setattr(changes_reader, "LOOK_S", 0.0)
    yield
    # One of all tables would be that of other tests too.
    for (name,) in postgres_server.execute("SELECT pubname FROM pg_publication WHERE puballtables"):
        postgres_server.execute(f"DROP PUBLICATION {name}")
    postgres_server.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active AND slot_name LIKE %s",
        f"{table}%",
    )


SWAP = ["ALTER TABLE {t} RENAME TO {t}_old", "ALTER TABLE {t}_new RENAME TO {t}"]
NEW = "CREATE TABLE {t}_new (n bigint PRIMARY KEY, word text)"
MADE_AGAIN = ["DROP TABLE {t}", "CREATE TABLE {t} (n bigint PRIMARY KEY, word text)"]


@pytest.mark.parametrize(
    ("before", "ddl", "inserted", "said"),
    [
        (
            [NEW],
            SWAP,
            {"{t}": 3},
            'is another table now .*called "public"."{t}_old".*SET TABLE.*table=\'public.{t}_old\'',
        ),
        ([NEW], ["BEGIN; " + "; ".join(SWAP) + "; COMMIT"], {}, "is another table now"),
        ([NEW, ALL_TABLES], SWAP, {"{t}": 3, "{t}_old": 4}, "is another table now .*initial='copy'"),
        ([], ["DROP TABLE {t}"], {}, "was dropped. To go on: ALTER PUBLICATION"),
        ([], MADE_AGAIN, {"{t}": 3}, "was dropped, and another one .* has its name"),
        ([ALL_TABLES], MADE_AGAIN, {"{t}": 3}, "was dropped, and another one .* has its name"),
        (
            [NEW],
            ["ALTER PUBLICATION {t} SET TABLE {t}_new"],
            {"{t}": 3},
            "does not publish the table any more",
        ),
        ([ALL_TABLES], ["ALTER TABLE {t} SET UNLOGGED"], {"{t}": 3}, "does not publish .*is unlogged"),
    ],
)
@pytest.mark.usefixtures("looks_often")
def test_a_table_whose_changes_come_no_more_is_an_error_behind_what_came(
    postgres_server: Any, table: str, before: list[str], ddl: list[str], inserted: dict[str, int], said: str
) -> None:
    reader, rows = after(postgres_server, table, before, ddl, inserted)
    with pytest.raises(SourceChangedError, match=said.format(t=table)):
        fetch_on(reader, rows)
    assert [row["n"] for row in rows if row["_operation"] == "insert"][:2] == [1, 2]
    assert 3 not in [row["n"] for row in rows]
    reader.close()


@pytest.mark.usefixtures("looks_often")
def test_both_tables_of_a_swap_can_be_read_on(postgres_server: Any, table: str) -> None:
    """As the error says: the old one by its new name, the other by another slot."""
    server = postgres_server
    reader, _ = after(server, table, [NEW], SWAP, {"{t}": 3, "{t}_old": 4})
    position = fetch(reader).position
    reader.close()
    again = opened(server, table, position)
    with pytest.raises(SourceChangedError, match="is another table now"):
        fetch_on(again, [])
    again.close()
    renamed = PostgresChangesSource(server.dsn, f"{table}_old", table)
    old = renamed.open(Member("job/changes", 0, 1), {0: position}, stored=True)
    server.execute(f"INSERT INTO {table}_old VALUES (5)")
    assert numbers_of([fetch(old)])[-1] == 5
    old.close()
    server.execute(f"ALTER PUBLICATION {table} SET TABLE {table}")
    copied = PostgresChangesSource(server.dsn, table, f"{table}_2", publication=table, initial="copy")
    new = copied.open(Member("job/changes2", 0, 1), {}, stored=True)
    assert numbers_of([fetch(new)]) == [3]
    new.close()


PARTED = [
    "DROP TABLE {t}",
    "CREATE TABLE {t} (n bigint PRIMARY KEY, word text) PARTITION BY RANGE (n)",
    "CREATE TABLE {t}_p1 PARTITION OF {t} FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE {t}_p2 (n bigint PRIMARY KEY, word text)",
    "INSERT INTO {t}_p2 VALUES (11)",
]
ATTACH = "ALTER TABLE {t} ATTACH PARTITION {t}_p2 FOR VALUES FROM (10) TO (20)"


@pytest.mark.parametrize(
    ("before", "ddl", "inserted", "numbers", "warned"),
    [
        ([], ["ALTER TABLE {t} RENAME TO {t}_b"], {"{t}_b": 3}, [1, 2, 3], 'is called "public"."{t}_b" now'),
        (
            [],
            ["CREATE SCHEMA s{t}", "ALTER TABLE {t} SET SCHEMA s{t}"],
            {"s{t}.{t}": 3},
            [1, 2, 3],
            'is called "s{t}"',
        ),
        (
            [],
            ["ALTER TABLE {t} RENAME word TO said"],
            {"{t}": 3},
            [1, 2, 3],
            "columns word are not there any more",
        ),
        (
            [],
            ["ALTER TABLE {t} DROP COLUMN word"],
            {"{t}": 3},
            [1, 2, 3],
            "columns word are not there any more",
        ),
        ([], ["ALTER TABLE {t} ALTER n TYPE int"], {"{t}": 3}, [1, 2, 3], ""),
        ([], ["ALTER TABLE {t} REPLICA IDENTITY FULL"], {"{t}": 3}, [1, 2, 3], ""),
        (
            [],
            ["ALTER PUBLICATION {t} SET (publish = 'insert')"],
            {"{t}": 3},
            [1, 2, 3],
            "publishes of it just: insert;",
        ),
        ([], ["TRUNCATE {t}"], {"{t}": 3}, [1, 2, None, 3], ""),
        ([], ["CREATE TABLE {t}_c (m int) INHERITS ({t})"], {"{t}_c": 4, "{t}": 3}, [1, 2, 3], ""),
        # What a partition has brings no rows, and what it takes along no deletes.
        (PARTED, [ATTACH], {"{t}": 12}, [1, 2, 12], ""),
        (
            PARTED,
            [ATTACH, "ALTER TABLE {t} DETACH PARTITION {t}_p1"],
            {"{t}": 12, "{t}_p1": 3},
            [1, 2, 12],
            "",
        ),
        (PARTED, [ATTACH, "TRUNCATE {t}_p1"], {"{t}": 12}, [1, 2, 12], ""),
        (PARTED, [ATTACH, "TRUNCATE {t}"], {"{t}": 12}, [1, 2, None, 12], ""),
        (PARTED, [ATTACH, "DROP TABLE {t}_p1"], {"{t}": 12}, [1, 2, 12], ""),
    ],
)
@pytest.mark.usefixtures("looks_often")
def test_what_a_table_survives_is_read_on(
    postgres_server: Any,
    table: str,
    caplog: pytest.LogCaptureFixture,
    before: list[str],
    ddl: list[str],
    inserted: dict[str, int],
    numbers: list[int | None],
    warned: str,
) -> None:
    reader, rows = after(postgres_server, table, before, ddl, inserted)
    while rows[-1]["n"] != numbers[-1]:
        rows += fetch(reader).rows.to_pylist()
    assert reader.fetch(100, 0.0) is None
    assert [row["n"] for row in rows] == numbers
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == bool(warned), said
    assert warned.format(t=table) in "".join(said)
    reader.close()


@pytest.mark.usefixtures("looks_often")
def test_a_publication_that_publishes_partitions_by_themselves_is_an_error(
    postgres_server: Any, table: str
) -> None:
    ddl = ["ALTER PUBLICATION {t} SET (publish_via_partition_root = false)"]
    reader, _ = after(postgres_server, table, PARTED, ddl, {"{t}": 3})
    with pytest.raises(SourceChangedError, match="or its partitions are published by themselves"):
        fetch_on(reader, [])
    reader.close()


@pytest.mark.usefixtures("looks_often")
def test_a_publication_that_is_dropped_is_an_error(postgres_server: Any, table: str) -> None:
    reader, _ = after(postgres_server, table, [], ["DROP PUBLICATION {t}"], {"{t}": 3})
    with pytest.raises(
        SourceChangedError,
        match=f"publication .*{table}.* was dropped.*give the source a slot and a uid of its own",
    ):
        fetch_on(reader, [])
    reader.close()


# ---------------------------------------------------------------- the initial copy


def test_rows_that_are_there_come_first_and_each_change_once(
    postgres_server: Any, table: str, wait_until: Until
) -> None:
    server = postgres_server
    server.execute(f"INSERT INTO {table} SELECT generate_series(0, 24)")
    reader = opened(server, table, initial="copy")
    found = [fetch(reader, 10)]
    server.execute(f"INSERT INTO {table} VALUES (25)")
    server.execute(f"UPDATE {table} SET word = 'x' WHERE n = 3")
    while len(numbers_of(found)) < 27:
        found.append(fetch(reader, 10))
    assert numbers_of(found) == [*range(26), 3]
    operations = [name for each in found for name in each.rows.column("_operation").to_pylist()]
    assert operations == ["read"] * 25 + ["insert", "update"]
    assert len({each.position for each in found}) == len(found)
    assert slots(server, table) == [f"{table}_initial"]
    reader.acknowledge([each.receipt for each in found])
    server.execute(f"INSERT INTO {table} VALUES (26)")
    assert numbers_of([fetch(reader)]) == [26]
    assert slots(server, table) == [table]
    reader.close()


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("stored", [True, False])
def test_a_copy_that_is_cut_off_begins_anew_and_one_that_is_whole_does_not(
    postgres_server: Any, table: str, pieces: int, stored: bool
) -> None:
    """Three pieces are the copy, the fourth is a change."""
    server = postgres_server
    server.execute(f"INSERT INTO {table} SELECT generate_series(0, 24)")
    reader = opened(server, table, initial="copy")
    found = [fetch(reader, 10) for _ in range(3)]
    server.execute(f"INSERT INTO {table} VALUES (25)")
    found.append(fetch(reader, 10))
    reader.close()
    position = found[pieces - 1].position if pieces else None
    again = opened(server, table, position, stored=stored, initial="copy")
    if pieces < 3:
        rest = fetch_rows(again, 26)
        assert sorted(row["n"] for row in rest) == list(range(26))
    elif pieces == 3:
        rest = fetch_rows(again, 1)
        assert [(row["_operation"], row["n"]) for row in rest] == [("insert", 25)]
    server.execute(f"INSERT INTO {table} VALUES (26)")
    assert [row["n"] for row in fetch_rows(again, 1)] == [26]
    again.close()


def test_an_empty_table_is_copied_too(postgres_server: Any, table: str) -> None:
    server = postgres_server
    reader = opened(server, table, initial="copy")
    assert reader.fetch(10, 0.01) is None
    server.execute(f"INSERT INTO {table} VALUES (1)")
    assert [row["_operation"] for row in fetch_rows(reader, 1)] == ["insert"]
    assert slots(server, table) == [table]
    reader.close()


# ---------------------------------------------------------------- the connection


def test_a_server_is_answered_while_nobody_takes_what_it_sends(
    postgres_server: Any, table: str, wait_until: Until
) -> None:
    server = postgres_server
    server.execute("ALTER SYSTEM SET wal_sender_timeout = '1s'")
    server.execute("SELECT pg_reload_conf()")
    try:
        reader = opened(server, table)
        server.execute(f"INSERT INTO {table} SELECT n, repeat('x', 10000) FROM generate_series(0, 2999) n")
        numbers = numbers_of([fetch(reader, 1)])

        def senders() -> Any:
            return server.execute(
                "SELECT pid, reply_time - backend_start > '4 s' FROM pg_stat_replication r "
                "JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE slot_name = %s",
                table,
            )

        ((pid, _),) = senders()
        # Four times as long as it waits for an answer.
        wait_until(lambda: senders()[0][1], "reports")
        while len(numbers) < 3_000:
            numbers += numbers_of([fetch(reader, 1_000)])
        assert numbers == list(range(3_000))
        assert senders()[0][0] == pid
        reader.close()
    finally:
        server.execute("ALTER SYSTEM RESET wal_sender_timeout")
        server.execute("SELECT pg_reload_conf()")


class Ledger:
    """A topology that stores what it takes, some fetches behind, and dies now and then."""

    def __init__(self, server: Any, table: str, chance: random.Random) -> None:
        self._server, self._table, self._chance = server, table, chance
        self.stored: list[int] = []
        self._position: bytes | None = None
        self._reader = opened(server, table, max_transaction_rows=20)
        self._taken: list[Fetched] = []

    def step(self) -> None:
        if (fetched := self._reader.fetch(self._chance.choice([1, 10, 100]), 0.02)) is not None:
            self._taken.append(fetched)
        if self._chance.random() < 0.5:
            count = self._chance.randint(0, len(self._taken))
            durable, self._taken = self._taken[:count], self._taken[count:]
            self.stored += numbers_of(durable)
            if durable:
                self._position = durable[-1].position
                if self._chance.random() < 0.7:
                    self._reader.acknowledge([each.receipt for each in durable])
        if self._chance.random() < 0.05:
            self.die()

    def die(self) -> None:
        self._reader.close()
        self._taken = []
        source = PostgresChangesSource(self._server.dsn, self._table, self._table, max_transaction_rows=20)
        positions = {} if self._position is None else {0: self._position}
        self._reader = source.open(Member("job/changes", 0, 1), positions, stored=True)

    def close(self) -> None:
        self._reader.close()


def walk(server: Any, table: str, seed: int, transactions: int, kills: int) -> None:
    """Transactions of all sizes, some rolled back, while readers die and the server is killed: each row once."""
    chance = random.Random(seed)
    ledger = Ledger(server, table, chance)
    expected: list[int] = []
    number = 0
    for turn in range(transactions):
        rows = chance.choice([1, 1, 3, 19, 20, 21, 70])
        numbers = list(range(number, number + rows))
        number += rows
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("BEGIN")
            with connection.cursor() as cursor:
                cursor.executemany(f"INSERT INTO {table} VALUES (%s)", [(each,) for each in numbers])
            if chance.random() < 0.1:
                connection.execute("ROLLBACK")
            else:
                connection.execute("COMMIT")
                expected += numbers
        if kills and turn % (transactions // (kills + 1)) == transactions // (kills + 1) - 1:
            server.restart()
        for _ in range(chance.randint(0, 4)):
            ledger.step()
    for _ in range(FETCHES):
        if len(ledger.stored) >= len(expected):
            break
        ledger.step()
    assert ledger.stored == expected
    ledger.die()
    for _ in range(5):
        ledger.step()
    assert ledger.stored == expected
    ledger.close()


def test_each_change_comes_once_whoever_dies(postgres_server: Any, table: str) -> None:
    walk(postgres_server, table, seed=7, transactions=24, kills=1)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(12))
def test_each_change_comes_once_whoever_dies_and_how_often(
    postgres_server: Any, table: str, seed: int
) -> None:
    walk(postgres_server, table, seed, transactions=300, kills=3)
