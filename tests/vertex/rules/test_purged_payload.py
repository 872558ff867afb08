"""A purge removes a record's payload: no entry of the store has any of it, those of its neighbours neither."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer.vertex import calls

TEXTS = ["harmless 1", "the secret", "harmless 3"]
LETTERS = pa.array(TEXTS).dictionary_encode()


def everything_stored(vertex: Any) -> bytes:
    tables = (
        "meta",
        "segments",
        "done",
        "waiting",
        "dead",
        "groups",
        "by_group",
        "by_root",
        "audit",
        "batches",
    )
    return b"".join(key + value for table in tables for key, value in vertex.stored(table).items())


@pytest.mark.parametrize("column", [pa.array(TEXTS), LETTERS, pa.array(TEXTS, pa.string_view())])
def test_a_purge_leaves_no_text_of_a_record_behind(vertex: Any, kit: Any, column: pa.Array) -> None:
    vertex.open()
    rows = pa.record_batch({"v": column})
    vertex.call(calls.Persist("s", rows, kit.u64([1, 2, 3]), kit.u64([1, 2, 3])))
    vertex.fail(1, 2, 3, fatal=True)
    letters = {record.root: record.key for record in vertex.list("dead")}
    assert b"secret" in everything_stored(vertex)
    vertex.call(calls.Purge((letters[2],)))
    assert b"secret" not in everything_stored(vertex)
    assert [record.payload.to_pylist() for record in vertex.list("dead")] == [
        [{"v": "harmless 1"}],
        [{"v": "harmless 3"}],
    ]
