"""PostgreSQL holds each record exactly once, whatever is lost, repeated or killed."""

from __future__ import annotations

import datetime
import itertools
import json
import pickle
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from unittest.mock import Mock

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.common.failures import RowsRejected
from ftlayer.connectors import table_commits
from ftlayer.connectors.postgres import staging
from ftlayer.connectors.postgres.catalog import Fault, fault_of
from ftlayer.errors import ConfigError, SinkError, SinkTargetError, UncommittableError
from ftlayer.sinks import FileMessage, PostgresSink

_tables = itertools.count()


@pytest.fixture
def table(server: Any) -> str:
    """An empty table with a number."""
    name = f"numbers_{next(_tables)}"
    server.execute(f"CREATE TABLE {name} (n bigint PRIMARY KEY, word text NOT NULL DEFAULT 'none')")
    return name


@pytest.fixture
def sink(server: Any, table: str, monkeypatch: pytest.MonkeyPatch) -> PostgresSink:
    monkeypatch.setattr(table_commits, "TRY_AGAIN_S", 0)
    return PostgresSink(server.dsn, table)


def rows(*numbers: int) -> Any:
    return iter([pa.record_batch({"n": pa.array(numbers, pa.int64())})])


def numbers_in(server: Any, table: str) -> list[int]:
    return [row[0] for row in server.execute(f"SELECT n FROM {table} ORDER BY n")]


def staged_in(server: Any, table: str) -> int:
    return int(server.execute(f"SELECT count(*) FROM {table}_ftlayer_staging")[0][0])


def test_rows_are_seen_when_they_are_committed(server: Any, sink: PostgresSink, table: str) -> None:
    messages = [sink.write(rows(1, 2)), sink.write(rows(3)), sink.write(iter([]))]
    assert numbers_in(server, table) == []
    assert staged_in(server, table) == 3
    driver = pickle.loads(pickle.dumps(sink))
    driver.commit(pickle.loads(pickle.dumps(messages)), 7)
    assert numbers_in(server, table) == [1, 2, 3]
    assert staged_in(server, table) == 0
    entries = server.execute("SELECT id, checkpoint FROM ftlayer_commits WHERE sink = %s", table)
    assert sorted(entries) == sorted((message.id, 7) for message in messages[:2])
    assert server.execute(f"SELECT DISTINCT word FROM {table}") == [("none",)]


def test_a_commit_that_comes_again_changes_nothing(server: Any, sink: PostgresSink, table: str) -> None:
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.commit([first, None], 1)
    sink.commit([first, second], 2)
    sink.commit([second, first], 3)
    assert numbers_in(server, table) == [1, 2]


def test_a_commit_under_another_name_says_what_may_be_wrong(server: Any, table: str) -> None:
    message = PostgresSink(server.dsn, table).write(rows(1))
    PostgresSink(server.dsn, table).commit([message], 1)
    with pytest.raises(UncommittableError, match=f"had the sink another name than {table + '-2'!r}"):
        PostgresSink(server.dsn, table, name=f"{table}-2").commit([message], 1)
    assert numbers_in(server, table) == [1]


def test_an_abort_removes_what_is_staged_and_nothing_else(
    server: Any, sink: PostgresSink, table: str
) -> None:
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.abort([first, second, None], 2)
    sink.abort([second], 2)
    assert numbers_in(server, table) == [1]
    assert staged_in(server, table) == 0
    with pytest.raises(UncommittableError, match="1 rows were staged and 0 are there"):
        sink.commit([second], 3)


def test_a_write_that_fails_stages_nothing(server: Any, sink: PostgresSink, table: str) -> None:
    def batches() -> Any:
        yield from rows(1, 2)
        raise ValueError("the user's")

    sink.abort([sink.write(rows(9))], 0)
    with pytest.raises(ValueError, match="the user's"):
        sink.write(batches())
    with pytest.raises(SinkError, match="no column 'other'"):
        sink.write(iter([pa.record_batch({"n": [1], "other": [2]})]))
    with pytest.raises(RowsRejected, match="SQLSTATE 22021"):
        sink.write(iter([pa.record_batch({"n": [1], "word": ["\0"]})]))
    assert staged_in(server, table) == 0
    assert server.execute("SELECT * FROM ftlayer_staged WHERE sink = %s", table) == []


# ---------------------------------------------------------------- rows that the table refuses


TEXT = pa.string()


@dataclass
class Refusing:
    """A table, rows that it takes in a commit of their own, and rows of which it refuses some: by number, with what."""

    columns: str
    taken: list[tuple[Any, Any]]
    rows: list[tuple[Any, Any]]
    refused: dict[int, str]
    v: pa.DataType = TEXT


