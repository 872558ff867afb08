"""What was built and never started says where, once; what is asked of the wrong object says what to call."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from ftlayer import Context, FTLayer, KeyedStream, StreamEnvironment, TrackedWriter, tumbling
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage.loading import JobResult
from ftlayer.common.checks import Unstarted
from ftlayer.errors import ConfigError, NeverStartedWarning, NotHereError
from ftlayer.runtime.driver.job import EndedJob, Job
from ftlayer.spark.plan.stream_plan import SourceSpec, StreamPlan
from ftlayer.spark.query.supervisor import TrackedQuery
from ftlayer.spark.tracked import TrackedStream
from ftlayer.topology.builder import GraphBuilder

SCHEMA = pa.schema([("n", pa.int64()), ("at", pa.int64())])
NO_COLUMNS = StructType([])
NO: Any = None


def env() -> Any:
    return StreamEnvironment(SimpleNamespace(conf={}), name="hosts", checkpointing=CheckpointConfig())


def sourced_env() -> Any:
    made = env()
    made.source(["a"], pa.schema([("n", pa.string())])).map(str)
    return made


def stream() -> Any:
    return GraphBuilder("t", status="off").source([{"n": 1, "at": 1}], SCHEMA)


def windows() -> Any:
    return stream().key_by("n").window(tumbling("1s"))


def tracked() -> Any:
    return TrackedStream(StreamPlan(NO, SourceSpec(NO, "logs"), NO_COLUMNS))


def writer() -> Any:
    return tracked().sink(lambda rows, batch: None, checkpoint="c")


def layer() -> Any:
    return FTLayer.embedded("never-made")


def connected(one: Any) -> Any:
    return one.connect(one)


Said = list[warnings.WarningMessage]


@pytest.fixture
def said() -> Iterator[Said]:
    gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (tracked, "has no end"),
        (lambda: tracked().map(str, StructType().add("n", "long")).filter(bool), "has no end"),
        (writer, "query 'logs' was built here and never started: call .start()"),
        (lambda: writer().option("a", "b"), "query 'logs'"),
        (sourced_env, "topology 'hosts' was built here and never executed: call .execute()"),
        (lambda: stream().key_by("n"), "made here was thrown away"),
        (lambda: stream().rebalance(), "made here was thrown away"),
        (lambda: stream().key_by("n").global_(), "made here was thrown away"),
        (windows, "windows were made here and never used: call .reduce"),
        (lambda: windows().late_to("late").allowed_lateness("1s"), "windows were made here"),
        (lambda: connected(stream()), "connected here and never used: .process(CoProcessFunction"),
        (lambda: copy.copy(writer()), "query 'logs'"),
    ],
)
def test_what_is_thrown_away_says_so_once(build: Callable[[], object], words: str, said: Said) -> None:
    built = build()
    assert not said
    del built
    (one,) = said
    assert one.category is NeverStartedWarning
    assert one.filename == __file__
    assert words in str(one.message)


def settled_env() -> None:
    made = env()
    made.source(["a"], pa.schema([("n", pa.string())])).sink(print)
    made.explain()


def refused_env() -> None:
    made = env()
    made.source(["a"], pa.schema([("n", pa.string())])).sink(print)
    with pytest.raises(ConfigError):
        made.execute(stop_at_latest=3)


def refused_start() -> None:
    made = writer()
    with pytest.raises(AttributeError):  # there is no layer
        made.start()


def refused_step() -> None:
    source = tracked()
    with pytest.raises(ConfigError):
        source.map(str, NO_COLUMNS, rate_limit="x")


def not_here() -> None:
    with pytest.raises(NotHereError):
        writer().awaitTermination()


def refused_window() -> None:
    made = windows()
    with pytest.raises(ConfigError):
        made.reduce(3)


def error_in_a_layer() -> None:
    built = tracked()
    with suppress(ZeroDivisionError), FTLayer.embedded("never-made"):
        raise ZeroDivisionError
    del built


@pytest.mark.parametrize(
    "use",
    [
        lambda: env(),
        lambda: stream(),
        lambda: stream().key_by("n").map(str).sink(print),
        lambda: windows().late_to("late").reduce(max).sink(print),
        settled_env,
        refused_env,
        refused_start,
        refused_step,
        not_here,
        refused_window,
        error_in_a_layer,
    ],
)
def test_what_was_used_started_or_tried_says_nothing(use: Callable[[], object], said: Said) -> None:
    use()
    gc.collect()
    assert not said


def test_a_pickled_copy_and_a_forked_process_say_nothing(said: Said) -> None:
    built = Unstarted("x")
    pickle.loads(pickle.dumps(built))
    child = os.fork()
    if not child:
        del built
        os._exit(len(said))
    assert os.waitpid(child, 0)[1] == 0
    assert not said
    del built
    assert len(said) == 1


@pytest.mark.parametrize(("end", "told"), [("", True), ("1 / 0", False)])
def test_the_end_of_a_program_says_so_unless_an_error_ended_it(end: str, told: bool, tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text(
        "from types import SimpleNamespace\n"
        "from ftlayer import CheckpointConfig, StreamEnvironment\n"
        "made = StreamEnvironment(SimpleNamespace(conf={}), name='hosts', checkpointing=CheckpointConfig())\n"
        "made.source(['a'], 'n string').sink(print)\n" + end
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    line = f"{program}:3: NeverStartedWarning: topology 'hosts' was built here"
    assert (line in ran.stderr) is told, ran.stderr
    assert ran.stderr.count("NeverStartedWarning") == told
    assert "Exception ignored" not in ran.stderr


OBJECTS: list[tuple[Callable[[], Any], dict[str, str]]] = [
    (
        tracked,
        {
            "start": ".start() returns the query",
            "awaitTermination": "end the stream first",
            "groupBy": "keeps no state over batches",
            "reduce": "StreamEnvironment",
            "writeStream": ".sink(function, checkpoint=…)",
            "show": ".sink(lambda",
            "withColumn": ".transform(lambda rows: rows.withColumn(…))",
            "flatMap": "it is called flat_map",
        },
    ),
    (
        writer,
        {
            "awaitTermination": ".start() returns the query",
            "execute": ".start()",
            "outputMode": "leave it out",
        },
    ),
    (lambda: TrackedQuery(NO), {"await_termination": "it is called awaitTermination", "cancel": ".stop()"}),
    (
        layer,
        {
            "awaitTermination": ".start()",
            "readStream": "layer.source(frame",
            "listDead": "it is called list_dead",
        },
    ),
    (
        env,
        {
            "awaitTermination": ".execute_async()",
            "add_source": ".source(source, schema)",
            "from_collection": ".source(",
            "sinkTo": "it belongs to a stream",
            "enable_checkpointing": "CheckpointConfig",
            "executeAsync": "it is called execute_async",
            "cancel": "Job",
        },
    ),
    (
        stream,
        {
            "reduce": "key the stream first: .key_by(column, …).reduce(…)",
            "window": "key the stream first",
            "sum": ".aggregate(ftlayer.sum",
            "groupBy": ".key_by(column",
            "keyBy": "it is called key_by",
            "sinkTo": ".sink(sink)",
            "add_sink": ".sink(sink)",
            "print": "to_pylist",
            "execute": "StreamEnvironment",
            "awaitTermination": ".execute()",
        },
    ),
    (
        lambda: stream().key_by("n"),
        {"sum": ".aggregate(ftlayer.sum", "time_window": ".window(tumbling", "print": "to_py"},
    ),
    (
        windows,
        {
            "sum": ".aggregate(",
            "sink": "before .reduce(…)",
            "apply": ".process(",
            "sideOutputLateData": ".late_to(",
        },
    ),
    (lambda: connected(stream()), {"map": ".process(CoProcessFunction"}),
    (lambda: Job(EndedJob(JobResult("t", "t-1", 0, 1))), {"awaitTermination": ".wait(", "stop": ".drain()"}),
]


@pytest.mark.parametrize(("make", "words"), OBJECTS)
@pytest.mark.filterwarnings("ignore::ftlayer.errors.NeverStartedWarning")
def test_what_other_systems_have_says_what_to_call(make: Callable[[], Any], words: dict[str, str]) -> None:
    made = make()
    for name, said in words.items():
        assert not hasattr(made, name)
        with pytest.raises(NotHereError, match=re.escape(said)):
            getattr(made, name)
    for name in ("nothing_like_it", "_ipython_canary_method_should_not_exist_", "__deepcopy__", "_repr_png_"):
        with pytest.raises(AttributeError, match=f"object has no attribute '{name}'") as error:
            getattr(made, name)
        assert not isinstance(error.value, NotHereError)
    copy.copy(made)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (StreamEnvironment, "get_execution_environment", "make one: StreamEnvironment(spark, layer, name=…)"),
        (FTLayer, "builder", "make one with FTLayer.embedded"),
        (KeyedStream, "keyBy", "KeyedStream has no 'keyBy': it is called key_by"),
        (TrackedWriter, "awaitTermination", ".start() returns the query"),
    ],
)
def test_a_class_says_it_as_its_objects_do(kind: type, name: str, said: str) -> None:
    with pytest.raises(NotHereError, match=re.escape(said)):
        getattr(kind, name)
    assert not hasattr(kind, "nothing_like_it")
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_a_context_says_what_flink_calls_otherwise() -> None:
    ctx = Context("count", ())
    for name, said in {"get_state": ".value(", "timer_service": ".timers.event(", "sum": None}.items():
        with pytest.raises(
            AttributeError, match=re.escape(said or "'Context' object has no attribute 'sum'")
        ):
            getattr(ctx, name)


def test_an_attribute_that_is_missing_within_a_property_is_what_is_told() -> None:
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'query'"):
        _ = TrackedQuery(NO).lastProgress


def test_what_spark_says_of_pandas_is_not_shown_and_other_warnings_are() -> None:
    said = "PySpark does not yet fully support pandas >= 3.0.0. Some features may not work correctly."
    program = (
        "import ftlayer, warnings\n"
        f"tell = lambda text, module: warnings.warn_explicit(text, FutureWarning, 'x.py', 1, module)\n"
        f"tell({said!r}, 'pyspark.testing.utils'), tell({said!r}, 'pyspark.sql.pandas.functions')\n"
        f"tell('another', 'pyspark.sql'), tell({said!r}, 'mine')"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line for line in ran.stderr.splitlines() if "Warning" in line] == [
        "x.py:1: FutureWarning: another",
        f"x.py:1: FutureWarning: {said}",
    ]
