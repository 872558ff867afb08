"""What an environment refuses before anything runs, and what it shows. No Spark: sessions are stand-ins."""

from __future__ import annotations

import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common import java as bundled_java
from ftlayer.common.rules.circuit import Limit
from ftlayer.config import FTStatus, TopologyOptions
from ftlayer.errors import (
    ConfigError,
    InvalidTopologyError,
    JavaMissingError,
    JobStartError,
    UnsupportedError,
)
from ftlayer.functions.retry_rules import NO_RULES
from ftlayer.runtime.driver import session as spark_checks
from ftlayer.runtime.driver.job_thread import JobThread
from ftlayer.runtime.driver.session import (
    MAX_ERROR_CHARS,
    Place,
    TaskSlotsTaken,
    check_session,
    check_task_slots,
    pickled_order,
    place_of,
    spark_error_text,
)
from ftlayer.runtime.environment import StreamEnvironment, open_server
from ftlayer.runtime.protocol.messages import SlotOrder
from ftlayer.runtime.slot.rules.mode import Order, UntrackedSlotFactory
from ftlayer.spark import sessions
from ftlayer.spark.connection import RetryDefaults
from ftlayer.spark.facade import FTLayer
from ftlayer.transport.address import parse_address
from ftlayer.transport.flight_connection import Endpoint
from ftlayer.vertex.calls import StreamCircuit, StreamOptions

WAIT_S = 600


class FakeSession:
    """The little of a session that the checks ask for."""

    def __init__(self, slots: int = 4, stopped: bool = False, **conf: str) -> None:
        values = {"spark.master": "local[4]"} | {
            name.replace("_", "."): value for name, value in conf.items()
        }
        self.conf = SimpleNamespace(get=lambda name, default=None: values.get(name, default))
        executor = SimpleNamespace(maxTasks=lambda: slots)
        executors = SimpleNamespace(length=lambda: 1, apply=lambda place: executor)
        store = SimpleNamespace(executorList=lambda active: executors)
        jsc = SimpleNamespace(sc=lambda: SimpleNamespace(statusStore=lambda: store, isStopped=lambda: False))
        self.sparkContext = SimpleNamespace(_jsc=None if stopped else jsc)


def a_layer(status: FTStatus = FTStatus.ON) -> Any:
    def client_for(spark: Any) -> Any:
        raise AssertionError("nothing may start yet")

    return SimpleNamespace(
        status=status,
        stream_options=StreamOptions(),
        _retries=RetryDefaults(NO_RULES, None, None),
        client_for=client_for,
        _check_open=lambda: None,
    )


def an_environment(spark: Any, name: str = "job", parallelism: int = 2, **options: Any) -> StreamEnvironment:
    env = StreamEnvironment(spark, a_layer(**options), name=name, parallelism=parallelism)
    env.source([1, 2, 3], "id bigint").map(lambda it: it + 1, "id bigint").uid("plus").sink(print)
    return env


def an_order(env: StreamEnvironment) -> Order:
    endpoint = Endpoint("grpc://127.0.0.1:1", "token")
    graph = env.job_graph()
    return SlotOrder(
        "job", 0, endpoint, graph, TopologyOptions(), UntrackedSlotFactory(), "127.0.0.1", None, None, b""
    )


# ---------------------------------------------------------------- the session


def test_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ensure_java", lambda: None)
    for wrong in (None, "local[2]", FakeSession, SparkSession.builder):
        with pytest.raises(ConfigError, match=r"spark: expected a SparkSession, got .*getOrCreate"):
            StreamEnvironment(wrong, a_layer(), name="job")


def test_a_board_is_a_layer_beside_checkpoints() -> None:
    env = StreamEnvironment(FakeSession(), name="job", checkpointing=CheckpointConfig(), board=a_layer())
    assert env.name == "job"
    for given in ({"layer": a_layer()}, {"checkpointing": CheckpointConfig()}):
        wrong = a_layer() if "layer" in given else "grpc://127.0.0.1:7077"
        with pytest.raises(ConfigError, match=r"board: expected FTLayer.connect"):
            StreamEnvironment(FakeSession(), name="job", board=wrong, **given)