REFUSING = {
    "a null": Refusing("(k bigint, v text NOT NULL)", [], [(1, "a"), (2, None)], {1: "23502.*column 'v'"}),
    "a null for a default": Refusing(
        "(k bigint, v text NOT NULL DEFAULT 'd')", [], [(1, None), (2, "b")], {0: "23502"}
    ),
    "a key that is there": Refusing(
        "(k bigint PRIMARY KEY, v text)",
        [(1, "a")],
        [(2, "b"), (1, "secret-1")],
        {1: "23505.*constraint '.*_pkey'"},
    ),
    "keys that meet": Refusing(
        "(k bigint UNIQUE, v text)",
        [],
        [(7, "a"), (8, "b"), (7, "secret-1"), (7, "c")],
        {2: "23505", 3: "23505"},
    ),
    "keys that meet at the end": Refusing(
        "(k bigint UNIQUE DEFERRABLE INITIALLY DEFERRED, v text)",
        [(1, "a")],
        [(1, "b"), (2, "c")],
        {0: "23505"},
    ),
    "keys that meet by an expression": Refusing(
        "(k bigint, v text); CREATE UNIQUE INDEX ON {} (lower(v)) WHERE k > 0",
        [(1, "a")],
        [(0, "A"), (2, "A"), (3, "b")],
        {1: "23505"},
    ),
    "an exclusion": Refusing(
        "(k bigint, v int8range, EXCLUDE USING gist (v WITH &&))",
        [(1, "[1,5)")],
        [(2, "[5,7)"), (3, "[4,5)"), (4, "[6,9)")],
        {1: "23P01", 2: "23P01"},
    ),
    "a check": Refusing(
        "(k bigint, v text, CONSTRAINT small CHECK (k < 5))",
        [],
        [(9, "secret-1"), (1, "a")],
        {0: "23514.*'small'"},
    ),
    "no parent": Refusing("(k bigint REFERENCES parents, v text)", [], [(1, "a"), (2, "b")], {1: "23503"}),
    "no partition": Refusing(
        "(k bigint, v text) PARTITION BY RANGE (k); CREATE TABLE {}_1 PARTITION OF {} FOR VALUES FROM (0) TO (5)",
        [],
        [(9, "a"), (1, "b")],
        {0: "23514.*no partition"},
    ),
    "a trigger": Refusing(
        "(k bigint, v text); CREATE TRIGGER t BEFORE INSERT ON {} FOR EACH ROW EXECUTE FUNCTION no_two()",
        [],
        [(1, "a"), (2, "secret-1"), (3, "c")],
        {1: "P0001"},
    ),
    "a trigger's own code": Refusing(
        "(k bigint, v text); CREATE TRIGGER t AFTER INSERT ON {} FOR EACH ROW EXECUTE FUNCTION no_two('UR001')",
        [],
        [(2, "secret-1"), (3, "c")],
        {0: "UR001"},
    ),
    "a domain": Refusing("(k positive, v text)", [], [(1, "a"), (-1, "b")], {1: "23514.*'positive_check'"}),
    "too large": Refusing("(k smallint, v text)", [], [(70_000, "a"), (1, "b")], {0: "22003.*column 'k'"}),
    "too long": Refusing(
        "(k bigint, v varchar(3))", [], [(1, "abc"), (2, "secret-1")], {1: "22001.*column 'v'"}
    ),
    "too long for an index": Refusing(
        "(k bigint, v text); CREATE INDEX ON {} (v)",
        [],
        [(1, "abc"), (2, secrets.token_hex(20_000))],
        {1: "54000"},
    ),
    "a NUL": Refusing("(k bigint, v text)", [], [(1, "a\0b"), (2, "b")], {0: "22021"}),
    "no date": Refusing(
        "(k bigint, v date)", [], [(1, "2020-01-01"), (2, "secret-1")], {1: "22007.*column 'v'"}
    ),
    "no such day": Refusing("(k bigint, v date)", [], [(1, "2020-01-01"), (2, "2021-02-30")], {1: "22008"}),
    "no JSON": Refusing("(k bigint, v jsonb)", [], [(1, "{}"), (2, '{"secret-1')], {1: "22P02.*column 'v'"}),
    "no JSON within": Refusing(
        "(k bigint, v jsonb)", [], [(1, [1.0]), (2, [float("nan")])], {1: "22P02"}, v=pa.list_(pa.float64())
    ),
    "no such label": Refusing("(k bigint, v mood)", [], [(1, "well"), (2, "secret-1")], {1: "22P02"}),
    "a time that Python lacks": Refusing(
        "(k bigint, v timestamp[])",
        [],
        [(1, [0]), (2, [2**62])],
        {1: "cannot be written"},
        v=pa.list_(pa.timestamp("us")),
    ),
    "both ways": Refusing(
        "(k smallint PRIMARY KEY, v text NOT NULL)",
        [(1, "a")],
        [(70_000, "a"), (1, "b"), (2, None), (3, "c"), (3, "d"), (-70_000, None)],
        {0: "22003", 1: "23505", 2: "23502", 4: "23505", 5: "22003"},
    ),
}


@pytest.fixture(scope="module")
def refusing(server: Any) -> Any:
    server.execute("CREATE TABLE parents (k bigint PRIMARY KEY)")
    server.execute("INSERT INTO parents VALUES (1)")
    server.execute("CREATE DOMAIN positive AS bigint CHECK (VALUE > 0)")
    server.execute("CREATE TYPE mood AS ENUM ('well')")
    server.execute(
        "CREATE FUNCTION no_two() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.k = 2 THEN "
        "RAISE 'not %', NEW USING ERRCODE = coalesce(TG_ARGV[0], 'P0001'); END IF; RETURN NEW; END $$"
    )
    return server


