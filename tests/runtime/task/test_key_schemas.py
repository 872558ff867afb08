"""The types of keys, which key groups are computed from."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import CoProcess, Map, Process, Reduce
from ftlayer.runtime.task.routes import key_schemas

ROW = pa.schema([("key", pa.string()), ("n", pa.int64())])


def test_keys_of_the_operators_of_a_chain() -> None:
    nested = pa.schema([("a", pa.struct([("b", pa.int32())])), ("c", pa.string())])
    count = pa.schema([("count", pa.int64())])
    operators = [
        Reduce("total", lambda a, b: a, count, ("a.b", "c"), create=lambda: 0),
        Map("map", lambda row: row, ROW),
        Process("process", ProcessFunction(), ROW, ("key",)),
        Process("keyless", ProcessFunction(), ROW, ()),
    ]
    assert key_schemas(operators, [nested]) == {
        "total": pa.schema([("a.b", pa.int32()), ("c", pa.string())]),
        "process": pa.schema([("key", pa.string())]),
    }


def test_two_inputs_with_keys_of_other_types_are_refused() -> None:
    wide, narrow = (pa.schema([("k", kind)]) for kind in (pa.int64(), pa.int32()))
    operator = CoProcess("both", CoProcessFunction(), ROW, (("k",), ("k",)), (wide, narrow))
    with pytest.raises(InvalidTopologyError, match=r"'both'.*k int64.*k int32"):
        key_schemas([operator], [wide, narrow])
    alike = CoProcess("both", CoProcessFunction(), ROW, (("k",), ("k",)), (wide, wide))
    assert key_schemas([alike], [wide, wide]) == {"both": wide}
