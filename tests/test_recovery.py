"""Of every error: whether starting again can mend it."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PythonException

from ftlayer import errors
from ftlayer.common import failures, printable
from ftlayer.common.clock import Now
from ftlayer.common.printable import MAX_TEXT
from ftlayer.common.rules.restart import is_of_no_row, is_programs, lasting, lasting_in_text
from ftlayer.connectors.at_least_once import column_of
from ftlayer.errors import (
    CheckpointStorageError,
    CodecError,
    ConfigError,
    FTLayerError,
    FunctionLoadError,
    IncompatibleCheckpointError,
    InvalidTopologyError,
    JobError,
    PeerRefusedError,
    QueryError,
    SinkTargetError,
    SourceError,
    TimerFailedError,
    error_for_code,
)
from ftlayer.functions.chains.topology import MAIN
from ftlayer.functions.failures import failure_of, traceback_of
from ftlayer.functions.writing import settle
from ftlayer.runtime.handler import NonFTXorHandler
from ftlayer.runtime.protocol.channel_frames import encode
from ftlayer.runtime.protocol.messages import SlotFailed
from ftlayer.runtime.task.pipeline import SinkOutlet

CLASSES: list[type[FTLayerError]] = [
    kind
    for module in (errors, failures)
    for kind in vars(module).values()
    if inspect.isclass(kind) and issubclass(kind, FTLayerError) and kind is not FTLayerError
]
OPERATIONS = Path(__file__).parents[1] / "docs" / "operations" / "errors.md"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Return the error as it is once a function has raised it from its cause."""

    def function() -> None:
        raise error from cause

    try:
        function()
    except BaseException as caught:  # noqa: BLE001 - it is what is asked for
        return caught
    raise AssertionError


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def from_worker(error: BaseException) -> PythonException:
    """Return what Spark makes of an error in a Python worker."""
    error = error if error.__traceback__ else raised(error)
    return PythonException(
        "Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: "
        "org.apache.spark.api.python.PythonException: An exception was thrown from the Python worker:\n"
        f"{text_of(error)} SQLSTATE: 38000\n\tat org.apache.spark.api.python.BasePythonRunner\n"
    )


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_says_whether_a_restart_can_mend_it(kind: type[FTLayerError]) -> None:
    assert "recoverable" in vars(kind)
    assert kind.recoverable in (True, False, None)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_is_judged_by_what_it_says(kind: type[FTLayerError]) -> None:
    error: Any = raised(kind("what is wrong"), OSError("why"))
    found = lasting(error)
    assert found is (error if kind.recoverable is False else None)
    # The same from a Python worker, and by its code on the wire.
    told = lasting(from_worker(error))
    assert type(told) is (kind if kind.recoverable is False else type(None))
    if told is not None:
        assert str(told) == "what is wrong"
        assert type(error_for_code(told.code)("what is wrong")) is kind


def test_the_table_of_errors_says_so_too() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \| `\w+` \| (\w[\w ]*) \|", OPERATIONS.read_text("utf-8"), re.MULTILINE)
    )
    said = {True: "yes", False: "no", None: "as its cause"}
    every: list[type[FTLayerError]] = [FTLayerError, *CLASSES]
    assert rows == {kind.__name__: said[kind.recoverable] for kind in every}


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'helper'"),
        ImportError("cannot import name 'parse' from 'helper'"),
        AttributeError("Can't get attribute 'Visit' on <module '__main__'>"),
        pickle.UnpicklingError("pickle data was truncated"),
        SyntaxError("invalid syntax"),
    ],
)
def test_what_cannot_be_loaded_ends_at_once(error: Exception) -> None:
    for each in (error, from_worker(error), raised(QueryError("the batch failed"), error)):
        found = lasting(each)
        assert isinstance(found, FunctionLoadError)
        assert str(error.args[0]) in str(found)
        assert "addArtifact" in str(found)
        assert found.__cause__ is each


def test_what_cannot_be_pickled_ends_at_once() -> None:
    error = pickle.PicklingError("Could not serialize object: TypeError: cannot pickle '_thread.lock' object")
    found = lasting(error)
    assert isinstance(found, InvalidTopologyError)
    assert "'_thread.lock'" in str(found)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (
            "[COLUMN_ALREADY_EXISTS] The column `host` already exists. Choose another name. SQLSTATE: 42711",
            True,
        ),
        ("[AMBIGUOUS_REFERENCE] Reference `host` is ambiguous, could be: [`host`, `host`].", True),
        ("[TABLE_OR_VIEW_NOT_FOUND] The table or view `hosts` cannot be found.", False),
    ],
)
def test_conditions_of_spark(text: str, ends: bool) -> None:
    found = lasting(AnalysisException(text))
    assert (found is not None) is ends
    if found is not None:
        assert isinstance(found, InvalidTopologyError)
        assert str(found) == text