def test_metrics_of_a_topology_are_the_vertexs_where_there_is_one() -> None:
    options = TopologyOptions(metrics_port=9464)
    StreamEnvironment(FakeSession(), name="job", checkpointing=CheckpointConfig(), options=options)
    StreamEnvironment(FakeSession(), a_layer(status=FTStatus.OFF), name="job", options=options)
    for told in ({"layer": a_layer()}, {"checkpointing": CheckpointConfig(), "board": a_layer()}):
        with pytest.raises(ConfigError, match=r"metrics_port: the vertex tells of this topology"):
            StreamEnvironment(FakeSession(), name="job", options=options, **told)
        pushed = TopologyOptions(otlp_endpoint="http://localhost:4318")
        with pytest.raises(ConfigError, match=r"otlp_endpoint: the vertex tells of this topology"):
            StreamEnvironment(FakeSession(), name="job", options=pushed, **told)


def test_no_session_and_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled_java, "is_installed", lambda: False)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(JavaMissingError, match="JAVA_HOME is /nowhere"):
        StreamEnvironment(None, a_layer(), name="job")


def test_a_stopped_session() -> None:
    with pytest.raises(JobStartError, match="was stopped"):
        check_session(FakeSession(stopped=True))


@pytest.mark.parametrize("option", ["spark.speculation", "spark.python.worker.killOnIdleTimeout"])
def test_what_would_disturb_slots(option: str) -> None:
    spark = FakeSession()
    check_session(spark)
    spark.conf = SimpleNamespace(get=lambda name, default=None: "TRUE" if name == option else default)
    with pytest.raises(ConfigError, match=f"{option} is on"):
        check_session(spark)


def test_too_few_task_slots() -> None:
    env = an_environment(FakeSession(slots=1))
    with pytest.raises(
        JobStartError, match=r"needs 2 task slots .*Spark has 1: start Spark with master local\[2\]"
    ):
        env.execute_async()


def test_too_few_task_slots_beside_another_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = TaskSlotsTaken()
    monkeypatch.setattr(spark_checks, "_TAKEN", taken)
    taken.take("other", 3)
    taken.take("job", 2)
    with pytest.raises(JobStartError, match=r"Spark has 4, of which 'other' holds 3: .* local\[5\]"):
        check_task_slots(FakeSession(slots=4), 2, "job")
    taken.give_back("other")
    check_task_slots(FakeSession(slots=4), 2, "job")


def test_dynamic_allocation_may_bring_more(caplog: pytest.LogCaptureFixture) -> None:
    spark = FakeSession(slots=1, spark_master="spark://there:7077", spark_dynamicAllocation_enabled="true")
    check_task_slots(spark, 2, "job")
    assert "dynamic allocation may bring more" in caplog.text


def test_a_name_runs_once() -> None:
    taken = TaskSlotsTaken()
    taken.take("job", 1)
    with pytest.raises(ConfigError, match="topology 'job' runs already"):
        taken.take("job", 1)
    taken.give_back("job")
    taken.take("job", 1)


def test_a_start_that_is_refused_holds_nothing() -> None:
    env = an_environment(FakeSession(slots=1))
    for _ in range(2):
        with pytest.raises(JobStartError, match="task slots"):
            env.execute_async()


# ---------------------------------------------------------------- the plan


def test_an_operator_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    env = StreamEnvironment(FakeSession(), a_layer(), name="job")
    stream = env.source([1], "id bigint").map(lambda it: it, "id bigint")
    stream.filter(lambda it: lock.locked()).uid("guarded").sink(print)
    with pytest.raises(InvalidTopologyError, match=r"'guarded' .* cannot be sent to the slots: .*lock"):
        pickled_order(an_order(env))


def test_an_order_travels() -> None:
    import pickle

    order = an_order(an_environment(FakeSession()))
    back = pickle.loads(pickled_order(order))
    assert back.graph.slots == order.graph.slots
    assert "token" not in repr(back.coordinator).replace("token=", "")


# ---------------------------------------------------------------- where the driver is


@pytest.mark.parametrize(
    ("conf", "place"),
    [
        ({"spark_master": "local[*]"}, Place("127.0.0.1", "127.0.0.1", own_executors=True)),
        ({"spark_master": "local-cluster[2,1,512]"}, Place("127.0.0.1", "127.0.0.1", own_executors=True)),
        ({"spark_master": "spark://a:7077", "spark_driver_host": "10.0.0.7"}, Place("10.0.0.7", "10.0.0.7")),
        (
            {
                "spark_master": "k8s://a",
                "spark_driver_host": "driver.svc",
                "spark_driver_bindAddress": "10.1.1.1",
            },
            Place("10.1.1.1", "driver.svc"),
        ),
    ],
)
def test_where_the_coordinator_listens(conf: dict[str, str], place: Place) -> None:
    assert place_of(FakeSession(**conf)) == place
    assert place.is_local == (place.advertised == "127.0.0.1")


