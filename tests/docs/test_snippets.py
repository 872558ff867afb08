"""What the documentation says against the code: examples compile, names, options, errors and links exist."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer.main
from fastapi.routing import APIRoute
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter

import ftlayer
import ftlayer.common.failures
import ftlayer.errors
from ftlayer import sinks, sources
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.cli.main import app
from ftlayer.common.clock import Now
from ftlayer.common.rules import restart
from ftlayer.config import FTStatus, ServeOptions, TopologyOptions, VertexOptions
from ftlayer.functions.handles import AggregatingHandle, ListHandle, ReducingHandle, ValueHandle
from ftlayer.functions.process import Context, CoProcessFunction, KeyTimers, ProcessFunction
from ftlayer.monitor.console import api as console_api
from ftlayer.monitor.console import watch as console_metrics
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.driver.rules.job_status import ChainStatus, JobStatus
from ftlayer.runtime.environment import StreamEnvironment, default_restart
from ftlayer.spark.deliveries.ingest_reader import IngestStream
from ftlayer.spark.facade import FTLayer
from ftlayer.spark.query.supervisor import TrackedQuery
from ftlayer.spark.query.writer import TrackedWriter
from ftlayer.spark.tracked import TrackedStream
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.explain import explain, to_mermaid
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.streams.data_stream import DataStream, FunctionOptions
from ftlayer.topology.streams.keyed_stream import ConnectedStreams, IterativeStream, KeyedStream
from ftlayer.topology.streams.windowed_stream import WindowedStream
from ftlayer.vertex.calls import (
    BatchDetails,
    QueryStatus,
    SlotDetails,
    Stats,
    StatsReply,
    StreamOptions,
    StreamStatus,
)
from ftlayer.vertex.metrics import catalogue
from ftlayer.vertex.metrics.catalogue import Metric, MetricKind
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store.memory import MemoryStore

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TOPOLOGY_GUIDES = [name for name in NAMES if name.startswith("docs/how-to/topologies/")]
REFERENCE = [name for name in NAMES if re.fullmatch(r"docs/reference/[\w-]+\.md", name)]

OTHERS_OPTIONS = {
    "--quick",
    "--pairs",
    "--json",
    "--pyflink",
    "--supervise",
    "--py-files",
    "--no-deps",
    "--archives",
    "--packages",
    "--hypothesis-profile",
    "--pdb",
    "--durations",
    "--enable-feature",
    "--strict",
    "--install",
    "--smoke",
}
"""Of the benchmarks, of spark-submit, of pytest, of Prometheus, of mkdocs, of xcode-select and of .ci/wheels."""
DEPLOYING = {
    "--build",
    "--build-arg",
    "--cert",
    "--conf",
    "--deploy-mode",
    "--from-file",
    "--init",
    "--key",
    "--master",
    "--name",
    "--now",
    "--target",
    "--type",
}
"""Of docker, kubectl, systemctl and spark-submit, on pages below docs/deploy."""


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def blocks(text: str, language: str) -> Iterator[str]:
    """Yield the blocks of a language: programs, fragments, and the files of a tutorial."""
    marks = r'(?: fragment| title="[^"]*")?'
    yield from re.findall(rf"^```{language}{marks}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def section(text: str, heading: str) -> str:
    level = heading.split(" ")[0]
    start = text.index(f"\n{heading}\n")
    end = re.search(rf"^#{{1,{len(level)}}} ", text[start + len(heading) + 2 :], re.MULTILINE)
    return text[start:] if end is None else text[start : start + len(heading) + 2 + end.start()]


def resolve(dotted: str) -> Any:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return found
    raise AttributeError(dotted)


def commands() -> dict[str, Any]:
    """All commands by their full names, "ftlayer dead list"."""
    found: dict[str, Any] = {}

    def walk(command: Any, name: str) -> None:
        found[name] = command
        for child, sub in getattr(command, "commands", {}).items():
            walk(sub, f"{name} {child}")

    walk(typer.main.get_command(app), "ftlayer")
    return found


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize("name", NAMES)
def test_python_examples_compile(name: str) -> None:
    for block in blocks(page(name), "python"):
        compile(block, name, "exec")


@pytest.mark.parametrize("name", NAMES)
def test_imports_of_examples_exist(name: str) -> None:
    for block in blocks(page(name), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ftlayer"):
                for alias in node.names:
                    resolve(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("name", NAMES)
def test_dotted_names_exist(name: str) -> None:
    for dotted in re.findall(r"`(ftlayer(?:\.\w+)+)`", page(name)):
        if not dotted.endswith(".json"):
            resolve(dotted)


@pytest.mark.parametrize("name", NAMES)
def test_methods_of_a_layer_and_a_query_exist(name: str) -> None:
    owners = {
        "FTLayer": FTLayer,
        "layer": FTLayer,
        "query": TrackedQuery,
        "writer": TrackedWriter,
        "env": StreamEnvironment,
        "job": Job,
        "ctx": Context,
        "timers": KeyTimers,
    }
    code = "\n".join([*blocks(page(name), "python"), *re.findall(r"`([^`\n]+)`", page(name))])
    for owner, attribute in re.findall(rf"(?<![./\w-])({'|'.join(owners)})\.([A-Za-z]\w*)", code):
        names = {*dir(owners[owner]), "name"}
        assert attribute in names, f"{owner}.{attribute}"


TOPOLOGY_CLASSES = (
    StreamEnvironment,
    DataStream,
    KeyedStream,
    WindowedStream,
    ConnectedStreams,
    Job,
    Context,
    KeyTimers,
    FTLayer,
)


def test_arguments_in_examples_of_topologies() -> None:
    """Every keyword is one of a method of that name."""
    checked = 0
    guides = "\n".join(page(name) for name in TOPOLOGY_GUIDES)
    for block in blocks(guides, "python"):
        for node in ast.walk(ast.parse(block)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = node.func.attr
            owners = [owner for owner in TOPOLOGY_CLASSES if callable(getattr(owner, name, None))]
            methods = [vars(owner)[name] for owner in owners if name in vars(owner)]
            if not methods:
                continue
            known = {
                parameter
                for method in methods
                for parameter in inspect.signature(getattr(method, "__func__", method)).parameters
            }
            assert {keyword.arg for keyword in node.keywords} <= known, name
            checked += 1
    assert checked >= 40


def test_the_first_topology_is_explained_as_the_guide_shows() -> None:
    text = page("docs/how-to/topologies/README.md")
    first = ast.parse(next(blocks(text, "python")))
    (session,) = (node for node in first.body if isinstance(node, ast.With))
    functions = [node for node in first.body if isinstance(node, ast.FunctionDef)]
    builds = session.body[1:3]
    env = GraphBuilder("hosts", parallelism=2)
    program = ast.Module(body=[*functions, *builds], type_ignores=[])
    exec(compile(program, "guide", "exec"), {"env": env})
    graph = job_graph(env.build(), FTStatus.ON, StreamOptions(max_attempts=3))
    assert f"```\n{explain(graph)}\n```" in text
    assert f"```mermaid\n{to_mermaid(graph)}\n```" in text


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name: str) -> None:
    code = "\n".join([*blocks(page(name), "sh"), *re.findall(r"`([^`\n]+)`", page(name))])
    known = commands()
    for command, rest in re.findall(r"^\s*(ftlayer ([a-z]+(?: [a-z]+)?))\b", code, re.MULTILINE):
        first = f"ftlayer {rest.split(' ')[0]}"
        assert first in known, command
        if getattr(known[first], "commands", {}) and " " in rest:
            assert command in known, command


@pytest.mark.parametrize("name", NAMES)
def test_command_line_options_exist(name: str) -> None:
    known = {option for command in commands().values() for each in command.params for option in each.opts}
    text = re.sub(r"\]\([^)]*\)", "]", page(name))
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert options <= known | OTHERS_OPTIONS | (DEPLOYING if name.startswith("docs/deploy/") else set())


def test_the_reference_has_every_command_and_option() -> None:
    rows = page("docs/reference/commands.md")
    for name, command in commands().items():
        if getattr(command, "commands", {}):
            continue
        row = next(line for line in rows.splitlines() if line.startswith(f"| `{name}"))
        connected = "of the connection" in row
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert option in (rows if connected else row), f"{name} {option}"


# ---------------------------------------------------------------- names, defaults, signatures


DOCUMENTED = [
    FTLayer,
    TrackedStream,
    TrackedWriter,
    TrackedQuery,
    StreamEnvironment,
    DataStream,
    KeyedStream,
    ConnectedStreams,
    IterativeStream,
    Job,
    ProcessFunction,
    CoProcessFunction,
    Context,
    KeyTimers,
    ValueHandle,
    ListHandle,
    ReducingHandle,
    AggregatingHandle,
    WindowedStream,
]


def reference() -> str:
    """Return the tables of the reference, all pages behind each other."""
    return "\n".join(page(name) for name in REFERENCE)


def test_the_reference_has_every_exported_name() -> None:
    text = page("docs/reference/README.md")
    for name in {*ftlayer.__all__, "max", "min", "sum"}:
        assert re.search(rf"\b{name}\b", text), name
        assert getattr(ftlayer, name) is not None


@pytest.mark.parametrize("owner", DOCUMENTED)
def test_the_reference_has_every_public_name(owner: type) -> None:
    text = reference()
    for name in vars(owner):
        if not name.startswith("_"):
            assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), f"{owner.__name__}.{name}"


COMMON = ("uid", "parallelism", "on_failure", "retry_on", "dead_on", "max_failing", "extra_keys")
"""What ``…`` stands for in the reference of topologies."""


def signatures_of(method: Any) -> list[str]:
    """Return what a method may be called with, without spaces: of it and each overload, with its options by name."""
    options = [
        each
        for each in inspect.signature(method).parameters.values()
        if each.name in FunctionOptions.__annotations__
    ]
    found = []
    for form in (*typing.get_overloads(method), method):
        own = list(inspect.signature(form).parameters.values())[1:]
        if form is not method and any(each.kind is each.VAR_KEYWORD for each in own):
            own = [each for each in own if each.kind is not each.VAR_KEYWORD] + options
        shown = [each.replace(annotation=inspect.Parameter.empty) for each in own]
        found.append(str(inspect.Signature(shown))[1:-1].replace(" ", ""))
    return found


@pytest.mark.parametrize(
    ("owner", "name", "heading"),
    [
        (TrackedStream, "queries", "## TrackedStream"),
        (FTLayer, "layer", "## Methods and properties"),
        (StreamEnvironment, "topologies", "## StreamEnvironment"),
        (DataStream, "topologies", "## DataStream"),
        (KeyedStream, "topologies", "## KeyedStream"),
        (WindowedStream, "topologies", "## WindowedStream"),
        (Job, "job", "## Job"),
        (ProcessFunction, "topologies", "## ProcessFunction"),
    ],
)
def test_signatures(owner: type, name: str, heading: str) -> None:
    checked = 0
    common = ", ".join(f"{each}=None" for each in COMMON)
    for span in re.findall(r"`(\w+\([^`]*\))`", section(page(f"docs/reference/{name}.md"), heading)):
        name, arguments = span.split("(", 1)
        if not callable(getattr(owner, name, None)) or name == "put":
            continue
        arguments = arguments.replace("…", common)
        wanted = ast.unparse(ast.parse(f"def f({arguments}: ...").body[0].args)  # type: ignore[attr-defined]
        assert wanted.replace(" ", "") in signatures_of(getattr(owner, name)), name
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize(
    ("owner", "call"),
    [(StreamEnvironment, "StreamEnvironment"), (ConnectedStreams.process, "ConnectedStreams.process")],
)
def test_other_signatures(owner: Any, call: str) -> None:
    span = re.search(rf"`{re.escape(call)}\(([^`]*)\)`", page("docs/reference/topologies.md"))
    assert span is not None
    given = span[1].replace("…", ", ".join(f"{each}=None" for each in COMMON))
    wanted = ast.unparse(ast.parse(f"def f({given}): ...").body[0].args)  # type: ignore[attr-defined]
    parameters = inspect.signature(owner).parameters.values()
    shown = [each.replace(annotation=inspect.Parameter.empty) for each in parameters if each.name != "self"]
    assert wanted.replace(" ", "") == str(inspect.Signature(shown))[1:-1].replace(" ", "")


@pytest.mark.parametrize(
    "options",
    [
        VertexOptions,
        ServeOptions,
        StreamOptions,
        BatchDetails,
        QueryStatus,
        TopologyOptions,
        JobStatus,
        SlotDetails,
        ChainStatus,
        StreamStatus,
    ],
)
def test_the_reference_has_every_field(options: Any) -> None:
    text = reference()
    for field in dataclasses.fields(options):
        assert f"`{field.name}`" in text, field.name


def test_defaults_of_a_layer() -> None:
    table = section(
        page("docs/reference/layer.md"),
        "## `FTLayer.embedded(path, …)` and `FTLayer.connect(address, token=…, …)`: options",
    )
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))
    for name, parameter in inspect.signature(FTLayer.embedded).parameters.items():
        if name in ("path", "vertex"):
            continue
        default = rows[name].strip().strip("`")
        if name == "status":
            assert default == f"FTStatus.{parameter.default.name}"
        else:
            assert ast.literal_eval(default.replace(",000", "000")) == parameter.default, name


@pytest.mark.parametrize(
    ("name", "heading", "options", "complete"),
    [
        ("docs/reference/options.md", "## Vertex options", VertexOptions, True),
        ("docs/reference/options.md", "## Topology options", TopologyOptions, True),
        ("docs/how-to/topologies/production.md", "## Tuning", TopologyOptions, False),
    ],
)
def test_defaults_of_options(name: str, heading: str, options: Any, complete: bool) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section(page(name), heading), re.MULTILINE))
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(options)
        if field.default is not dataclasses.MISSING
    }
    units = {"GiB": 1 << 30, "MiB": 1 << 20}
    assert defaults.keys() <= rows.keys() if complete else rows.keys() <= defaults.keys()
    for option in defaults.keys() & rows.keys():
        number, _, unit = rows[option].strip().strip("`").replace(",", "").partition(" ")
        value = int(number) * units[unit] if unit else ast.literal_eval(number)
        assert value == defaults[option], option


@pytest.mark.parametrize("name", ["docs/reference/topologies.md", "docs/how-to/topologies/failures.md"])
def test_the_restart_strategy_of_a_topology(name: str) -> None:
    text = page(name).replace("\n", " ")
    span = re.search(r"`ExponentialDelay\((initial_delay=\"50ms\"[^`]*)\)`", text)
    assert span is not None
    assert eval(f"restart.ExponentialDelay({span[1]})") == default_restart()


def test_states_of_a_job() -> None:
    assert JobState.__members__.keys() <= set(
        re.findall(r"`([A-Z]+)`", section(page("docs/reference/job.md"), "## Job"))
    )
    row = re.search(r"^\| `state` \| (.*?) \|", page("docs/operations/watching.md"), re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`(\w+)`", row[1])) == {state.value for state in JobState}


@pytest.mark.parametrize("strategy", ["NoRestart", "FixedDelay", "ExponentialDelay", "FailureRate"])
def test_restart_strategies(strategy: str) -> None:
    rows = section(page("docs/reference/queries.md"), "## TrackedWriter")
    span = re.search(rf"^\| `{strategy}\(([^`]*)\)`", rows, re.MULTILINE)
    assert span is not None
    fields = [each for each in dataclasses.fields(getattr(restart, strategy)) if each.init]
    call = ast.parse(f"f({span[1]})", mode="eval").body
    assert isinstance(call, ast.Call)
    assert {each.arg: ast.literal_eval(each.value) for each in call.keywords} == {
        each.name: each.default for each in fields
    }


# ---------------------------------------------------------------- errors and metrics


def test_every_error_is_in_the_table() -> None:
    table = page("docs/operations/errors.md")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", table, re.MULTILINE))
    errors = {
        name: kind.code
        for name, kind in {**vars(ftlayer.errors), **vars(ftlayer.common.failures)}.items()
        if inspect.isclass(kind) and issubclass(kind, ftlayer.errors.FTLayerError)
    }
    assert rows == errors


def test_every_logger_is_in_the_table() -> None:
    table = page("docs/operations/logging.md").partition("\n`ERROR`")[0]
    listed = set()
    for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE):
        names = re.findall(r"`([\w.]+)`", row)
        parent = names[0].rpartition(".")[0]
        listed |= {f"{parent}{name}" if name.startswith(".") else name for name in names}
    package = Path(ftlayer.__file__).parent
    loggers = {
        ".".join(("ftlayer", *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
        if "logging.getLogger(__name__)" in path.read_text("utf-8")
    }

    def has(name: str, logger: str) -> bool:
        return f"{logger}.".startswith(f"{name}.")

    assert [each for each in sorted(loggers) if not any(has(name, each) for name in listed)] == []
    assert [name for name in sorted(listed) if not any(has(name, each) for each in loggers)] == []


def test_every_metric_is_listed() -> None:
    store = MemoryStore()
    now = Now(0, 0)
    rules = FTLayerCore(store, LayerOptions(), now)
    with store.read() as transaction:
        reply = rules.read(transaction, Stats(), now)
    assert isinstance(reply, StatsReply)
    table = section(page("docs/operations/watching.md"), "## A vertex and its queries")
    listed = {
        name
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    # Of what is measured and not ruled: the service adds it.
    assert listed == set(reply.values) | {"reading_seconds", "shards_full"}


def metrics_of_prometheus() -> set[str]:
    told = [*catalogue.RECORDS.values(), *catalogue.VERTEX.values(), *catalogue.BATCH_ROWS.values()]
    told += catalogue.OPERATOR_FAILING.values()
    for module in (catalogue, console_metrics):
        told += [value for value in vars(module).values() if isinstance(value, Metric)]
    return {f"{each.name}_total" if each.kind is MetricKind.COUNTER else each.name for each in told}


def test_every_metric_of_prometheus_is_listed() -> None:
    table = section(page("docs/operations/metrics.md"), "## Prometheus")
    assert set(re.findall(r"`(ftlayer_\w+)`", table)) == metrics_of_prometheus()


def test_every_value_of_a_job_is_listed() -> None:
    table = section(page("docs/operations/watching.md"), "## A topology")
    for status in (JobStatus, SlotDetails, ChainStatus, StreamStatus):
        for field in dataclasses.fields(status):
            assert f"`{field.name}`" in table, field.name


# ---------------------------------------------------------------- migration

MIGRATION = {
    "docs/migration/from-foreachbatch.md": (
        "foreachBatch mapInArrow mapInPandas UDF except PERMISSIVE DROPMALFORMED FAILFAST badRecordsPath from_json "
        "dropDuplicates withWatermark transformWithState applyInPandasWithState startingOffsets txnAppId FTStatus.OFF"
    ),
    "docs/migration/from-storm.md": (
        "spout bolt tuple anchor unanchored ack fail acker tick Trident KafkaSpout Flux Nimbus supervisor DRPC "
        "topology.message.timeout.secs topology.max.spout.pending topology.acker.executors shuffle fields direct "
        "CustomStreamGrouping IWindowedBolt IStatefulBolt persistentAggregate AT_LEAST_ONCE AT_MOST_ONCE"
    ),
    "docs/migration/from-flink.md": (
        "StreamExecutionEnvironment KeyedProcessFunction BroadcastProcessFunction KeyedBroadcastProcessFunction CEP "
        "ValueState ListState MapState ReducingState AggregatingState StateTtlConfig OutputTag interval_join SQL uid "
        "AsyncDataStream TwoPhaseCommitSinkFunction JobManager TaskManager rocksdb exponential-delay Queryable "
        "set_max_parallelism coGroup numRecordsIn numRestarts Watermark"
    ),
    "docs/migration/from-bytewax.md": (
        "Dataflow key_on key_rm map_value stateful_map StatefulLogic on_notify fold_window collect_window EventClock "
        "TumblingWindower SessionWindower FixedPartitionedSource DynamicSink recovery waxctl flat_map_batch merge"
    ),
    "docs/migration/from-task-queues.md": (
        "Celery RQ Dramatiq SQS acks_late reject_on_worker_lost visibility retry_backoff max_retries maxReceiveCount "
        "autoretry_for rate_limit chord chain group beat eta countdown priorities revoke idempotency dead-letter"
    ),
}
"""The pages, with words of the other system that their readers look for."""

PROGRAMS = {"python app.py", "spark-submit app.py"}

OWNERS = {
    "env": StreamEnvironment,
    "job": Job,
    "ctx": Context,
    "timers": KeyTimers,
    "layer": FTLayer,
    "rows": DataFrame,
    "pyarrow": pa,
}
"""What the pages call an object of these."""

MADE_UP = "f g h n ms pair alert other rules frame rows batch_id record records keys spark stream push"
"""A reader's own functions and values, in calls that show an argument."""