def made(server: Any, columns: str) -> str:
    name = f"refusing_{next(_tables)}"
    for statement in f"CREATE TABLE {name} {columns}".split("; "):
        server.execute(statement.replace("{}", name))
    return name


@pytest.mark.parametrize("kind", REFUSING)
def test_rows_that_the_table_refuses_are_rejected_one_by_one(refusing: Any, kind: str) -> None:
    case = REFUSING[kind]
    table = made(refusing, case.columns)
    sink = PostgresSink(refusing.dsn, table)

    def written(rows: list[tuple[Any, Any]]) -> Any:
        values = {
            "k": pa.array([k for k, _ in rows], pa.int64()),
            "v": pa.array([v for _, v in rows], case.v),
        }
        whole = pa.record_batch(values)
        return sink.write(iter([whole.slice(at, 1) for at in range(len(rows))]))

    if case.taken:
        sink.commit([written(case.taken)], 1)
    with pytest.raises(RowsRejected) as caught:
        written(case.rows)
    assert list(caught.value.errors) == list(case.refused)
    for row, expected in case.refused.items():
        assert re.search(expected, str(caught.value.errors[row]))
        assert "secret" not in str(caught.value.errors[row])
    rest = [row for at, row in enumerate(case.rows) if at not in case.refused]
    sink.commit([written(rest)], 2)
    assert staged_in(refusing, table) == 0
    found = [row[0] for row in refusing.execute(f"SELECT k FROM {table} ORDER BY k")]
    assert found == sorted(k for k, _ in case.taken + rest)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.lists(st.none() | st.integers(-9, 40), min_size=1, max_size=60),
)
def test_what_is_refused_is_what_one_by_one_would_be(
    server: Any, before: list[int], numbers: list[int | None]
) -> None:
    table = made(server, "(n bigint PRIMARY KEY CHECK (n % 7 <> 3 AND n >= 0))")
    sink = PostgresSink(server.dsn, table)
    there = {n for n in before if n % 7 != 3}
    sink.commit([sink.write(rows(*there))], 1)
    refused = []
    for at, n in enumerate(numbers):
        if n is None or n < 0 or n % 7 == 3 or n in there:
            refused.append(at)
        else:
            there.add(n)
    batch = pa.record_batch({"n": pa.array(numbers, pa.int64())})
    if refused:
        with pytest.raises(RowsRejected) as caught:
            sink.write(iter([batch]))
        assert list(caught.value.errors) == refused
        rest = [n for at, n in enumerate(numbers) if at not in refused]
        batch = pa.record_batch({"n": pa.array(rest, pa.int64())})
    sink.commit([sink.write(iter([batch]))], 2)
    assert set(numbers_in(server, table)) == there


def test_rows_that_a_policy_of_the_table_keeps_out_are_refused(server: Any) -> None:
    """The same SQLSTATE as of a role that may not insert at all, which is no row's fault."""
    table = made(server, "(n bigint)")
    server.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    server.execute(f"CREATE POLICY odd ON {table} USING (true) WITH CHECK (n % 2 = 1)")
    server.execute(f"CREATE ROLE {table}")
    server.execute(f"ALTER ROLE {table} LOGIN")
    server.execute(f"GRANT ALL ON SCHEMA public TO {table}")
    PostgresSink(server.dsn, table).write(rows(1))
    for name in (f"{table}_ftlayer_staging", "ftlayer_staged", "ftlayer_commits"):
        server.execute(f"GRANT ALL ON {name} TO {table}")
    sink = PostgresSink(server.dsn.replace("user=postgres", f"user={table}"), table)
    with pytest.raises(SinkError, match=r"rows cannot be staged: .*permission denied"):
        sink.write(rows(1, 2))
    server.execute(f"GRANT INSERT ON {table} TO {table}")
    with pytest.raises(RowsRejected, match="SQLSTATE 42501") as caught:
        sink.write(rows(1, 2, 3))
    assert list(caught.value.errors) == [1]


def test_a_parent_that_is_staged_too_is_no_refusal(server: Any) -> None:
    """It may be of the same checkpoint, in another sink or another subtask."""
    parents = made(server, "(n bigint PRIMARY KEY)")
    children = made(server, f"(n bigint UNIQUE REFERENCES {parents})")
    above, below = PostgresSink(server.dsn, parents), PostgresSink(server.dsn, children)
    parent = above.write(rows(1))
    child = below.write(rows(1))
    above.commit([parent], 1)
    below.commit([child], 1)
    assert numbers_in(server, children) == [1]


def test_a_table_that_fills_in_what_rows_lack_refuses_none(server: Any) -> None:
    """By defaults, as an identity, by a trigger: what the rows lack, or have as null, is there when it is checked."""
    table = made(
        server,
        "(n bigint, i bigint GENERATED ALWAYS AS IDENTITY, g bigint GENERATED ALWAYS AS (n * 2) STORED, "
        "d text NOT NULL DEFAULT 'd' CHECK (d <> ''), t text NOT NULL CHECK (t = 'filled'))",
    )
    server.execute(
        "CREATE OR REPLACE FUNCTION fills() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.t = 'filled'; RETURN NEW; END $$"
    )
    server.execute(f"CREATE TRIGGER f BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION fills()")
    sink = PostgresSink(server.dsn, table)
    sink.commit([sink.write(iter([pa.record_batch({"n": [1], "t": ["no"]})])), sink.write(rows(2))], 1)
    assert server.execute(f"SELECT n, g, d, t FROM {table} ORDER BY n") == [
        (1, 2, "d", "filled"),
        (2, 4, "d", "filled"),
    ]


