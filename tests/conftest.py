"""What all rooms' tests share: Java's check, profiles, allowed skips, one Spark session a process, lines of text."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, load_pem_private_key, pkcs12
from cryptography.x509 import load_pem_x509_certificate
from hypothesis import HealthCheck, settings

from ftlayer.common.java import ensure_java
from ftlayer.errors import JavaMissingError
from ftlayer.transport.tls import make_certificate

DAEMON_START_S = 600.0
"""For a master or worker of a standalone cluster to say that it is up."""

MASTER = "local[2,4]"
"""Two cores, and up to three failures of a task: tests make tasks fail."""

# After a plain `pip install .` the package in the working directory is the one without its C extension: child
# processes, Spark's workers among them, must import the installed one.
os.environ["PYTHONSAFEPATH"] = "1"

# A run that a script has put in the background ignores Ctrl-C, and so would the programs that tests press it for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _load_module(path: Path) -> ModuleType:
    """Load a module that tests share, under its own name: tests are no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


_load_module(Path(__file__).with_name("draws.py"))
_load_module(Path(__file__).with_name("programs.py"))
spark_home = _load_module(Path(__file__).with_name("spark_home.py"))
spark_home.use_home()


@pytest.fixture(scope="session", autouse=True)
def _kills_name_a_process() -> Iterator[None]:
    """A status says 0 of a slot that no process runs, and a signal to 0 ends this whole run."""
    kill = os.kill

    def checked(pid: int, sent: int) -> None:
        assert pid > 0, f"a test sends signal {sent} to {pid}: no process, but all of this group"
        kill(pid, sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", checked)
        yield


@pytest.fixture(scope="session")
def load_module() -> Callable[[Path], ModuleType]:
    """Load a module, by which functions and classes in it are pickled, and others of its directory import it."""
    return _load_module


@pytest.fixture
def collector() -> Iterator[Any]:
    """An OpenTelemetry collector in this process."""
    with _load_module(Path(__file__).with_name("otlp_collector.py")).Collector() as running:
        yield running


@pytest.fixture(scope="session")
def new_board() -> Callable[..., Any]:
    """Make a board in memory under a clock that the test moves (`board_shell.BoardShell`)."""
    shell: Callable[..., Any] = _load_module(Path(__file__).with_name("board_shell.py")).BoardShell
    return shell


def _java() -> tuple[str, str]:
    """Return what the header says, and what keeps Spark's tests from running ("" if nothing does)."""
    try:
        java = ensure_java()
    except JavaMissingError as error:
        return f"java: MISSING. {error}", str(error)
    return f"java: {java.version} ({java.program})", ""


JAVA_HEADER, JAVA_FAULT = _java()


def pytest_report_header() -> str:
    return JAVA_HEADER


# ---------------------------------------------------------------- Hypothesis

EXAMPLES = {"unhurried": 0.5, "full": 1.0, "thorough": 15.0}
"""How many times as many examples as it asks for a test gets, by ``--hypothesis-profile``; the first is the default."""

# A machine under load is slow, not wrong.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
for _name, _times in EXAMPLES.items():
    settings.register_profile(_name, UNHURRIED, max_examples=int(100 * _times))
settings.load_profile("unhurried")


def _scale_examples(times: float) -> None:
    """Multiply the number of examples that a test names itself; a profile's number is only for those that name none."""
    make = settings.__init__

    def make_scaled(self: settings, *args: Any, max_examples: int | None = None, **options: Any) -> None:
        if max_examples is not None:
            options["max_examples"] = max(1, int(max_examples * times))
        make(self, *args, **options)

    settings.__init__ = make_scaled  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    profile = config.getoption("--hypothesis-profile", default=None) or "unhurried"
    _scale_examples(EXAMPLES.get(profile, 1.0))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_NamesFailures(config))


