"""PostgreSQL holds each record exactly once, whatever is lost, repeated or killed."""

from __future__ import annotations

import datetime
import itertools
import pickle
import secrets
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.errors import ConfigError, SinkError, UncommittableError
from ftlayer.sinks import FileMessage, PostgresSink, postgres, staging

_tables = itertools.count()


@pytest.fixture
def table(server: Any) -> str:
    """An empty table with a number."""
    name = f"numbers_{next(_tables)}"
    server.execute(f"CREATE TABLE {name} (n bigint PRIMARY KEY, word text NOT NULL DEFAULT 'none')")
    return name


@pytest.fixture
def sink(server: Any, table: str, monkeypatch: pytest.MonkeyPatch) -> PostgresSink:
    monkeypatch.setattr(postgres, "TRY_AGAIN_S", 0)
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
    with pytest.raises(SinkError, match=r"rows cannot be staged: .*0x00"):
        sink.write(iter([pa.record_batch({"n": [1], "word": ["\0"]})]))
    assert staged_in(server, table) == 0
    assert server.execute("SELECT * FROM ftlayer_staged WHERE sink = %s", table) == []


def test_a_row_that_the_table_refuses_fails_the_whole_commit(
    server: Any, sink: PostgresSink, table: str
) -> None:
    good, bad = sink.write(rows(1, 2)), sink.write(rows(3, 3))
    with pytest.raises(SinkError, match=r"rows cannot be committed: .*duplicate key .*SQLSTATE 23505"):
        sink.commit([good, bad], 1)
    assert numbers_in(server, table) == []
    sink.commit([good], 1)
    assert numbers_in(server, table) == [1, 2]


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
@pytest.mark.parametrize("times", [1, 3])
def test_a_connection_that_is_lost_in_a_commit(
    server: Any, sink: PostgresSink, table: str, monkeypatch: pytest.MonkeyPatch, moment: str, times: int
) -> None:
    messages = [sink.write(rows(1, 2)), sink.write(rows(3))]
    with monkeypatch.context() as patch:
        MOMENTS[moment](Losing(server, patch, times))
        if times < postgres.TRIES:
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
    monkeypatch.setattr(postgres, "streaming_query", lambda: "query-1")
    sink.commit([sink.write(rows(1)), sink.write(rows(2))], 0)
    sink.commit([sink.write(rows(1, 2))], 0)
    sink.commit([sink.write(rows(3))], 1)
    assert numbers_in(server, table) == [1, 2, 3]
    assert staged_in(server, table) == 0
    monkeypatch.setattr(postgres, "streaming_query", lambda: "query-2")
    sink.commit([sink.write(rows(4))], 0)
    assert numbers_in(server, table) == [1, 2, 3, 4]


# ---------------------------------------------------------------- what the dead leave


def test_what_the_dead_have_staged_is_cleaned(server: Any, table: str) -> None:
    dead, other = PostgresSink(server.dsn, table), PostgresSink(server.dsn, table, name="another job's")
    alive = PostgresSink(server.dsn, table)
    lost, kept = dead.write(rows(1)), dead.write(rows(2))
    theirs, mine = other.write(rows(3)), alive.write(rows(4))
    assert alive.clean([kept]) == []
    assert alive.clean([kept], older_than_s=0) == [lost.id]
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
    assert other.clean(older_than_s=0.0) == [third.id]


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
    with pytest.raises(UncommittableError, match="expected the messages of a PostgresSink"):
        PostgresSink(server.dsn, "t").commit([FileMessage(None, 0, "")], 1)
    secret = PostgresSink("host=/nowhere password=secret dbname=d", "t")
    with pytest.raises(SinkError, match="table t of d at /nowhere: rows cannot be staged") as caught:
        secret.write(rows(1))
    assert "secret" not in str(caught.value)


def test_psycopg_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install 'ftlayer\[postgres\]'"):
        PostgresSink("dbname=x", "t")