USED: list[Any] = [
    *DOCUMENTED,
    FTLayer,
    IngestStream,
    CheckpointConfig,
    TopologyOptions,
    VertexOptions,
    StreamOptions,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    *(getattr(module, name) for module in (ftlayer, sinks, sources) for name in module.__all__),
]


def callables() -> dict[str, list[Any]]:
    """Return classes and functions that a program uses, and methods of all classes, by name."""
    found: dict[str, list[Any]] = {}
    for each in filter(callable, USED):
        found.setdefault(each.__name__, []).append(each)
        for name, member in vars(each).items() if inspect.isclass(each) else ():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not name.startswith("_"):
                found.setdefault(name, []).append(function)
    return found


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function.__init__ if inspect.isclass(function) else function).parameters)


CALLABLES = callables()
OPTIONS = {option for named in CALLABLES.values() for each in named for option in parameters_of(each)}
KNOWN = {
    *CALLABLES,
    *OPTIONS,
    *MADE_UP.split(),
    *OWNERS,
    *dir(builtins),
    *(field for each in USED for field in dir(each)),
}


def here(text: str) -> Iterator[str]:
    """Yield what stands in backticks in the column "here" of a page's tables."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for head, body in re.findall(r"^(\|.*\|)\n\|[- |]+\|\n((?:\|.*\|\n)+)", prose, re.MULTILINE):
        columns = [cell.strip() for cell in head.split("|")]
        if "here" in columns:
            for row in body.splitlines():
                cells = re.split(r"(?<!\\)\|", row)
                assert len(cells) == len(columns), row
                yield from re.findall(r"`([^`]+)`", cells[columns.index("here")])


def check_expression(span: str) -> None:
    """Fail unless every name is one that a program writes, and every keyword one that its function takes."""
    code = span.replace("…", "...").removesuffix("=")
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:
        tree = ast.parse(f"dict({code})", mode="eval")  # keywords alone: replay="source"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.id in KNOWN, f"{span}: {node.id}"
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            named = [OWNERS[owner]] if owner in OWNERS else CALLABLES.get(owner, [])
            attributes = {
                name for each in named for name in (*dir(each), *vars(each).get("__annotations__", ()))
            }
            assert node.attr in (attributes or KNOWN), f"{span}: {owner}.{node.attr}"
        elif isinstance(node, ast.Call):
            forms = CALLABLES.get(ast.unparse(node.func).rpartition(".")[2], [])
            known = {option for each in forms for option in parameters_of(each)} or OPTIONS
            # A trigger's, and options of a Data Source.
            open_ended = any(
                each.kind is each.VAR_KEYWORD for form in forms for each in parameters_of(form).values()
            )
            assert open_ended or {keyword.arg for keyword in node.keywords} <= known, span


@pytest.mark.parametrize("name", MIGRATION)
def test_names_of_ours_in_migration_tables_exist(name: str) -> None:
    known, metrics, checked = commands(), metrics_of_prometheus(), 0
    routes = {route.path for route in console_api.job_routes.routes if isinstance(route, APIRoute)}
    for span in here(page(name)):
        checked += 1
        if span.startswith("ftlayer "):
            words = itertools.takewhile(str.islower, span.split()[1:])
            assert " ".join(["ftlayer", *words]) in known, span
        elif span.startswith("ftlayer_"):
            assert span in metrics, span
        elif span.startswith("/api/"):
            assert span in routes, span
        elif span.startswith("ftlayer."):
            resolve(span)
        elif span not in PROGRAMS:
            check_expression(span)
    assert checked >= 25


@pytest.mark.parametrize(("name", "words"), MIGRATION.items())
def test_migration_pages_have_what_their_readers_look_for(name: str, words: str) -> None:
    text = page(name)
    for word in words.split():
        assert re.search(rf"(?<!\w){re.escape(word)}", text), word


# ---------------------------------------------------------------- the original design

ORIGINAL_NAMES = """
    AbstractFTHandler AbstractInvokable AbstractPersistenceLayer AbstractPersistenceStorage AckerTable AnchorHandler
    AsSemiDeserializedStreamRecordSerializer AsStreamRecordSerializer ChainableInvokable CoInvokable
    ConstantKeySelector ExpiredFunction FTCollectorWrapper FTHandler FTLayer FTLayerBuilder FTLayerConfig FTLayerStatus
    FTLayerTest FTLayerVertex FTRecordReplayer FTStatus FailException FailedRecordCollector
    FaultToleranceWithTopologyTest FieldsPartitioner IdentifiableStreamRecord InputHandler KeySelector
    MultiBufferReaderBase MultiReaderIterator MultiReaders MultiRecordReader MultiSingleInputReaderIterator
    MultiUnionReaderIterator NonFTHandler NopFTLayerBuilder OpFTLayerBuilder OutputHandler PersistencePartitioner
    Persister RecordId RecordReplayer RecordWriter ReplayFieldsPartitioner ReplayPartitioner ReplayPartitionerFactory
    RotatingHashMap RotatingHashMapTest SDSSR SemiDeserializedStreamRecord SemiDeserializedStreamRecordSerializer
    SerializationTest SourceFTPersister SourceInvokable StreamConfig StreamGraph StreamInvokable StreamOutput
    StreamRecord StreamSourceVertex StreamVertex StreamingJobGraphGenerator TimeoutPersistenceLayer TypeSerializerTest
    XorEvent XorEventListener XorHandler broadcastEvent sendTaskEvent
    collector event id partitioner runtime serialization util