@pytest.mark.parametrize(
    "error",
    [
        OSError("no space left on device"),
        ConnectionRefusedError("the database is down"),
        AttributeError("'NoneType' object has no attribute 'strip'"),
        MemoryError(),
        RuntimeError("ftlayer.errors.ConfigError: said of something else"),
    ],
)
def test_what_may_pass_is_left_to_the_restart_strategy(error: Exception) -> None:
    assert lasting(error) is None
    assert lasting(from_worker(error)) is None


def test_a_class_of_the_same_name_is_none_of_ours() -> None:
    class ConfigError(Exception):
        pass

    assert lasting_in_text(text_of(raised(ConfigError("a user's")))) is None


def test_the_first_error_that_knows_decides() -> None:
    codec = CodecError("truncated")
    assert lasting(raised(PeerRefusedError("slot 1 sent nonsense"), codec)) is None
    assert lasting(raised(CheckpointStorageError("s3 is gone"), ImportError("s3fs"))) is None
    inner = raised(SourceError("source 'a' raised"), codec)
    assert lasting(raised(JobError("the slot failed"), inner)) is codec


def test_what_was_handled_is_another_matter() -> None:
    def write() -> None:
        try:
            raise ModuleNotFoundError("No module named 'orjson'")
        except ModuleNotFoundError:
            raise ConnectionError("the database is down")  # noqa: B904 - as users do

    with pytest.raises(ConnectionError) as caught:
        write()
    assert lasting(caught.value) is None
    assert lasting(from_worker(caught.value)) is None


def test_a_timer_is_judged_by_what_it_raised() -> None:
    unloadable = text_of(raised(ModuleNotFoundError("No module named 'helper'")))
    found = lasting(TimerFailedError("failed", "op", unloadable))
    assert isinstance(found, FunctionLoadError)
    assert found.operator == "op"
    assert lasting(TimerFailedError("failed", "op", text_of(raised(ValueError("x"))))) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (IncompatibleCheckpointError("'count' uses the state 'n' as a list"), IncompatibleCheckpointError),
        (ConfigError("the state 'n' is used as a list and as a value"), ConfigError),
        (ValueError("not a number"), JobError),
    ],
)
def test_without_tracking_a_record_fails_with_what_a_restart_would_meet_again(
    error: Any, kind: type[FTLayerError]
) -> None:
    """Barrier mode: state that is read while a record is processed."""
    failure = failure_of(0, "count", raised(error))
    with pytest.raises(kind, match=re.escape(str(error))) as caught:
        NonFTXorHandler().fail(None, [failure])
    assert type(caught.value) is kind
    assert caught.value.operator == "count"


@pytest.mark.parametrize(
    ("error", "programs"),
    [
        (AttributeError("'DataFrame' object has no attribute 'wirte'"), True),
        (NameError("name 'sprak' is not defined"), True),
        (TypeError("write() takes 1 argument"), True),
        (FileExistsError(17, "File exists", "/data/out"), True),
        (NotADirectoryError(20, "Not a directory"), True),
        (OSError("no space left on device"), False),
        (ConnectionRefusedError("the database is down"), False),
        (KeyError("x"), False),
    ],
)
def test_mistakes_of_the_program(error: Exception, programs: bool) -> None:
    assert is_programs(error) is programs
    assert is_programs(raised(QueryError("the sink raised"), error)) is programs
    assert is_programs(from_worker(error)) is programs
    aside = programs and isinstance(error, OSError)
    assert is_programs(raised(PeerRefusedError("slot 1 sent nonsense"), error)) is aside


@pytest.mark.parametrize(
    "error", [AttributeError("no attribute 'wirte'"), OSError("no space left on device")]
)
def test_a_mistake_in_a_function_that_writes_is_the_programs(error: Exception) -> None:
    """One in a map may be a row's."""
    failures = [failure_of(0, "write", raised(error))]
    failing = SimpleNamespace(failures=failures, outputs={MAIN: None})
    sink: Any = SimpleNamespace(flush=lambda now_ms, force: failing)
    handler: Any = SimpleNamespace(xor=NonFTXorHandler())
    with pytest.raises(JobError) as of_sink:
        SinkOutlet(handler, sink).flush(Now(0, 0), force=True)
    assert is_programs(of_sink.value) is isinstance(error, AttributeError)
    with pytest.raises(JobError) as of_map:
        SinkOutlet(handler, sink).take(None, 1, cast(Any, failing), Now(0, 0))
    assert not is_programs(of_map.value)


