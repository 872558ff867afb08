"""Functions that say that they change no value in place: nothing that they read is copied."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import StateSerializationError
from ftlayer.functions.chains.topology import MAIN, TopologyChain
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import CoProcess, Map, Process, Reduce
from ftlayer.functions.undo import UndoLog
from ftlayer.state.heap import HeapBackend

KT = pa.schema([("k", pa.string()), ("t", pa.int64())])


class Precious:
    """Cannot be copied."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise TypeError("there is but one")


class Keeping(ProcessFunction, CoProcessFunction):
    """Adds to a value, a list, a map, and to state without a key; fails for what is negative."""

    def process(self, record: Any, ctx: Any) -> Any:
        value, kept, fields, shared = ctx.value("v"), ctx.list("l"), ctx.map("m"), ctx.operator_list("o")
        before = value.get()
        value.set(Precious(record[1] + (0 if before is None else before.number)))
        numbers = [item.number for item in kept.get()]
        kept.extend([Precious(record[1])])
        last = fields.get("x")
        fields["x"] = Precious(record[1])
        numbers += [item.number for item in shared]
        shared.append(Precious(record[1]))
        if record[1] < 0:
            raise ValueError("negative")
        return [(record[0], value.get().number + len(numbers) + (last is not None))]

    process_left = process_right = process


def of(kind: str, in_place: bool) -> tuple[list[Any], list[pa.Schema]]:
    if kind == "process":
        return [Process("p", Keeping(), KT, ("k",), in_place=in_place)], [KT]
    if kind == "co":
        return [CoProcess("p", Keeping(), KT, (("k",), ("k",)), (KT, KT), in_place=in_place)], [KT, KT]

    def add(total: Precious, record: Any) -> Precious:
        total = Precious(total.number + record[1])
        if record[1] < 0:
            raise ValueError("negative")
        return total

    reduce = Reduce("p", add, KT, ("k",), create=lambda: Precious(0), in_place=in_place)
    return [reduce, Map("m", lambda total: ("a", total.number), KT)], [KT]


@pytest.mark.parametrize(
    ("kind", "expected"), [("process", [1, 6, 11]), ("co", [1, 6, 11]), ("reduce", [1, 3, 6])]
)
def test_what_is_read_is_not_copied_and_what_is_set_is_taken_back(kind: str, expected: list[int]) -> None:
    operators, inputs = of(kind, in_place=False)
    chain = TopologyChain(operators, inputs, HeapBackend(), UndoLog())
    rows = pa.RecordBatch.from_pylist([{"k": "a", "t": t} for t in (1, 2, -5, 3)], KT)
    result = chain.run(rows, None, 0, 0)
    assert result.outputs[MAIN].batch["t"].to_pylist() == expected
    assert [failure.row for failure in result.failures] == [2]


@pytest.mark.parametrize("kind", ["process", "co", "reduce"])
def test_else_what_cannot_be_copied_is_an_error(kind: str) -> None:
    operators, inputs = of(kind, in_place=True)
    chain = TopologyChain(operators, inputs, HeapBackend(), UndoLog())
    rows = pa.RecordBatch.from_pylist([{"k": "a", "t": t} for t in (1, 2)], KT)
    with pytest.raises(StateSerializationError, match="in_place=False"):
        chain.run(rows, None, 0, 0)


@pytest.mark.parametrize(("create", "numbers"), [(None, (1, 2, -5, 3)), (lambda: ["a", 0], (3, -5, 3))])
def test_an_aggregate_that_never_becomes_a_column_is_taken_back_too(create: Any, numbers: Any) -> None:
    """What stands behind a reduce takes its aggregates as they are: they may be lists, whatever its schema says."""

    def add(total: Any, record: Any) -> Any:
        total = list(total) if isinstance(total, tuple) else total
        total[1] += record[1]
        if record[1] < 0:
            raise ValueError("negative")
        return total

    reduce = Reduce("p", add, KT, ("k",), create=create)
    chain = TopologyChain([reduce, Map("m", tuple, KT)], [KT], HeapBackend(), UndoLog())
    rows = pa.RecordBatch.from_pylist([{"k": "a", "t": t} for t in numbers], KT)
    result = chain.run(rows, None, 0, 0)
    assert result.outputs[MAIN].batch["t"].to_pylist()[-1] == 6
    assert [failure.row for failure in result.failures] == [numbers.index(-5)]
