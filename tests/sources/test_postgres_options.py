"""Options of the sources of PostgreSQL, the types of columns, and whose positions are taken."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.connectors.postgres.catalog import lsn_of, lsn_text, schema_of_changes, to_column, type_of
from ftlayer.connectors.postgres.source import Settling
from ftlayer.errors import ConfigError, SourceError
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.sources import (
    PostgresChangesDataSource,
    PostgresChangesSource,
    PostgresTableDataSource,
    PostgresTableSource,
)
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.operators import Member

DSN = "host=localhost dbname=shop user=ada password=secret"
NUMBERS = pa.schema([("n", pa.int64())])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dsn": 7}, "dsn: expected a connection string"),
        ({"dsn": "nothing like it"}, "dsn: not a connection string"),
        ({"table": ""}, "table: expected 'table' or 'schema.table'"),
        ({"table": "a.b.c"}, "table: expected 'table' or 'schema.table'"),
        ({"table": ".b"}, "table: expected 'table' or 'schema.table'"),
        ({"slot": "Not-A-Slot"}, "slot: expected up to 55 of a-z"),
        ({"slot": None}, "slot: expected"),
        ({"publication": 7}, "publication: expected"),
        ({"columns": "n"}, "columns: expected a list of names"),
        ({"columns": ["n", "n"]}, "columns: .* has a name twice"),
        ({"as_text": [7]}, "as_text: expected the name of a column"),
        ({"initial": "always"}, "initial: expected 'none' or 'copy', got 'always'"),
        ({"max_transaction_rows": 0}, "max_transaction_rows: "),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout: "),
    ],
)
def test_a_wrong_option_of_changes_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PostgresChangesSource(**{"dsn": DSN, "table": "t", "slot": "s", **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dsn": 7}, "dsn: expected a connection string"),
        ({"table": "."}, "table: expected 'table' or 'schema.table'"),
        ({"column": ""}, "column: expected the name of a column"),
        ({"key": "n"}, "key: expected a list of names"),
        ({"key": ["id"]}, "key: 'id' is the column itself"),
        ({"after": 7}, "after: expected a value of the column as a text"),
        ({"delay": -1}, "delay: "),
        ({"poll_interval": 0}, "poll_interval: "),
    ],
)
def test_a_wrong_option_of_tables_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PostgresTableSource(**{"dsn": DSN, "table": "t", "column": "id", **given})


def test_psycopg_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[postgres\]'"):
        PostgresChangesSource(DSN, "t", "s")


def test_errors_name_no_password() -> None:
    assert (
        PostgresChangesSource(DSN, "shop.t", "s").place == 'slot \'s\', table "shop"."t" of shop at localhost'
    )


def test_a_slot_has_one_reader() -> None:
    source = PostgresChangesSource(DSN, "t", "s")
    source.schema = schema_of_changes(list(NUMBERS))
    with pytest.raises(ConfigError, match=r"parallelism: .* is read by one subtask, and there are 2"):
        source.open(Member("job/t", 0, 2), {}, stored=True)
    with pytest.raises(ConfigError, match="source: parallelism: a PostgresChangesSource is read by 1, got 2"):
        GraphBuilder("job", parallelism=2).source(source, uid="t", parallelism=2)
    builder = GraphBuilder("job", parallelism=2)
    builder.source(source, uid="t").sink(print, uid="out")
    (node,) = (node for node in builder.build().nodes if node.uid == "t")
    assert node.parallelism == 1
    copy = pickle.loads(pickle.dumps(source))
    assert copy.schema == source.schema


def test_a_tables_column_with_a_name_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="columns: '_lsn' is also a name of the change's own"):
        schema_of_changes([pa.field("_lsn", pa.int64())])


def test_data_sources_hand_their_options_on() -> None:
    options = {"dsn": DSN, "table": "t", "slot": "s", "columns": "a, b", "asText": "a", "initial": "copy"}
    changes = PostgresChangesDataSource({}).source(DataSourceOptions(options, ""))
    assert (changes._wanted, changes._as_text, changes.copies) == (("a", "b"), ("a",), True)
    options = {"dsn": DSN, "table": "t", "column": "at", "key": "id", "after": "2026-01-01", "delay": "5s"}
    table = PostgresTableDataSource({}).source(DataSourceOptions(options, ""))
    assert (table._key, table.after, table._delay_ms) == (("id",), "2026-01-01", 5_000)
    with pytest.raises(ConfigError, match="dsn: expected"):
        PostgresTableDataSource({}).source(DataSourceOptions({}, ""))


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        ("integer", pa.int32()),
        ("numeric(38,10)", pa.decimal128(38, 10)),
        ("numeric(39,10)", pa.string()),
        ("numeric", pa.string()),
        ("timestamp(3) with time zone", pa.timestamp("us", "UTC")),
        ("timestamp without time zone", pa.timestamp("us")),
        ("character varying(10)", pa.string()),
        ("integer[]", pa.string()),
        ("uuid", pa.string()),
    ],
)
def test_types_have_their_counterparts(named: str, kind: pa.DataType) -> None:
    assert type_of(named) == kind


@pytest.mark.parametrize(
    ("named", "bad"),
    [
        ("date", "infinity"),
        ("date", "0044-03-15 BC"),
        ("timestamp with time zone", "-infinity"),
        ("timestamp with time zone", "2026-01-01 00:00:00+01"),
        ("numeric(5,2)", "NaN"),
        ("smallint", "70000"),
    ],
)
def test_a_value_that_a_column_cannot_have_is_shown(named: str, bad: str) -> None:
    with pytest.raises(SourceError, match=r"column 'c': the value .*as_text=\['c'\]"):
        to_column([None, bad], pa.field("c", type_of(named)))
    with pytest.raises(
        SourceError, match=r"no int32: if .*start the program again.*else read .*as_text=\['n'\]"
    ):
        to_column(["3000000000"], pa.field("n", pa.int32()))


def test_values_may_be_missing() -> None:
    for kind in ("boolean", "bytea", "real", "date", "timestamp with time zone", "numeric(5,2)", "text"):
        assert to_column([None, None], pa.field("c", type_of(kind))).to_pylist() == [None, None]


def test_places_in_the_log_are_written_as_postgresql_does() -> None:
    assert lsn_of("16/B374D848") == (0x16 << 32) + 0xB374D848
    assert lsn_text(lsn_of("16/B374D848")) == "16/B374D848"


def test_a_row_is_settled_when_all_that_ran_have_ended() -> None:
    settling = Settling("row", {"3/1", "4/1"})
    assert not settling.is_settled({"3/1", "5/9"}, set())
    assert not settling.is_settled({"4/1"}, set())
    assert settling.is_settled({"5/9"}, set())


def test_one_that_was_prepared_meanwhile_has_not_ended() -> None:
    settling = Settling("row", {"3/1"})
    assert not settling.is_settled({"3/1"}, set())
    assert not settling.is_settled(set(), {"741"})
    assert not settling.is_settled(set(), {"741", "800"})
    assert settling.is_settled(set(), {"800"}), "that one came later"
