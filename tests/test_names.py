"""A class's name says which class it is: each stands once in the package. And what users hold says what it is."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ftlayer
from ftlayer import (
    CheckpointConfig,
    FTLayer,
    FTStatus,
    Job,
    JobState,
    StreamEnvironment,
    session,
    sliding,
    tumbling,
)
from ftlayer.sinks import HttpSink, KafkaSink, PostgresSink
from ftlayer.sources import RedisSource
from ftlayer.spark.query.supervisor import TrackedQuery

PACKAGE = Path(ftlayer.__file__).parent
IN_CHECKPOINTS = {"Piece"}
"""Checkpoints hold objects of both classes, by their names."""


def test_public_classes_have_names_of_their_own() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if "templates" in path.parts:
            continue  # They are parts of users' projects.
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in IN_CHECKPOINTS} == {}
    assert set(twice) == IN_CHECKPOINTS


def test_a_star_hides_no_built_in_name() -> None:
    assert not set(ftlayer.__all__) & set(dir(builtins))
    assert {"max", "min", "sum"} <= set(dir(ftlayer))


def test_what_users_hold_says_name_mode_and_state() -> None:
    spark = SimpleNamespace(conf={})
    layer = FTLayer.embedded("state/ft")
    assert repr(layer) == "FTLayer(embedded, 'state/ft', not started)"
    env = StreamEnvironment(spark, layer, name="orders")
    assert repr(env) == "StreamEnvironment('orders', acker mode)"
    layer.close()
    assert repr(layer) == "FTLayer(embedded, 'state/ft', closed)"
    off = FTLayer.connect("grpc://127.0.0.1:7077", token="t" * 16, status=FTStatus.OFF)
    assert repr(off) == "FTLayer(connected, grpc://127.0.0.1:7077, off)"
    assert repr(StreamEnvironment(spark, off, name="orders")) == "StreamEnvironment('orders', untracked)"
    barriers = StreamEnvironment(spark, checkpointing=CheckpointConfig(directory="state"), name="totals")
    assert repr(barriers) == "StreamEnvironment('totals', barrier mode)"
    stream = barriers.source([{"id": 1}], "id long", uid="ids")
    assert repr(stream) == "DataStream('ids': id int64)"
    assert repr(stream.key_by("id")) == "KeyedStream('ids': id int64; by id)"
    keyed = stream.key_by("id")
    assert repr(stream.connect(keyed)) == f"ConnectedStreams({stream!r}, {keyed!r})"
    windows = keyed.window(tumbling("10 minutes", offset="-5m"))
    assert repr(windows) == "WindowedStream('ids' by id; tumbling 10 minutes from -5 minutes on)"
    hops = keyed.window(sliding("90s", every="1.5s")).allowed_lateness("1 hour").late_to("late")
    assert repr(hops) == (
        "WindowedStream('ids' by id; sliding 90 seconds every 1500 milliseconds; 1 hour late; too late to 'late')"
    )
    assert repr(session("1d")) == "session 1 day"
    running: Any = SimpleNamespace(name="totals", state=JobState.RUNNING)
    assert repr(Job(running)) == "Job('totals', running)"
    query: Any = SimpleNamespace(name="clean", isActive=False, error=ValueError())
    assert repr(TrackedQuery(query)) == "TrackedQuery('clean', failed)"


def test_a_source_or_sink_says_where_it_is_and_no_secret() -> None:
    assert (
        repr(RedisSource("redis://u:pw@h", "a:b", "g"))
        == "RedisSource(url='redis://h', stream='a:b', group='g')"
    )
    assert repr(HttpSink("https://u:pw@h/p?key=pw", headers={"k": "pw"})) == "HttpSink(url='https://h/p')"
    assert repr(PostgresSink("host=h password=pw", "t")) == "PostgresSink(dsn='…', table='t')"
    kafka = KafkaSink("h:1", "t", exactly_once=False, config={"sasl.password": "pw"})
    assert repr(kafka) == "KafkaSink(servers='h:1')"