class _NamesFailures:
    """Names a failed test when it fails: a run that something ends has said what it found."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reason = str(report.longrepr).strip().rpartition("\n")[2]
            reporter.write_line(f"\n{report.nodeid}: {reason}", red=True)


# ---------------------------------------------------------------- smoke

SMOKE = (
    "acker/test_exact.py",
    "acker/test_rotation.py",
    "bench/test_scale_fits.py",
    "checkpoint/coordinator/test_completion.py",
    "checkpoint/handlers/test_aligned.py",
    "checkpoint/storage/test_conformance.py",
    "checkpoint/test_options.py",
    "ci/test_skips.py::test_an_unlisted_skip_fails",
    "cli/test_bundled_java.py",
    "dead_letters/test_telling.py",
    "connectors/test_queue_readers.py",
    "console/test_login.py",
    "demo/test_ledger.py",
    "deploy/test_files.py",
    "docs/test_checkpointing_reference.py",
    "formats/test_stores.py",
    "functions/aggregates/test_against_per_record.py::test_c_refuses_what_it_does_not_know",
    "functions/chains/test_chain.py",
    "functions/test_conversion.py",
    "functions/undo/test_dict_tables.py",
    "handler/test_record_ids.py",
    "jobs/test_orders.py",
    "monitor/test_health.py",
    "partitioning/test_key_groups.py",
    "records/test_ids.py",
    "runtime/acker_mode/driver/test_job_vertex.py",
    "runtime/acker_mode/slot/test_acks.py",
    "runtime/acker_mode/task/test_source_task.py",
    "runtime/barrier_mode/driver/test_log_keeper.py",
    "runtime/acker_mode/slot/test_acks.py",
    "runtime/barrier_mode/slot/barriers/test_passing.py",
    "runtime/barrier_mode/slot/test_debloat.py",
    "runtime/barrier_mode/task/test_checkpointed_tasks.py",
    "runtime/connectors/test_queue_source_readers.py",
    "runtime/connectors/test_rows.py",
    "runtime/simulation/barriers/test_barrier_mode.py::test_nothing_fails",
    "runtime/driver/test_core_repairs.py",
    "runtime/simulation/test_topologies.py::test_attempts_are_counted_and_used_up",
    "runtime/simulation/test_topologies.py::test_one_record_on_two_edges_to_the_same_operator",
    "runtime/slot/processes/test_two_slots.py::test_a_bounded_job_ends_with_everything",
    "runtime/slot/test_core.py",
    "runtime/slot/test_credit.py",
    "runtime/spark/test_barrier_mode.py::test_a_bounded_job_ends_with_a_checkpoint_that_commits_everything",
    "runtime/spark/test_growing_logs.py",
    "runtime/task/test_chain_task.py",
    "runtime/test_environment.py",
    "scaffold/test_choices.py",
    "sinks/test_files.py::test_rows_are_seen_when_they_are_committed",
    "sinks/test_postgres.py::test_rows_are_seen_when_they_are_committed",
    "spark/batch/test_raised.py",
    "spark/test_sessions.py",
    "sources/test_redis_rows.py",
    "state/test_heap.py",
    "spark/deliveries/test_stored_rows.py",
    "spark/faults/test_query_without_jvm.py",
    "spark/features/test_feature_functions.py::test_log_lines_are_parsed_filtered_and_counted",
    "spark/features/test_feature_handle.py::test_drain_finishes_what_waits_and_reads_no_more_of_the_source",
    "spark/query/test_drained.py",
    "spark/stages/test_carrier.py",
    "state/lmdb/test_stores.py",
    "state/snapshots/test_serializer.py",
    "state/tables/test_timers.py",
    "store/test_values.py",
    "telemetry/test_settings.py",
    "test_checks.py",
    "topology/test_chaining.py",
    "transport/test_codec.py",
    "vertex/client/test_pipeline.py",
    "vertex/rules/test_batches.py",
    "vertex/service/test_embedded.py::test_a_killed_vertex_comes_back_with_its_records_and_clients_go_on",
    "vertex/service/test_shard.py",
    "vertex/wire/test_frames.py",
    "vertex/metrics/test_families.py",
)
"""Files, and tests of files, of every room: ``pytest -m smoke`` runs them in a minute or two."""


SPARKS = (
    "connectors/test_files_in_topologies.py::test_plain_spark_reads_each_line_once",
    "runtime/spark/test_barrier_mode.py::test_slots_are_killed",
    "runtime/spark/test_running.py::test_killed_slots_lose_nothing",
    "spark/features/test_feature_handle.py::test_drain_finishes_what_waits_and_reads_no_more_of_the_source",
    "spark/stages/test_spread.py",
    "test_data_sources.py",
)
"""What has to pass on each Spark that is taken: ``pytest -m sparks``."""

LISTED = {"smoke": SMOKE, "sparks": SPARKS}
LISTED_FILES = {
    mark: {Path(__file__).parent / name.partition("::")[0] for name in names}
    for mark, names in LISTED.items()
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of one mark alone, only files are read that have tests with it: each process takes half a minute to read all."""
    mark: str = config.getoption("markexpr")
    if collection_path.is_dir() and mark in LISTED_FILES:
        # What the conftest of another room wants may not be installed.
        return None if any(file.is_relative_to(collection_path) for file in LISTED_FILES[mark]) else True
    if collection_path.suffix != ".py" or not mark.isidentifier() or mark == "spark":
        return None
    if mark in LISTED_FILES:
        return True if collection_path not in LISTED_FILES[mark] else None
    return True if f"mark.{mark}" not in collection_path.read_text("utf-8") else None


