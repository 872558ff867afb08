"""Records that kill the process they run in: found, reported, and no harm to their neighbours."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.functions.chains.segments import Chain, ChainResult
from ftlayer.functions.steps import FlatMap, Map, MapBatches
from ftlayer.spark.stages.known import TRIES_ALONE, run_isolated
from ftlayer.spark.stages.task import StageTask

V = pa.schema([("v", pa.int64())])

DEATHS: dict[str, tuple[Callable[[], Any], str]] = {
    "exit 0": (lambda: os._exit(0), "exit code 0"),
    "exit 3": (lambda: os._exit(3), "exit code 3"),
    "kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal SIGKILL"),
    "segv": (lambda: (faulthandler.disable(), os.kill(os.getpid(), signal.SIGSEGV)), "signal SIGSEGV"),
    "real-time": (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3), f"signal {signal.SIGRTMIN + 3}"),
}


def run_chain(batch, functions):
    return Chain(functions).run(batch)


def ints(values: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"v": value} for value in values], schema=V)


def isolated(batch: pa.RecordBatch, function: Callable[[Any], Any]) -> ChainResult:
    return run_isolated(batch, lambda rows: run_chain(rows, [Map("m", function, V)]))


def rows_out(result: ChainResult) -> list[tuple[int, int]]:
    return [
        (parent, row["v"])
        for batch, parents in result.batches
        for parent, row in zip(parents.tolist(), batch.to_pylist(), strict=True)
    ]


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def children() -> set[str]:
    """The children of this process, zombies among them."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended meanwhile.
            found.update((task / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    # What other tests have dropped in a cycle is closed now, and not meanwhile.
    gc.collect()
    files, processes = open_files(), children()
    yield
    # Threads of other tests may close what they had meanwhile.
    assert not open_files() - files
    assert not children() - processes


def test_a_killers_failure_names_its_chain() -> None:
    steps = Map("first", dict, V), Map("second", lambda record: record if record["v"] else os._exit(3), V)
    (failure,) = StageTask(steps, None, isolate=True).run(ints([0, 1])).failures
    assert failure.operator == "first"
    assert "(exit code 3)" in failure.reason


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("killers", [{0}, {6}, {3, 4}, set(range(7))], ids=str)
def test_killers_fail_and_their_neighbours_do_not(death: str, killers: set[int]) -> None:
    die, said = DEATHS[death]

    def function(record: Any) -> Any:
        if record["v"] in killers:
            die()
        if record["v"] == 5:
            raise ValueError("just bad")
        return {"v": record["v"] * 10}

    result = isolated(ints(range(7)), function)
    assert rows_out(result) == [(v, v * 10) for v in range(7) if v not in killers | {5}]
    fatal = {failure.row: failure.reason for failure in result.failures if failure.fatal}
    assert set(fatal) == killers
    assert all(f"({said}), {TRIES_ALONE} times, alone in it" in reason for reason in fatal.values())
    assert {f.row: f.reason for f in result.failures if not f.fatal} == (
        {} if 5 in killers else {5: "ValueError: just bad"}
    )


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["good", "bad", "killer"]), max_size=12))
def test_any_mixture(kinds: list[str]) -> None:
    def split(record: Any) -> Any:
        kind = kinds[record["v"]]
        if kind == "killer":
            os._exit(1)
        yield record
        if kind == "bad":
            raise ValueError
        yield record

    result = run_isolated(ints(range(len(kinds))), lambda rows: run_chain(rows, [FlatMap("f", split, V)]))
    assert rows_out(result) == [(v, v) for v, kind in enumerate(kinds) if kind == "good" for _ in range(2)]
    assert {f.row: f.fatal for f in result.failures} == {
        v: kind == "killer" for v, kind in enumerate(kinds) if kind != "good"
    }


def test_a_record_that_kills_once_passes_alone(tmp_path: Path) -> None:
    def function(record: Any) -> Any:
        if record["v"] == 1 and len(list(tmp_path.iterdir())) < 3:
            (tmp_path / os.urandom(4).hex()).touch()
            os._exit(9)
        return record

    # It kills its batch, its half of it, and its first try alone.
    result = isolated(ints(range(4)), function)
    assert rows_out(result) == [(v, v) for v in range(4)]
    assert not result.failures


