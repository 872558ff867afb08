"""The key hash against a plain Python model, and against Spark itself."""

from __future__ import annotations

import struct
from decimal import Context
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import ConfigError, UnhashableKeyError
from ftlayer.records.keyhash import check_hashable, key_column, partition_of, spark_hash

# ---------------------------------------------------------------- model


def word(state: int, value: int) -> int:
    value = value * 0xCC9E2D51 % 2**32
    value = ((value << 15) | (value >> 17)) * 0x1B873593 % 2**32
    state ^= value
    return (((state << 13) | (state >> 19)) % 2**32 * 5 + 0xE6546B64) % 2**32


def finish(state: int, length: int) -> int:
    state ^= length
    state = (state ^ (state >> 16)) * 0x85EBCA6B % 2**32
    state = (state ^ (state >> 13)) * 0xC2B2AE35 % 2**32
    return state ^ (state >> 16)


def hash_int(value: int, seed: int) -> int:
    return finish(word(seed, value % 2**32), 4)


def hash_long(value: int, seed: int) -> int:
    return finish(word(word(seed, value % 2**32), (value >> 32) % 2**32), 8)


def hash_bytes(value: bytes, seed: int) -> int:
    whole = len(value) // 4 * 4
    for (four,) in struct.iter_unpack("<I", value[:whole]):
        seed = word(seed, four)
    for byte in struct.unpack(f"{len(value) - whole}b", value[whole:]):
        seed = word(seed, byte % 2**32)
    return finish(seed, len(value))


def hash_value(value: Any, type_: pa.DataType, seed: int) -> int:
    if value is None:
        return seed
    if pa.types.is_boolean(type_) or (pa.types.is_integer(type_) and type_.bit_width < 64):
        return hash_int(int(value), seed)
    if pa.types.is_int64(type_):
        return hash_long(value, seed)
    if pa.types.is_float64(type_):
        bits = 0x7FF8 << 48 if value != value else struct.unpack("<q", struct.pack("<d", value + 0.0))[0]
        return hash_long(bits, seed)
    if pa.types.is_decimal(type_):
        unscaled = int(value.scaleb(type_.scale, Context(prec=40)))
        if type_.precision <= 18:
            return hash_long(unscaled, seed)
        length = (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1
        return hash_bytes(unscaled.to_bytes(length, "big", signed=True), seed)
    if isinstance(value, str | bytes):
        return hash_bytes(value.encode() if isinstance(value, str) else value, seed)
    if pa.types.is_struct(type_):
        for i in range(type_.num_fields):
            seed = hash_value(value[type_.field(i).name], type_.field(i).type, seed)
        return seed
    for item in value:
        seed = hash_value(item, type_.value_type, seed)
    return seed


def model(*columns: pa.Array) -> list[int]:
    hashes = [42] * len(columns[0])
    for column in columns:
        hashes = [hash_value(v, column.type, h) for v, h in zip(column.to_pylist(), hashes, strict=True)]
    return [h - 2**32 if h >= 2**31 else h for h in hashes]


# ---------------------------------------------------------------- against the model

scalars = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(),
    pa.string(): st.text(max_size=12),
    pa.large_string(): st.text(max_size=12),
    pa.string_view(): st.text(max_size=30),
    pa.binary(): st.binary(max_size=12),
    pa.large_binary(): st.binary(max_size=12),
    pa.binary_view(): st.binary(max_size=30),
    pa.binary(5): st.binary(min_size=5, max_size=5),
    pa.decimal128(10, 2): st.decimals(-(10**7), 10**7, places=2),
    pa.decimal128(38, 0): st.integers(-(10**38) + 1, 10**38 - 1),
    pa.null(): st.none(),
}


