"""Schemas as text, compared with Spark's own conversion of the same types."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types

from ftlayer.errors import ConfigError
from ftlayer.functions.data_sources import to_arrow_schema
from ftlayer.topology.ddl import parse_ddl

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
SIMPLE = st.sampled_from(
    [
        types.BooleanType(),
        types.ByteType(),
        types.ShortType(),
        types.IntegerType(),
        types.LongType(),
        types.FloatType(),
        types.DoubleType(),
        types.StringType(),
        types.BinaryType(),
        types.DateType(),
        types.TimestampType(),
        types.TimestampNTZType(),
        types.NullType(),
    ]
)
DECIMALS = st.integers(1, 38).flatmap(
    lambda precision: st.builds(types.DecimalType, st.just(precision), st.integers(0, precision))
)


def structs(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[types.StructType]:
    return st.lists(st.tuples(NAMES, inner), min_size=1, max_size=4, unique_by=lambda pair: pair[0]).map(
        lambda pairs: types.StructType([types.StructField(name, type_) for name, type_ in pairs])
    )


TYPES = st.recursive(
    SIMPLE | DECIMALS,
    lambda inner: (
        st.builds(types.ArrayType, inner)
        | st.builds(types.MapType, inner.filter(lambda key: key != types.NullType()), inner)
        | structs(inner)
    ),
    max_leaves=6,
)


@given(structs(TYPES))
def test_a_schema_is_read_as_spark_would(struct: types.StructType) -> None:
    text = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in struct)
    assert parse_ddl(text).equals(to_arrow_schema(struct))


@given(structs(TYPES))
def test_case_colons_and_spaces_do_not_matter(struct: types.StructType) -> None:
    text = ",\n ".join(f"`{field.name}` : {field.dataType.simpleString()}" for field in struct)
    text = text.replace("<", " < ").replace(">", " > ")
    assert parse_ddl(text).equals(to_arrow_schema(struct))
    one = parse_ddl("A BIGINT, b Array<STRING>")
    assert one.names == ["A", "b"]
    assert one.field("b").type == pa.list_(pa.string())


def test_what_spark_writes_beside_a_type() -> None:
    schema = parse_ddl(
        "id bigint NOT NULL COMMENT 'it''s', `a ``b` varchar(20), c char(3), d decimal, e dec(7), not int".replace(
            "it''s", "its \\' own"
        )
    )
    assert schema.names == ["id", "a `b", "c", "d", "e", "not"]
    assert [field.nullable for field in schema] == [False, True, True, True, True, True]
    assert schema.types[1:5] == [pa.string(), pa.string(), pa.decimal128(10, 0), pa.decimal128(7, 0)]
    assert parse_ddl("s struct<>").field(0).type == pa.struct([])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a column's name at position 0, found the end"),
        ("id", "expected a type at position 2"),
        ("id bigint name", "',' or the end at position 10, found 'name'"),
        ("id bigint,", "a column's name at position 10"),
        ("id number", "expected a type at position 3, found 'number'"),
        ("id array<int", "expected '>' at position 12"),
        ("id map<int>", "expected ',' at position 10"),
        ("id array", "expected '<'"),
        ("id decimal(39)", "a number from 1 to 38"),
        ("id decimal(5,6)", "a number from 0 to 5"),
        ("id decimal(" + "9" * 5_000 + ")", "a number from 1 to 38"),
        ("id varchar(0)", "a number from 1"),
        ("id bigint not", "expected NULL"),
        ("id bigint comment x", "a comment in single quotes"),
        ("id void not null", "a type that has values"),
        ("id map<void, int>", "a type for the map's key"),
        ("id bigint; b int", "found '; b int'"),
        ("id bigint, id int", "two columns are called 'id'"),
        ("a " + "array<" * 200, "at most 100 types within types"),
        ("a " + "struct<a " * 200, "at most 100 types within types"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_ddl(text)
    assert says in str(caught.value)


@given(st.text(alphabet="ab <>(),:`'12 array int not null", max_size=40))
def test_any_text_gives_a_schema_or_a_config_error(text: str) -> None:
    try:
        schema = parse_ddl(text)
    except ConfigError:
        return
    assert schema.names