def test_columns_that_only_the_table_fills_are_refused_as_such(server: Any) -> None:
    table = made(
        server, "(n bigint GENERATED ALWAYS AS IDENTITY, g bigint GENERATED ALWAYS AS (1) STORED, k int)"
    )
    sink = PostgresSink(server.dsn, table)
    with pytest.raises(ConfigError, match=r"column 'g' is a generated column, .* leave it out of the rows"):
        sink.write(iter([pa.record_batch({"g": [1]})]))
    with pytest.raises(ConfigError, match=r"'n' is GENERATED ALWAYS AS IDENTITY.* SET GENERATED BY DEFAULT"):
        sink.write(rows(1))


def test_a_commit_that_the_table_refuses_is_final_and_whole(
    server: Any, sink: PostgresSink, table: str
) -> None:
    """What two messages have, or came into the table behind their backs, only the commit can know."""
    good, other, twin = sink.write(rows(1, 2)), sink.write(rows(3)), sink.write(rows(3))
    with pytest.raises(
        UncommittableError, match=r"rows cannot be committed: .*23505.*constraint '\w+_pkey'"
    ) as caught:
        sink.commit([good, other, twin], 1)
    assert "ftlayer checkpoints refused" in str(caught.value)
    assert "(3)" not in str(caught.value)
    assert numbers_in(server, table) == []
    sink.commit([good], 1)
    server.execute(f"INSERT INTO {table} VALUES (3)")
    with pytest.raises(UncommittableError):
        sink.commit([other], 2)
    server.execute(f"DELETE FROM {table} WHERE n = 3")
    sink.commit([other], 2)
    assert numbers_in(server, table) == [1, 2, 3]


CLOSED_BETWEEN = {
    "dropped": ("DROP TABLE {}", "CREATE TABLE {} (n bigint, v text); GRANT INSERT ON {} TO {}", "42P01"),
    "renamed": ("ALTER TABLE {} RENAME TO {}_old", "ALTER TABLE {}_old RENAME TO {}", "42P01"),
    "a column dropped": ("ALTER TABLE {} DROP v", "ALTER TABLE {} ADD v text", "42703"),
    "another type": (
        "ALTER TABLE {} ALTER v TYPE date USING now()",
        "ALTER TABLE {} ALTER v TYPE text",
        "42804",
    ),
    "a narrower type": (
        "ALTER TABLE {} ALTER v TYPE varchar(1)",
        "ALTER TABLE {} ALTER v TYPE text",
        "22001",
    ),
    "a right revoked": ("REVOKE INSERT ON {} FROM {}", "GRANT INSERT ON {} TO {}", "42501"),
    "a constraint": (
        "ALTER TABLE {} ADD CONSTRAINT c CHECK (n > 2)",
        "ALTER TABLE {} DROP CONSTRAINT c",
        "23514",
    ),
    "a trigger": (
        "ALTER TABLE {} ADD k bigint GENERATED ALWAYS AS (n) STORED; "
        "CREATE TRIGGER t AFTER INSERT ON {} FOR EACH ROW EXECUTE FUNCTION no_two()",
        "DROP TRIGGER t ON {}",
        "P0001",
    ),
    "a column that must be": ("ALTER TABLE {} ADD must text NOT NULL", "ALTER TABLE {} DROP must", "23502"),
    "a column of its own": (
        "ALTER TABLE {} ALTER n SET NOT NULL, ALTER n ADD GENERATED ALWAYS AS IDENTITY",
        "ALTER TABLE {} ALTER n DROP IDENTITY",
        "428C9",
    ),
    "a view": (
        "ALTER TABLE {} RENAME TO {}_old; CREATE VIEW {} AS SELECT DISTINCT * FROM {}_old",
        "DROP VIEW {}; ALTER TABLE {}_old RENAME TO {}",
        "55000",
    ),
}