@st.composite
def typed_values(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """An Arrow type, nested up to ``depth``, and a strategy of its values (None included)."""
    kind = draw(st.sampled_from(["scalar", "scalar", "list", "struct"] if depth else ["scalar"]))
    if kind == "scalar":
        type_ = draw(st.sampled_from(sorted(scalars, key=str)))
        return type_, st.none() | scalars[type_]
    if kind == "list":
        item, values = draw(typed_values(depth - 1))
        make = draw(st.sampled_from([pa.list_, pa.large_list, pa.list_view, pa.large_list_view]))
        return make(item), st.none() | st.lists(values, max_size=4)
    fields = draw(st.lists(typed_values(depth - 1), min_size=1, max_size=3))
    names = [f"f{i}" for i in range(len(fields))]
    values = st.fixed_dictionaries(dict(zip(names, (v for _, v in fields), strict=True)))
    return pa.struct([(n, t) for n, (t, _) in zip(names, fields, strict=True)]), st.none() | values


@given(st.data())
def test_every_type_follows_the_model_sliced_or_not(data: st.DataObject) -> None:
    columns = []
    n = data.draw(st.integers(0, 12))
    for _ in range(data.draw(st.integers(1, 3))):
        type_, values = data.draw(typed_values())
        columns.append(pa.array(data.draw(st.lists(values, min_size=n, max_size=n)), type_))
    whole = model(*columns)
    assert spark_hash(columns).tolist() == whole
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert spark_hash([c.slice(start, stop - start) for c in columns]).tolist() == whole[start:stop]
    chunked = [pa.chunked_array([c[:start], c[start:stop], c[stop:]]) for c in columns]
    assert spark_hash(chunked).tolist() == whole


@given(
    st.lists(st.none() | st.text(max_size=3), max_size=20),
    st.sampled_from([pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32()]),
)
def test_dictionaries_hash_like_their_values(values: list[str | None], index: pa.DataType) -> None:
    plain = pa.array(values, pa.string())
    encoded = pa.DictionaryArray.from_arrays(
        plain.dictionary_encode().indices.cast(index), plain.dictionary_encode().dictionary
    )
    with_null = pa.DictionaryArray.from_arrays(pa.array(range(len(values)), index), plain)
    for column in (encoded, with_null):
        assert spark_hash([column]).tolist() == model(plain)
        assert spark_hash([column[1:]]).tolist() == model(plain[1:])


def test_fixed_size_lists_hash_like_lists() -> None:
    values = [[1, 2], None, [None, 4], [5, 6]]
    fixed = pa.array(values, pa.list_(pa.int32(), 2))
    assert spark_hash([fixed[1:]]).tolist() == model(pa.array(values[1:], pa.list_(pa.int32())))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.integers(1, 2**31 - 1))
def test_partition_is_the_positive_remainder(hashes: list[int], partitions: int) -> None:
    assert partition_of(np.array(hashes, np.int32), partitions).tolist() == [h % partitions for h in hashes]


# ---------------------------------------------------------------- against Spark


def spark_hashes(spark: Any, table: pa.Table, keys: list[list[str]]) -> list[list[int]]:
    from pyspark.sql import functions as f

    frame = spark.createDataFrame(table)
    hashed = frame.select(*[f.hash(*key).alias(str(i)) for i, key in enumerate(keys)]).toArrow()
    return [hashed.column(str(i)).to_pylist() for i in range(len(keys))]


@pytest.mark.spark
def test_every_key_type_hashes_as_spark_does(spark: Any, key_table: pa.Table) -> None:
    keys = [[name] for name in key_table.column_names]
    for (name,), expected in zip(keys, spark_hashes(spark, key_table, keys), strict=True):
        assert spark_hash([key_table.column(name)]).tolist() == expected, name


@pytest.mark.spark
def test_several_columns_hash_as_spark_does(spark: Any, key_table: pa.Table) -> None:
    rng = np.random.default_rng(2)
    names = key_table.column_names
    keys = [rng.permutation(names)[: rng.integers(2, 6)].tolist() for _ in range(25)] + [names]
    for key, expected in zip(keys, spark_hashes(spark, key_table, keys), strict=True):
        assert spark_hash([key_table.column(name) for name in key]).tolist() == expected, key


@pytest.mark.spark
@pytest.mark.parametrize("partitions", [1, 3, 7])
def test_rows_land_where_repartition_puts_them(spark: Any, key_table: pa.Table, partitions: int) -> None:
    from pyspark.sql import functions as f

    table = key_table.slice(0, 300).append_column("row", pa.array(range(300)))
    frame = spark.createDataFrame(table).cache()
    keys = [[name] for name in key_table.column_names] if partitions == 7 else []
    keys += [["string", "long"], ["struct", "decimal_38_0", "double"]]
    for key in keys:
        placed = (
            frame.repartition(partitions, *key).select("row", f.spark_partition_id().alias("p")).toArrow()
        )
        expected = placed.sort_by("row").column("p").to_pylist()
        hashes = spark_hash([table.column(name) for name in key])
        assert partition_of(hashes, partitions).tolist() == expected, key
    frame.unpersist()