"""


def test_every_name_of_the_original_design_has_a_place() -> None:
    text = page("docs/design-decisions/original-design.md")
    for name in ORIGINAL_NAMES.split():
        assert re.search(rf"\b{name}s?\b", text), name


def test_files_that_pages_name_exist() -> None:
    for name in NAMES:
        for path in re.findall(r"`((?:tests|ftlayer|bench|native)/[\w./-]*)`", page(name)):
            assert (ROOT / path).exists(), f"{name}: {path}"


@pytest.mark.parametrize("name", ["architecture", "ways"])
def test_paths_and_names_of_the_architecture_exist(name: str) -> None:
    """Paths are below ``ftlayer/``; names in brackets behind one are in that file."""
    prose = re.sub(
        r"^```.*?^```$", "", page(f"docs/design-decisions/{name}.md"), flags=re.DOTALL | re.MULTILINE
    )
    prose = " ".join(prose.split())
    for path in re.findall(r"`([\w./-]+(?:/|\.py|\.c))`", prose):
        assert (ROOT / "ftlayer" / path).exists() or (ROOT / path).exists(), path
    for path, names in re.findall(r"`([\w./-]+\.py)` \(([^)]*)\)", prose):
        source = (ROOT / "ftlayer" / path).read_text("utf-8")
        for part in (part for name in re.findall(r"`([\w.]+)`", names) for part in name.split(".")):
            found = re.search(rf"(?:def|class) {part}\b|^{part}\b.* = ", source, re.MULTILINE)
            assert found, f"{path}: {part}"


# ---------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", page(name), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), target