@pytest.mark.parametrize(
    ("place", "scheme"),
    [
        (Place("127.0.0.1", "127.0.0.1", own_executors=True), "grpc+unix"),
        # A standalone cluster on this machine, or Spark Connect: its workers may be another user's.
        (Place("127.0.0.1", "127.0.0.1"), "grpc"),
        (Place("0.0.0.0", "driver.example"), "grpc+tls"),
    ],
)
def test_how_slots_reach_the_driver_and_each_other(place: Place, scheme: str) -> None:
    graph = an_environment(FakeSession()).job_graph()
    mode: Any = None
    server, order = open_server(JobThread("job"), graph, place, TopologyOptions(), mode, b"k" * 32)
    address = parse_address(order.coordinator.address, "address")
    assert str(address).startswith(f"{scheme}://")
    assert bool(order.sockets) == (scheme == "grpc+unix")
    if order.sockets:
        assert Path(address.path).parent == Path(order.sockets)
        assert stat.S_IMODE(Path(order.sockets).stat().st_mode) == 0o700
    else:
        assert address.host == place.advertised
    server.close()
    give_up = time.monotonic() + WAIT_S
    while order.sockets and Path(order.sockets).exists():
        assert time.monotonic() < give_up, "its sockets are still there"
        time.sleep(0.005)


# ---------------------------------------------------------------- what Spark says


def test_spark_errors_are_cut_to_what_matters() -> None:
    python = RuntimeError(
        "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n  File x\n"
        "ValueError: two\nlines\n\tat org.apache.spark.Some.method(Some.scala:1)"
    )
    assert spark_error_text(python) == "Traceback (most recent call last):\n  File x\nValueError: two\nlines"
    crash = RuntimeError(
        "An error occurred while calling o90.collectToPython.\n: org.apache.spark.SparkException: Job aborted due to "
        "stage failure: Task 0 (TID 2): org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)."
        "\n\tat org.apache.spark.Some.method(Some.scala:1)"
    )
    assert spark_error_text(crash) == "Python worker exited unexpectedly (crashed)."
    assert spark_error_text(RuntimeError("plain")) == "plain"
    assert len(spark_error_text(RuntimeError("x" * 100_000))) == MAX_ERROR_CHARS + 1


# ---------------------------------------------------------------- looking at it


def test_it_shows_itself() -> None:
    env = an_environment(FakeSession())
    assert "topology 'job'" in env.explain()
    assert "plus" in env.to_mermaid()
    assert "plus" in env.to_dot()


def test_off_is_allowed_what_cannot_be_tracked() -> None:
    on, off = (
        StreamEnvironment(FakeSession(), a_layer(status), name="job")
        for status in (FTStatus.ON, FTStatus.OFF)
    )
    for env in (on, off):
        env.source([1], "id bigint").key_by("id").reduce(lambda a, b: a).sink(print)
    with pytest.raises(InvalidTopologyError, match="volatile_state"):
        on.job_graph()
    assert not off.job_graph().tracked


def test_a_layer_s_circuit_breaker_is_that_of_a_topology() -> None:
    env = StreamEnvironment(FakeSession(), FTLayer.embedded("x", max_failing="5%"), name="shop")
    env.source([1], "n int", uid="plain").sink(print)
    env.source([1], "n int", uid="own", max_failing="100/min").sink(print)
    assert {name: options.circuits for name, options in env.job_graph().options} == {
        "shop/plain": (StreamCircuit("", Limit(share=0.05)),),
        "shop/own": (StreamCircuit("own", Limit(count=100)),),
    }


def test_with_checkpoints_there_is_no_circuit_breaker() -> None:
    given: dict[str, Any] = {
        "spark": FakeSession(),
        "name": "shop",
        "checkpointing": CheckpointConfig(directory="x"),
    }
    says = "there is no option 'max_failing': it is one of FTLayer.embedded"
    with pytest.raises(ConfigError, match=f"StreamEnvironment: {says}"):
        StreamEnvironment(**given, max_failing="5%")
    env: Any = StreamEnvironment(**given)
    env.source([1], "n int", uid="numbers", max_failing="5%").sink(print)
    with pytest.raises(UnsupportedError, match="'numbers': max_failing of a source is for acker mode"):
        env.job_graph()