@pytest.mark.spark
def test_a_field_of_a_struct_is_the_column_spark_reads(spark: Any, key_table: pa.Table) -> None:
    batch = key_table.combine_chunks().to_batches()[0]
    keys = ["struct.s", "struct.d", "struct_deep.inner.l"]
    for key, expected in zip(keys, spark_hashes(spark, key_table, [[key] for key in keys]), strict=True):
        assert spark_hash([key_column(batch, key)]).tolist() == expected, key


@pytest.mark.spark
@pytest.mark.parametrize(
    ("expression", "arrow_type"),
    [
        ("map(1, 2)", pa.map_(pa.int32(), pa.int32())),
        ("array(map(1, 2))", pa.list_(pa.map_(pa.int32(), pa.int32()))),
        ("named_struct('a', map(1, 2))", pa.struct([("a", pa.map_(pa.int32(), pa.int32()))])),
        (
            "parse_json('1')",
            pa.struct(
                [
                    pa.field("value", pa.binary()),
                    pa.field("metadata", pa.binary(), metadata={"variant": "true"}),
                ]
            ),
        ),
    ],
)
def test_what_spark_refuses_is_refused(spark: Any, expression: str, arrow_type: pa.DataType) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=r"HASH_MAP_TYPE|HASH_VARIANT_TYPE"):
        spark.sql(f"select hash({expression})")
    with pytest.raises(UnhashableKeyError, match="'k'"):
        check_hashable(pa.schema([("k", arrow_type)]), ["k"])


# ---------------------------------------------------------------- refusals


def test_all_key_types_pass_the_check(key_table: pa.Table) -> None:
    check_hashable(key_table.schema, key_table.column_names)


@pytest.mark.parametrize(
    "arrow_type",
    [
        pa.uint8(),
        pa.uint64(),
        pa.float16(),
        pa.date64(),
        pa.time32("s"),
        pa.time64("us"),
        pa.timestamp("ns"),
        pa.timestamp("s", "UTC"),
        pa.duration("ms"),
        pa.decimal256(50, 0),
        pa.decimal64(5, 0),
        pa.month_day_nano_interval(),
        pa.map_(pa.string(), pa.int32()),
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.sparse_union([pa.field("a", pa.int32())]),
        pa.dictionary(pa.int8(), pa.uint8()),
        pa.list_(pa.struct([("deep", pa.uint16())])),
        pa.uuid(),
    ],
    ids=str,
)
def test_unhashable_types_name_the_column(arrow_type: pa.DataType) -> None:
    schema = pa.schema([("good", pa.int32()), ("bad", arrow_type)])
    check_hashable(schema, ["good"])
    with pytest.raises(UnhashableKeyError, match="key column 'bad'"):
        check_hashable(schema, ["good", "bad"])
    with pytest.raises(UnhashableKeyError, match="key column 1"):
        spark_hash([pa.nulls(0, pa.int32()), pa.chunked_array([], arrow_type)])


def test_columns_that_do_not_exist_are_named() -> None:
    schema = pa.schema(
        [("a", pa.struct([("b", pa.int32())])), ("c", pa.int32()), ("d", pa.int32()), ("d", pa.int32())]
    )
    check_hashable(schema, ["a.b", "c"])
    for name, message in [
        ("x", "no column is called 'x'"),
        ("d", "2 columns are called 'd'"),
        ("a.x", "has no field 'x'"),
        ("c.b", "has no field 'b'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_hashable(schema, [name])


def test_a_column_whose_name_has_a_dot_comes_first() -> None:
    batch = pa.RecordBatch.from_pydict({"a.b": [1], "a": [{"b": 2}]})
    assert key_column(batch, "a.b").to_pylist() == [1]


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one column"):
        spark_hash([])
    with pytest.raises(ValueError, match="key column 1 has 2 rows, expected 1"):
        spark_hash([pa.array([1]), pa.array([1, 2])])
    with pytest.raises(ConfigError, match="at least 1"):
        partition_of(np.zeros(1, np.int32), 0)