@pytest.mark.parametrize("kind", CLOSED_BETWEEN)
def test_a_table_that_closes_between_the_phases_is_told_at_once(
    refusing: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows wait, are shown, and are committed when it is as it was."""
    monkeypatch.setattr(time, "sleep", Mock(side_effect=AssertionError("it was tried again")))
    broken, mended, state = CLOSED_BETWEEN[kind]
    table = made(refusing, "(n bigint, v text)")

    def run(statements: str) -> None:
        for statement in statements.replace("{}", table).split("; "):
            refusing.execute(statement)

    run("CREATE ROLE {} LOGIN; GRANT INSERT, SELECT ON {} TO {}; GRANT ALL ON SCHEMA public TO {}")
    PostgresSink(refusing.dsn, table).write(rows(9))
    for name in (f"{table}_ftlayer_staging", "ftlayer_staged", "ftlayer_commits"):
        refusing.execute(f"GRANT ALL ON {name} TO {table}")
    sink = PostgresSink(refusing.dsn.replace("user=postgres", f"user={table}"), table)
    message = sink.write(iter([pa.record_batch({"n": [1, 2], "v": ["secret-1", "b"]})]))
    run(broken)
    with pytest.raises(UncommittableError) as caught:
        sink.commit([message], 7)
    said = str(caught.value)
    for each in (
        f"table {table}",
        "2 rows of checkpoint 7",
        state,
        f"{table}_ftlayer_staging",
        "checkpoints refused",
    ):
        assert each in said
    assert "secret" not in said
    found = sink.refused([message])
    some = {"a constraint": [0, 1], "a trigger": [1], "a narrower type": [0]}.get(kind, [0, 1])
    assert [(one.row, json.loads(one.values)["n"]) for one in found] == [(row, row + 1) for row in some]
    assert all(state in one.why for one in found)
    run(mended)
    sink.commit([message], 7)
    assert numbers_in(refusing, table) == [1, 2]


def test_a_table_that_makes_other_rows_of_them_is_no_loss(refusing: Any) -> None:
    """Rules and triggers that put them elsewhere: what counts is what was staged."""
    table = made(refusing, "(n bigint); CREATE TABLE {}_too (n bigint)")
    sink = PostgresSink(refusing.dsn, table)
    refusing.execute(f"CREATE RULE r AS ON INSERT TO {table} DO ALSO INSERT INTO {table}_too VALUES (NEW.n)")
    sink.commit([sink.write(rows(1))], 1)
    refusing.execute(f"DROP RULE r ON {table}")
    refusing.execute(
        f"CREATE OR REPLACE FUNCTION elsewhere() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN INSERT INTO {table}_too VALUES (NEW.n); RETURN NULL; END $$"
    )
    refusing.execute(f"CREATE TRIGGER t BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION elsewhere()")
    sink.commit([sink.write(rows(2))], 2)
    assert numbers_in(refusing, table) == [1]
    assert numbers_in(refusing, f"{table}_too") == [1, 2]


@pytest.mark.parametrize(
    ("states", "is_final"),
    [
        ("08006 25006 40001 40P01 53100 53200 53300 55006 55P03 57014 57P01 57P03 58030 HV00N XX000", False),
        (
            "0A000 20000 21000 22003 23505 2F005 38000 42P01 42703 42501 42804 44000 54000 54001 55000 57P04",
            True,
        ),
        ("P0001 UR001 7X001 XX001 XX002", True),
    ],
)
def test_what_another_try_may_mend_is_no_end(
    refusing: Any, states: str, is_final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the server itself says: each class of SQLSTATE."""
    pauses = Mock()
    monkeypatch.setattr(time, "sleep", pauses)
    table = made(refusing, "(n bigint)")
    sink = PostgresSink(refusing.dsn, table)
    message = sink.write(rows(1))
    refusing.execute(
        "CREATE OR REPLACE FUNCTION raises() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'no' USING ERRCODE = TG_ARGV[0]; END $$"
    )
    for state in states.split():
        refusing.execute(f"CREATE TRIGGER r BEFORE INSERT ON {table} EXECUTE FUNCTION raises('{state}')")
        pauses.reset_mock()
        with pytest.raises(SinkError, match=state) as caught:
            sink.commit([message], 1)
        assert (type(caught.value) is UncommittableError) is is_final, state
        assert pauses.call_count == (0 if is_final else table_commits.TRIES - 1)
        refusing.execute(f"DROP TRIGGER r ON {table}")
    sink.commit([message], 1)
    assert numbers_in(refusing, table) == [1]


def test_a_database_that_is_gone_is_final_and_a_password_is_not(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", Mock())
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE short_lived")
        connection.execute("CREATE ROLE short_lived SUPERUSER LOGIN")
    dsn = server.dsn.replace("dbname=postgres user=postgres", "dbname=short_lived user=short_lived")
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE t (n bigint)")
    sink = PostgresSink(dsn, "t")
    message = sink.write(rows(1))
    server.execute("ALTER ROLE short_lived NOLOGIN")
    with pytest.raises(UncommittableError, match="not permitted to log in"):
        sink.commit([message], 1)
    server.execute("ALTER ROLE short_lived LOGIN")
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("ALTER DATABASE short_lived RENAME TO gone")
    with pytest.raises(UncommittableError, match='database "short_lived" does not exist'):
        sink.commit([message], 1)
    with pytest.raises(SinkTargetError, match="does not exist"):
        sink.write(rows(2))
    failed = psycopg.OperationalError('FATAL:  password authentication failed for user "ada"')
    assert fault_of(failed) is Fault.CLOSED


def test_rows_that_block_a_commit_are_taken_out(server: Any, sink: PostgresSink, table: str) -> None:
    """Those that exclude each other over messages, too; once."""
    written = [sink.write(rows(1, 2, 3)), sink.write(rows(3, 4)), sink.write(rows(2)), sink.write(rows(9))]
    committed = sink.write(rows(7))
    sink.commit([committed], 1)
    server.execute(f"INSERT INTO {table} VALUES (9)")
    again = PostgresSink(server.dsn, table)
    messages = [committed, *written]
    found = again.refused(messages)
    refused = [(written[1].id, 0, 3), (written[2].id, 0, 2), (written[3].id, 0, 9)]
    assert [(one.message, one.row, json.loads(one.values)["n"]) for one in found] == refused
    assert all("23505" in one.why for one in found)
    with pytest.raises(UncommittableError):
        again.commit(messages, 2)
    with pytest.raises(ValueError, match="made to fail"):
        again.refused(messages, Mock(side_effect=ValueError("made to fail")))
    taken: list[Any] = []
    assert again.refused(messages, lambda rows: taken.extend(rows) or True) == taken == found
    assert again.refused(messages) == []
    server.execute(f"CREATE TABLE {table}_b (LIKE {table} INCLUDING ALL)")
    PostgresSink(server.dsn, f"{table}_b").write(rows(8))
    server.execute(f"CREATE TABLE {table}_c (other text)")
    for other in (f"{table}_b", f"{table}_c"):
        with pytest.raises(ConfigError, match=f"are not staged for \"{other}\" by a sink named '{other}'"):
            PostgresSink(server.dsn, other).refused(messages)
    with pytest.raises(ConfigError, match="by a sink named 'x'"):
        PostgresSink(server.dsn, f"{table}_c", name="x").refused(messages)
    again.commit(messages, 2)
    again.commit(messages, 3)
    assert again.refused(messages) == []
    assert numbers_in(server, table) == [1, 2, 3, 4, 7, 9]
    assert staged_in(server, table) == 0


def test_a_batch_that_was_committed_is_not_refused_when_it_runs_again(
    server: Any, sink: PostgresSink, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query-1")
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_batch", lambda: "7")
    sink.commit([sink.write(rows(1))], 7)
    sink.commit([sink.write(rows(1))], 7)
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_batch", lambda: "8")
    with pytest.raises(RowsRejected, match="23505"):
        sink.write(rows(1))
    assert numbers_in(server, table) == [1]


# ---------------------------------------------------------------- losses


class Losing:
    """Loses the connection of a commit: before, in the middle, or behind what the server does."""

    def __init__(self, server: Any, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self._server = server
        self._patch = monkeypatch
        self._left = times

    def kill(self, connection: Any) -> None:
        if self._left:
            self._left -= 1
            self._server.execute("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)

    def around(self, name: str, *, before: bool) -> None:
        work = getattr(staging, name)

        def lost(connection: Any, *arguments: Any) -> Any:
            if before:
                self.kill(connection)
            result = work(connection, *arguments)
            if not before:
                self.kill(connection)
            return result

        self._patch.setattr(staging, name, lost)

    def behind_the_end(self) -> None:
        losing = self

        class Connection(psycopg.Connection[Any]):
            def commit(self) -> None:
                super().commit()
                if losing._left:
                    losing._left -= 1
                    raise psycopg.OperationalError("made to fail: the answer is lost")

        self._patch.setattr(psycopg, "connect", Connection.connect)


MOMENTS: dict[str, Callable[[Losing], None]] = {
    "before": lambda losing: losing.around("enter", before=True),
    "between id and rows": lambda losing: losing.around("move", before=True),
    "behind the rows": lambda losing: losing.around("move", before=False),
    "behind the end": Losing.behind_the_end,
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("times", [1, table_commits.TRIES])
def test_a_connection_that_is_lost_in_a_commit(
    server: Any, sink: PostgresSink, table: str, monkeypatch: pytest.MonkeyPatch, moment: str, times: int
) -> None:
    messages = [sink.write(rows(1, 2)), sink.write(rows(3))]
    with monkeypatch.context() as patch:
        MOMENTS[moment](Losing(server, patch, times))
        if times < table_commits.TRIES:
            sink.commit(messages, 1)
        else:
            with pytest.raises(SinkError, match="rows cannot be committed"):
                sink.commit(messages, 1)
            assert numbers_in(server, table) == ([1, 2, 3] if moment == "behind the end" else [])
    sink.commit(messages, 1)
    assert numbers_in(server, table) == [1, 2, 3]
    assert staged_in(server, table) == 0


def test_an_abort_is_tried_again(
    server: Any, sink: PostgresSink, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = sink.write(rows(1))
    with monkeypatch.context() as patch:
        Losing(server, patch, 1).around("drop", before=True)
        sink.abort([message], 1)
    assert staged_in(server, table) == 0


def test_a_connection_that_is_lost_while_rows_are_staged(
    server: Any, sink: PostgresSink, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Losing(server, patch, 1).around("note_staged", before=True)
        with pytest.raises(SinkError, match="rows cannot be staged"):
            sink.write(rows(1))
    with monkeypatch.context() as patch:
        Losing(server, patch, 1).behind_the_end()
        with pytest.raises(SinkError, match="the answer is lost"):
            sink.write(rows(1))
    sink.commit([sink.write(rows(1))], 1)
    assert numbers_in(server, table) == [1]


def test_a_server_that_crashes_keeps_what_is_staged(server: Any, sink: PostgresSink, table: str) -> None:
    message = sink.write(rows(1, 2))
    server.stop("immediate")
    with pytest.raises(SinkError, match="rows cannot be committed"):
        sink.commit([message], 1)
    with pytest.raises(SinkError, match="rows cannot be staged"):
        sink.write(rows(3))
    server.start()
    sink.commit([message], 1)
    assert numbers_in(server, table) == [1, 2]


def test_two_drivers_commit_at_once(server: Any, sink: PostgresSink, table: str) -> None:
    """A zombie's commit that is under way is waited for, and then there is nothing to do."""
    import threading

    messages = [sink.write(rows(1)), sink.write(rows(2))]
    entered = threading.Event()
    zombie = psycopg.connect(server.dsn)
    zombie.execute(f"LOCK TABLE {table}_ftlayer_staging")

    def commit() -> None:
        entered.set()
        sink.commit(messages, 1)

    threads = [threading.Thread(target=commit) for _ in range(3)]
    for thread in threads:
        thread.start()
    entered.wait()
    zombie.rollback()
    zombie.close()
    for thread in threads:
        thread.join()
    assert numbers_in(server, table) == [1, 2]


# ---------------------------------------------------------------- streaming queries


def test_a_batch_that_spark_runs_again_adds_nothing(
    server: Any, sink: PostgresSink, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query-1")
    sink.commit([sink.write(rows(1)), sink.write(rows(2))], 0)
    sink.commit([sink.write(rows(1, 2))], 0)
    sink.commit([sink.write(rows(3))], 1)
    assert numbers_in(server, table) == [1, 2, 3]
    assert staged_in(server, table) == 0
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query-2")
    sink.commit([sink.write(rows(4))], 0)
    assert numbers_in(server, table) == [1, 2, 3, 4]


# ---------------------------------------------------------------- what the dead leave


def test_what_the_dead_have_staged_is_cleaned(server: Any, table: str) -> None:
    dead, other = PostgresSink(server.dsn, table), PostgresSink(server.dsn, table, name="another job's")
    alive = PostgresSink(server.dsn, table)
    lost, kept = dead.write(rows(1)), dead.write(rows(2))
    theirs, mine = other.write(rows(3)), alive.write(rows(4))
    assert alive.clean([kept]) == []
    assert alive.clean([kept], older_than=0) == [lost.id]
    for sink, message in ((alive, kept), (other, theirs), (alive, mine)):
        sink.commit([message], 1)
    assert numbers_in(server, table) == [2, 3, 4]
    with pytest.raises(UncommittableError, match="did something else remove them"):
        alive.commit([lost], 1)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "commit", "again", "abort", "die"]), st.integers(0, 5)),
        max_size=20,
    )
)
def test_against_a_model(server: Any, events: list[tuple[str, int]]) -> None:
    """Checkpoints hold messages; what they hold is committed once or more, everything else is aborted or left."""
    table = f"model_{secrets.token_hex(6)}"
    server.execute(f"CREATE TABLE {table} (n bigint)")
    sink = PostgresSink(server.dsn, table)
    numbers = itertools.count()
    waiting: list[tuple[Any, list[int]]] = []
    committed: list[Any] = []
    expected: list[int] = []
    for happens, choice in events:
        if happens == "write":
            mine = [next(numbers) for _ in range(choice)]
            waiting.append((sink.write(rows(*mine)), mine))
        elif happens == "commit":
            messages, waiting = waiting, []
            sink.commit([message for message, _ in messages], choice)
            committed += [message for message, _ in messages]
            expected += [number for _, mine in messages for number in mine]
        elif happens == "again":
            sink.commit(committed[choice:], choice)
        elif happens == "abort":
            sink.abort([message for message, _ in waiting] + committed[choice:], choice)
            waiting = []
        else:
            sink = PostgresSink(server.dsn, table)
            waiting = waiting[:choice]
    assert numbers_in(server, table) == expected


# ---------------------------------------------------------------- values


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
INTS = st.integers(-(2**63), 2**63 - 1)
TIMES = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1)).map(
    lambda t: t.replace(fold=0)
)
DECIMALS = st.decimals(-(10**6), 10**6, places=4, allow_nan=False)
COLUMNS: dict[str, tuple[str, pa.DataType, Any]] = {
    "i": ("bigint", pa.int64(), INTS),
    "f": ("double precision", pa.float64(), st.floats()),
    "b": ("boolean", pa.bool_(), st.booleans()),
    "s": ("text", pa.string(), WORDS),
    "d": ("date", pa.date32(), st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))),
    "t": ("timestamp", pa.timestamp("us"), TIMES),
    "z": ("timestamptz", pa.timestamp("us", "UTC"), TIMES.map(lambda t: t.replace(tzinfo=datetime.UTC))),
    "n": ("numeric(20,4)", pa.decimal128(20, 4), DECIMALS),
    "y": ("bytea", pa.binary(), st.binary(max_size=8)),
    "li": ("bigint[]", pa.list_(pa.int64()), st.lists(st.none() | INTS, max_size=3)),
    "ls": ("text[]", pa.list_(pa.string()), st.lists(st.none() | WORDS, max_size=3)),
    "ly": ("bytea[]", pa.list_(pa.binary()), st.lists(st.binary(max_size=4), max_size=3)),
    "j": (
        "jsonb",
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": INTS, "b": WORDS}),
    ),
    "e": ("text", pa.dictionary(pa.int32(), pa.string()), WORDS),
    "v": ("interval", pa.duration("us"), st.timedeltas(datetime.timedelta(0), datetime.timedelta(days=99))),
}