BATCH = pa.record_batch({"n": [1, None], "d": ["a", "b"]})


def no_table(rows: Any) -> None:
    assert rows.num_rows == 2, "it is not found by halves"
    raise SinkTargetError("table t is not there")


@pytest.mark.parametrize(
    ("sink", "of_no_row", "alone"),
    [
        (lambda rows: rows.wirte(), True, True),
        (lambda rows: nosuch(rows), True, True),  # type: ignore[name-defined]  # noqa: F821
        (lambda rows: rows["nosuch"], True, True),
        (lambda rows: os.nosuch(rows), True, True),  # type: ignore[attr-defined]
        (lambda: None, True, True),
        (lambda rows: column_of(rows, "nosuch", "body"), True, True),
        (no_table, True, True),
        (lambda rows: [row["d"].upper_() for row in rows.to_pylist()], True, False),
        (lambda rows: [row["d"] + row["n"] for row in rows.to_pylist()], True, False),
        (lambda rows: [{}[row["d"]] for row in rows.to_pylist()], False, False),
        (lambda rows: int("x"), False, False),
        (lambda rows: Path("/nowhere/x").read_text(), False, False),
    ],
)
def test_what_a_sinks_whole_first_batch_fails_with(sink: Any, of_no_row: bool, alone: bool) -> None:
    """What names a value may be of a row that is alone; of several, at one place, it is the program's."""
    failed = [failure.traceback for failure in settle("out", BATCH, sink)]
    assert is_of_no_row(failed, dead=False) is of_no_row
    assert is_of_no_row(failed[:1], dead=False) is alone
    assert is_of_no_row(failed, dead=True) is ("ConfigError" in failed[0])


def test_what_rows_fail_with_at_several_places_is_theirs() -> None:
    def sink(rows: Any) -> None:
        if rows["n"][0].as_py():
            rows["d"][0].as_py().nosuch()
        rows["d"][0].as_py() + 1

    assert not is_of_no_row([each.traceback for each in settle("out", BATCH, sink)], dead=False)


def test_conditions_of_spark_that_are_the_programs() -> None:
    missing = (
        "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `prcie` cannot be resolved. SQLSTATE: 42703"
    )
    assert is_programs(AnalysisException(missing))
    mismatch = (
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11."
    )
    assert lasting(AnalysisException(mismatch)) is not None


@pytest.mark.parametrize(
    ("said", "programs"),
    [
        (
            ": org.apache.hadoop.fs.ParentNotDirectoryException: Parent path is not a directory: file:/x/out",
            True,
        ),
        (
            "[PATH_ALREADY_EXISTS] Path file:/x/out already exists. Set mode as 'overwrite'. SQLSTATE: 42K04",
            True,
        ),
        ("[TABLE_OR_VIEW_NOT_FOUND] The table or view `orders` cannot be found. SQLSTATE: 42P01", True),
        (
            "ftlayer.errors.CheckpointStorageError: /x/a.part cannot be written: [Errno 17] File exists: '/x'",
            True,
        ),
        (
            "ftlayer.errors.CheckpointStorageError: /x/a.part cannot be written: [Errno 28] No space left",
            False,
        ),
        (": java.net.ConnectException: Connection refused", False),
    ],
)
def test_mistakes_of_the_program_that_java_tells(said: str, programs: bool) -> None:
    kind = type("Py4JJavaError", (Exception,), {"__module__": "py4j.protocol"})
    assert is_programs(kind(f"An error occurred while calling o1.parquet.\n{said}\n\tat org.x.Y")) is programs


@pytest.mark.timeout(60)
def test_errors_that_came_from_each_other() -> None:
    one, other = ValueError("one"), OSError("other")
    one.__cause__, other.__cause__ = other, one
    assert lasting(one) is None
    assert not is_programs(one)
    interrupt = KeyboardInterrupt()
    interrupt.__cause__ = interrupt
    assert failure_of(0, "o", interrupt).reason == "KeyboardInterrupt: "


@pytest.mark.parametrize("text", ["a\udcffb", "x" * 20_000_000])
def test_what_a_slot_fails_with_can_be_sent(text: str) -> None:
    reason, trace = printable.text_of(ValueError(text)), traceback_of(ValueError(text), MAX_TEXT)
    assert len(encode(SlotFailed(reason, traceback=trace))) < 1 << 18