def test_no_rows() -> None:
    assert rows_out(isolated(ints([]), dict)) == []


def test_results_larger_than_a_pipe_come_through() -> None:
    schema = pa.schema([("v", pa.int64()), ("text", pa.string())])
    step = Map("m", lambda r: {"v": r["v"], "text": str(r["v"]) * 3_000}, schema)
    result = run_isolated(ints(range(500)), lambda rows: run_chain(rows, [step]))
    (batch, parents) = result.batches[0]
    assert batch.nbytes > 1 << 21
    assert batch.schema == schema
    assert batch.column("text").to_pylist() == [str(v) * 3_000 for v in range(500)]
    assert parents.tolist() == list(range(500))


def test_the_child_does_not_change_the_parent() -> None:
    seen: list[int] = []

    def function(record: Any) -> Any:
        seen.append(record["v"])
        return record

    assert len(rows_out(isolated(ints([1, 2]), function))) == 2
    assert seen == []


class PickyError(BaseException):
    """Pickled without its second argument, so it cannot be read again."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what)


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (MemoryError("out"), MemoryError, "out"),
        (KeyboardInterrupt("c"), KeyboardInterrupt, "c"),
        (PickyError("what", "where"), RuntimeError, "PickyError: what"),
    ],
)
def test_what_cannot_be_pinned_on_a_record_is_raised_here(
    error: BaseException, raised: type[BaseException], said: str
) -> None:
    def run(batch: pa.RecordBatch) -> ChainResult:
        raise error

    with pytest.raises(raised, match=said):
        run_isolated(ints([1, 2, 3]), run)


@pytest.mark.parametrize(("code", "said"), [(None, "0"), (0, "0"), (4, "4"), ("a text", "1"), (-1, "255")])
def test_a_run_that_exits_is_found(code: Any, said: str) -> None:
    def run(batch: pa.RecordBatch) -> ChainResult:
        if 1 in batch.column("v").to_pylist():
            raise SystemExit(code)
        return run_chain(batch, [Map("m", lambda record: record, V)])

    result = run_isolated(ints([0, 1, 2]), run)
    assert rows_out(result) == [(0, 0), (2, 2)]
    (failure,) = result.failures
    assert (failure.row, failure.fatal) == (1, True)
    assert f"exit code {said})" in failure.reason


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("bytes_out", [0, 1 << 20])
def test_a_process_that_a_function_has_forked_keeps_the_pipe_and_holds_nothing_up(
    tmp_path: Path, dies: bool, bytes_out: int
) -> None:
    schema = pa.schema([("v", pa.int64()), ("text", pa.string())])

    def function(record: dict[str, Any]) -> dict[str, Any]:
        if record["v"] == 1:
            helper = os.fork()
            if helper == 0:
                signal.pause()
            with Path(tmp_path, "helpers").open("a") as file:
                print(helper, file=file)
            if dies:
                os._exit(7)
        return {"v": record["v"], "text": "x" * bytes_out}

    try:
        result = run_isolated(ints([0, 1, 2]), lambda batch: run_chain(batch, [Map("m", function, schema)]))
    finally:
        for helper in Path(tmp_path, "helpers").read_text().split():
            os.kill(int(helper), signal.SIGKILL)
    assert {failure.row for failure in result.failures} == ({1} if dies else set())
    rows = [value for batch, _ in result.batches for value in batch.column("v").to_pylist()]
    assert rows == ([0, 2] if dies else [0, 1, 2])
    assert all("exit code 7" in failure.reason for failure in result.failures)


def test_batch_functions_that_kill() -> None:
    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 2 in batch.column("v").to_pylist():
            os._exit(0)
        return batch

    step = MapBatches("b", function, V, "arrow", False)
    result = run_isolated(ints(range(5)), lambda rows: run_chain(rows, [step]))
    assert rows_out(result) == [(v, v) for v in (0, 1, 3, 4)]
    assert [(f.row, f.fatal) for f in result.failures] == [(2, True)]
    assert all(parents.dtype == np.int64 for _, parents in result.batches)