def shown(value: Any) -> str:
    """A value as text: NaN is equal to itself, 1.0 is not 1."""
    if isinstance(value, Decimal):
        return repr(value.quantize(Decimal("1.0000")))
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return repr(value.astimezone(datetime.UTC))
    return repr(sorted(value.items())) if isinstance(value, dict) else repr(value)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    st.lists(
        st.fixed_dictionaries({name: st.none() | c[2] for name, c in COLUMNS.items()}), min_size=1, max_size=4
    )
)
def test_values_arrive_as_they_were_sent(server: Any, values: list[dict[str, Any]]) -> None:
    table = f"typed_{secrets.token_hex(6)}"
    columns = ", ".join(f"{name} {column[0]}" for name, column in COLUMNS.items())
    server.execute(f"CREATE TABLE {table} (at bigint, {columns})")
    schema = pa.schema([("at", pa.int64()), *((name, column[1]) for name, column in COLUMNS.items())])
    given = [{"at": at, **row} for at, row in enumerate(values)]
    sink = PostgresSink(server.dsn, table)
    sink.commit([sink.write(iter([pa.RecordBatch.from_pylist(given, schema)]))], 1)
    found = server.execute(f"SELECT {', '.join(schema.names)} FROM {table} ORDER BY at")
    assert [list(map(shown, row)) for row in found] == [
        [shown(row[name]) for name in schema.names] for row in given
    ]
    server.execute(f"DROP TABLE {table}, {table}_ftlayer_staging")


