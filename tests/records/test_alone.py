"""Rows by themselves: values as before, and nothing of their neighbours."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ftlayer.records.ipc import as_stream, may_share, row_alone

SECRET = b"secret"
TEXTS = ["secret 0", "secret 1", "own", "secret 3", "secret 4"]
PLACES = pa.array(range(len(TEXTS)), pa.int32())
DICTIONARY = pa.array(TEXTS).dictionary_encode()

COLUMNS = {
    "string": pa.array(TEXTS),
    "string with nulls": pa.array(["secret", None, "own", None, "secret"]),
    "null": pa.array(["secret", "secret", None, "secret", "secret"]),
    "binary": pa.array([text.encode() for text in TEXTS]),
    "fixed": pa.array([text.ljust(8).encode() for text in TEXTS], pa.binary(8)),
    "list": pa.array([[text, text] for text in TEXTS]),
    "large list": pa.array([[text] for text in TEXTS], pa.large_list(pa.string())),
    "fixed list": pa.array([[text, text] for text in TEXTS], pa.list_(pa.string(), 2)),
    "list view": pa.array([[text] for text in TEXTS], pa.list_view(pa.string())),
    "struct": pa.array([{"a": text} for text in TEXTS]),
    "map": pa.array([[(text, text)] for text in TEXTS], pa.map_(pa.string(), pa.string())),
    "view": pa.array([text * 4 for text in TEXTS], pa.string_view()),
    "view in a list": pa.array([[text * 4] for text in TEXTS], pa.list_(pa.string_view())),
    "dictionary": DICTIONARY,
    "null of a dictionary": pa.array(["secret", "secret", None]).dictionary_encode(),
    "ordered dictionary": pa.DictionaryArray.from_arrays(
        PLACES.cast(pa.int8()), pa.array(TEXTS), ordered=True
    ),
    "dictionary in a struct": pa.StructArray.from_arrays([DICTIONARY], ["a"]),
    "null with a dictionary": pa.StructArray.from_arrays(
        [DICTIONARY], ["a"], mask=pa.array([False, False, True, False, False])
    ),
    "dictionary in a list": pa.ListArray.from_arrays(pa.array(range(6), pa.int32()), DICTIONARY),
    "dictionary in a fixed list": pa.FixedSizeListArray.from_arrays(DICTIONARY, 1),
    "dictionary in a map": pa.MapArray.from_arrays(
        pa.array(range(6), pa.int32()), pa.array(TEXTS), DICTIONARY
    ),
    "dense union": pa.UnionArray.from_dense(pa.array([0] * 5, pa.int8()), PLACES, [pa.array(TEXTS)]),
    "sparse union": pa.UnionArray.from_sparse(pa.array([0] * 5, pa.int8()), [pa.array(TEXTS)]),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS.keys())
def test_a_row_by_itself_says_nothing_of_its_neighbours(column: pa.Array) -> None:
    texts = pa.array(["secret", "secret", "own", "secret", "secret"][: len(column)])
    batch = pa.record_batch({"before": texts, "c": column})
    assert SECRET in as_stream(batch.slice(2, 1)).to_pybytes(), "the fault that this is against"
    own = row_alone(batch, 2, shares=may_share(batch.schema))
    assert SECRET not in as_stream(own).to_pybytes()
    own.validate(full=True)
    assert own.schema == batch.schema
    assert own.to_pylist() == batch.slice(2, 1).to_pylist()


def test_only_some_types_share_values() -> None:
    shared = {name for name, column in COLUMNS.items() if may_share(pa.schema([("c", column.type)]))}
    assert shared == {
        name for name in COLUMNS if "view" in name or "dictionary" in name or "union" in name
    } - {"list view"}