def _is_listed(item: pytest.Item, names: tuple[str, ...]) -> bool:
    if "[amqp" in item.nodeid:
        return False  # RabbitMQ takes ten seconds to start.
    case = item.nodeid.removeprefix("tests/")
    name = case.partition("[")[0]
    return case in names or name in names or name.partition("::")[0] in names


LONGEST = (
    "spark/faults/test_killed_processes.py",
    # Without Spark: they run while the first process makes the archive of Spark's classes.
    "runtime/slot/processes/test_two_slots.py",
    "runtime/simulation/barriers/",
    "spark/faults/test_cluster.py",
    "demo/",
    "runtime/spark/test_cluster_topologies.py",
    "runtime/spark/test_barrier_mode.py",
    "runtime/spark/test_over_connect.py",
    "docs/test_run_snippets.py",
    "docs/test_tutorials.py",
    "spark/features/",
    "connectors/test_in_topologies.py",
    "connectors/test_in_queries.py",
    "connectors/test_kafka_copied.py",
    "scaffold/test_running.py",
    "runtime/spark/",
    "spark/faults/",
    "spark/script/",
    "runtime/slot/processes/",
    "runtime/simulation/",
)
"""What takes longest comes first: a process takes a whole file, and the others should not wait for the last one."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without looking for garbage: there is none, and each process has some 7,000 tests to keep.

    Nor are those looked at while tests run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def _place(item: pytest.Item) -> int:
    name = item.nodeid.removeprefix("tests/")
    return next((place for place, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))


@pytest.hookimpl(tryfirst=True)  # Before pytest looks at -m.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, names in LISTED.items():
            if _is_listed(item, names):
                item.add_marker(mark)
        if _needs_spark(item):
            item.add_marker(pytest.mark.spark)
    items.sort(key=_place)


# ---------------------------------------------------------------- skips


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say each reason for skips once: a program that is not installed has tests in many files."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, number in sorted(reasons.items()):
        terminalreporter.write_line(f"SKIPPED [{number}] {reason.removeprefix('Skipped: ')}")


ALLOWED_SKIPS = {
    "test_a_full_file_system_refuses_intake_and_not_deletes": "mounts a file system, which takes root's rights"
}
"""Tests that a machine may skip, and why. With CI set, a run with any other skip fails."""


def _unexpected_skips(skipped: list[Any]) -> list[str]:
    """Name the skipped tests, and modules skipped as they were collected, that are not on the list."""
    return sorted(
        {report.nodeid for report in skipped if re.sub(r".*::|\[.*", "", report.nodeid) not in ALLOWED_SKIPS}
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        not os.environ.get("CI") or reporter is None
    ):  # A process of xdist's has no reporter: it reports elsewhere.
        return
    unexpected = _unexpected_skips(reporter.stats.get("skipped", []))
    if unexpected and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    for nodeid in unexpected:
        reporter.write_line(
            f"CI is set and {nodeid} was skipped: see ALLOWED_SKIPS in tests/conftest.py", red=True
        )


# ---------------------------------------------------------------- Spark


def _needs_spark(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    return item.get_closest_marker("spark") is not None or bool(fixtures & {"spark", "make_spark"})


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("spark") is None:
        return
    if JAVA_FAULT:
        pytest.fail(JAVA_FAULT, pytrace=False)
    spark_home.use_class_archive(ensure_java().program)


@contextlib.contextmanager
def _daemon(directory: Path, name: str, *arguments: str, ready: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Run a daemon of Spark's; yields its process id and the line that said it was ready."""
    env = os.environ | {
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(directory / "work"),
        "SPARK_LOCAL_DIRS": str(directory / "local"),
    }
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [f"{os.environ['SPARK_HOME']}/bin/spark-class", *arguments], stdout=output, stderr=output, env=env
        )
    try:
        deadline = time.monotonic() + DAEMON_START_S
        while (said := re.search(ready, log.read_text("utf-8", "replace"))) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        yield process.pid, said
    finally:
        # Asked to, a worker ends its executors with it.
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def make_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return the process's session; ``make_spark(master="local[1]", **{"spark.conf": "value"})``.

    There is one JVM a process, whose master cannot change: a test of another one starts a process of its own.
    """
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    directory = tmp_path_factory.mktemp("spark")

    def make(master: str = MASTER, **conf: str) -> SparkSession:
        running = SparkSession.getActiveSession()
        if running is not None and running.sparkContext.master != master:
            raise AssertionError(
                f"this process runs Spark on {running.sparkContext.master}; start a process for {master}"
            )
        builder = SparkSession.builder.master(master).appName("ftlayer tests")
        settings = {
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            "spark.sql.streaming.pollingDelay": "100ms",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.local.dir": str(directory / "local"),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            **conf,
        }
        for key, value in settings.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()

    yield make
    running = SparkSession.getActiveSession()
    if running is not None:
        running.stop()


@pytest.fixture(scope="session")
def start_cluster() -> Callable[..., contextlib.AbstractContextManager[tuple[str, list[int]]]]:
    """Return ``start_cluster(directory, cores, settings)``: a standalone cluster of a master and two workers.

    Each worker has so many cores. It yields the master's URL and the workers' process ids. The workers have a host
    each: Spark speculates on another host only.
    """

    @contextlib.contextmanager
    def start(directory: Path, cores: int, settings: dict[str, str]) -> Iterator[tuple[str, list[int]]]:
        properties = directory / "spark.conf"
        properties.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        packages = "org.apache.spark.deploy"
        ports = ("--port", "0", "--webui-port", "0", "--properties-file", str(properties))
        with contextlib.ExitStack() as stack:
            master = (f"{packages}.master.Master", "--host", "127.0.0.1", *ports)
            _, said = stack.enter_context(
                _daemon(directory, "master", *master, ready=r"Starting Spark master at (spark://\S+)")
            )
            workers = []
            for host in ("127.0.0.2", "127.0.0.3"):
                size = ("--cores", str(cores), "--memory", "1g")
                worker = (f"{packages}.worker.Worker", "--host", host, *ports, *size, said[1])
                pid, _ = stack.enter_context(
                    _daemon(directory, host, *worker, ready="Successfully registered with master")
                )
                workers.append(pid)
            yield said[1], workers

    return start


@pytest.fixture(scope="session")
def spark_authentication() -> dict[str, str]:
    """Settings of a cluster, and of its applications: a shared secret, and RPC and shuffles encrypted with it."""
    return {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_hex(),
        "spark.network.crypto.enabled": "true",
        "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    }


@pytest.fixture(scope="session")
def spark_tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same with TLS, of RPC, shuffles and UIs, by a certificate that is made here."""
    made = make_certificate(["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    password = secrets.token_hex()
    store = tmp_path_factory.mktemp("tls") / "store.p12"
    store.write_bytes(
        pkcs12.serialize_key_and_certificates(
            b"spark",
            load_pem_private_key(made.key, None),  # type: ignore[arg-type]
            load_pem_x509_certificate(made.cert),
            None,
            BestAvailableEncryption(password.encode()),
        )
    )
    return {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_hex(),
        "spark.ssl.enabled": "true",
        "spark.ssl.rpc.enabled": "true",
        "spark.ssl.protocol": "TLSv1.3",
        "spark.ssl.keyStore": str(store),
        "spark.ssl.keyStoreType": "PKCS12",
        "spark.ssl.keyStorePassword": password,
        "spark.ssl.keyPassword": password,
        # Java trusts the certificate of a key, too.
        "spark.ssl.trustStore": str(store),
        "spark.ssl.trustStoreType": "PKCS12",
        "spark.ssl.trustStorePassword": password,
    }


@pytest.fixture(scope="session")
def spark(make_spark: Callable[..., Any]) -> Any:
    """The session most tests run on: `MASTER`, UTC, two shuffle partitions."""
    return make_spark()


# ---------------------------------------------------------------- lines of text

NOT_TEXT = {"site-packages", "test", "tests", "lib2to3", "idlelib", "__pycache__", "encodings"}
"""Directories of a standard library that may be left out, or hold other people's code or tables."""


def _real_logs() -> dict[str, list[str]]:
    """Return the lines of each ``*.log`` of the directory that ``FTLAYER_LOGHUB`` names; none where it is not set."""
    named = os.environ.get("FTLAYER_LOGHUB")
    if not named:
        return {}
    paths = sorted(Path(named).glob("*.log"))
    assert paths, f"FTLAYER_LOGHUB is {named!r}, and there is no *.log in it"
    return {path.name: path.read_bytes().decode("ascii", "replace").splitlines() for path in paths}


def _source_lines() -> Iterator[str]:
    """Yield the lines of Python's standard library, which every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not NOT_TEXT & set(path.relative_to(root).parts):
            yield from path.read_bytes().decode("ascii", "replace").split("\n")


@pytest.fixture(scope="session")
def real_lines() -> list[str]:
    """10,000 lines of real text, equal ones among them, none blank, ASCII: one is the same to Python and Spark.

    Half of them are lines of real logs where ``FTLAYER_LOGHUB`` names a directory of some.
    """
    sources: list[Iterator[str]] = [_source_lines()]
    if logs := _real_logs():
        sources.append(chain.from_iterable(zip_longest(*logs.values(), fillvalue="")))
    lines = chain.from_iterable(zip_longest(*sources, fillvalue=""))
    kept = (line.strip() for line in lines if line.strip().isprintable() and line.strip().isascii())
    return list(islice((line for line in kept if line), 10_000))


@pytest.fixture(scope="session")
def apache_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with error logs of an Apache server: one written here, and real ones that `_real_logs` has."""
    directory = tmp_path_factory.mktemp("apache")
    (directory / "written.log").write_text("".join(f"{line}\n" for line in _apache_lines()))
    for name, lines in _real_logs().items():
        if name.startswith("Apache"):
            (directory / name).write_text("".join(f"{line}\n" for line in lines))
    return directory


def _apache_lines() -> Iterator[str]:
    """Write 2,000 lines as mod_jk under load leaves them, always the same."""
    draw = random.Random(7)
    second = 0
    for _ in range(2_000):
        second += draw.choice((0, 0, 1, 2, 7, 40))
        level, message = draw.choice(
            (
                ("notice", "workerEnv.init() ok /etc/httpd/conf/workers2.properties"),
                (
                    "notice",
                    f"jk2_init() Found child {draw.randint(1_000, 9_999)} in scoreboard slot {draw.randint(5, 12)}",
                ),
                ("error", f"mod_jk child workerEnv in error state {draw.randint(6, 10)}"),
                ("error", f"mod_jk child init {draw.randint(1, 3)} -2"),
                (
                    "error",
                    f"[client {draw.randint(1, 254)}.0.2.7] Directory index forbidden by rule: /var/www/html/",
                ),
            )
        )
        time_of_day = f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
        yield f"[Sun Dec 04 {time_of_day} 2005] [{level}] {message}"