# ---------------------------------------------------------------- tables and names


def test_tables_in_schemas_with_odd_names(server: Any) -> None:
    server.execute('CREATE SCHEMA IF NOT EXISTS "My Schema"')
    server.execute('CREATE TABLE "My Schema"."My ""Table" (n bigint)')
    sink = PostgresSink(server.dsn, 'My Schema.My "Table')
    sink.commit([sink.write(rows(1))], 1)
    assert server.execute('SELECT n FROM "My Schema"."My ""Table"') == [(1,)]


def test_names_that_look_like_placeholders(server: Any) -> None:
    """It would come to light at the first commit, and every commit would fail."""
    server.execute('CREATE SCHEMA "100%"')
    server.execute('CREATE TABLE "100%"."a%st%" ("%" bigint, "%s" bigint, "{}" bigint)')
    sink = PostgresSink(server.dsn, "100%.a%st%", name="it's %s\\")
    batch = pa.record_batch({"%s": [1], "%": [2], "{}": [3]})
    first, second, third = (sink.write(iter([batch])) for _ in range(3))
    sink.abort([second], 1)
    sink.commit([first], 1)
    sink.commit([first], 1)
    assert server.execute('SELECT "%", "%s", "{}" FROM "100%"."a%st%"') == [(2, 1, 3)]
    assert server.execute('SELECT sink, id, checkpoint FROM "100%".ftlayer_commits') == [
        ("it's %s\\", first.id, 1)
    ]
    other = PostgresSink(server.dsn, "100%.a%st%", name="it's %s\\")
    assert other.clean() == []
    assert other.clean(older_than=0.0) == [third.id]


def test_the_staging_table_has_an_index_however_long_its_name(server: Any) -> None:
    for name in ("é" * 23, "x" * 46, "x" * 45 + "y"):
        server.execute(f'CREATE TABLE "{name}" (n bigint)')
        PostgresSink(server.dsn, name).write(rows(1))
        indexes = server.execute("SELECT 1 FROM pg_indexes WHERE tablename = %s", f"{name}_ftlayer_staging")
        assert len(indexes) == 1


def test_a_column_that_came_later(server: Any, sink: PostgresSink, table: str) -> None:
    early = sink.write(rows(1))
    server.execute(f"ALTER TABLE {table} ADD COLUMN late text")
    late = sink.write(iter([pa.record_batch({"late": ["x"], "n": [2]})]))
    sink.commit([early, late], 1)
    assert server.execute(f"SELECT n, late FROM {table} ORDER BY n") == [(1, None), (2, "x")]
    server.execute(f"ALTER TABLE {table} ALTER COLUMN late TYPE bigint USING 0")
    with pytest.raises(SinkError, match=r"column 'late' .* is of type bigint and was text"):
        sink.write(rows(3))


def test_what_cannot_be_used_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="table: expected"):
        PostgresSink(server.dsn, "a.b.c")
    with pytest.raises(ConfigError, match="table: expected"):
        PostgresSink(server.dsn, "x" * 60)
    with pytest.raises(ConfigError, match="dsn: not a connection string"):
        PostgresSink("nonsense nonsense", "t")
    with pytest.raises(ConfigError, match="dsn: expected"):
        PostgresSink(None, "t")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="table: expected"):
        PostgresSink(server.dsn, 7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name: expected a text, got 7"):
        PostgresSink(server.dsn, "t", name=7)  # type: ignore[arg-type]
    with pytest.raises(SinkError, match='table "nosuch" is not there'):
        PostgresSink(server.dsn, "nosuch").write(rows(1))
    with pytest.raises(UncommittableError, match="expected messages of PostgresSink"):
        PostgresSink(server.dsn, "t").commit([FileMessage(None, 0, "")], 1)
    secret = PostgresSink("host=/nowhere password=secret dbname=d", "t")
    with pytest.raises(SinkError, match="table t of d at /nowhere: rows cannot be staged") as caught:
        secret.write(rows(1))
    assert "secret" not in str(caught.value)


def test_psycopg_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[postgres\]'"):
        PostgresSink("dbname=x", "t")
