"""A medium topology in words and pictures, to the letter."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.config import FTStatus
from ftlayer.functions.process import ProcessFunction
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.explain import explain, to_dot, to_mermaid
from ftlayer.topology.job_graph import StreamGraph
from ftlayer.topology.job_graph_generator import job_graph


def parse(record: Any) -> Any:
    return record


def total(one: Any, other: Any) -> Any:
    return one


def pair(order: Any, payment: Any) -> Any:
    return order


def write(batch: Any) -> None: ...


class Overdue(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return [record]

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return None


@pytest.fixture
def shop() -> StreamGraph:
    env = GraphBuilder("shop", parallelism=2)
    schema = "id bigint, user string, ts timestamp"
    orders = env.source(partitions([], []), schema, uid="orders")
    payments = env.source([], schema, uid="payments").assign_watermarks("ts")
    timed = orders.map(parse).assign_watermarks("ts", "5s")
    paid = timed.key_by("id").join(
        payments.key_by("id"), lower="-1s", upper="1m", function=pair, schema="id bigint", volatile_state=True
    )
    watched = paid.key_by("id").process(Overdue(), side={"late": "id bigint"}, volatile_state=True)
    watched.filter(parse).sink(write)
    watched.side_output("late").sink(write, uid="late", parallelism=1)
    orders.key_by("user").reduce(total, volatile_state=True).sink(write, uid="totals")
    return env.build()


EXPLAINED = """\
topology 'shop': 9 chains on 2 slots, fault tolerance on

chains
  orders        ×2  source(2 iterables)
  payments      ×1  source(1 iterable)
  watermarks-1  ×2  watermarks(ts - 1000 ms)
  map-1         ×2  map(parse) → watermarks-2 watermarks(ts - 5000 ms)
  join-1        ×2  join(pair by id = id, -1000 to 60000 ms)
  process-1     ×2  process(Overdue by id)
  filter-1      ×2  filter(parse) → sink-1 sink(write)
  late          ×1  sink(write)
  reduce-1      ×2  reduce(total by user) → totals sink(write)

edges
  #0  payments → watermarks-1  input 0  rebalance
  #1  orders → map-1           input 0  forward     key_hash[0]
  #2  map-1 → join-1           input 0  hash(id)
  #3  watermarks-1 → join-1    input 1  hash(id)
  #4  join-1 → process-1       input 0  hash(id)
  #5  process-1 → filter-1     input 0  forward     key_hash[0]
  #6  process-1[late] → late   input 0  rebalance
  #7  orders → reduce-1        input 0  hash(user)  key_hash[1]

vertex
  stream 'shop/orders': 5 attempts of 30000 ms, 1000000 records in flight
    persists records of 'orders' before they go by #1, #7
    stores key_hash[0] = subtask
    stores key_hash[1] = hash(user)
    replays by 'replay:orders' in slot 0:
      #8  as #1 to map-1     input 0  by key_hash[0]
      #9  as #7 to reduce-1  input 0  by key_hash[1]
  stream 'shop/payments': 5 attempts of 30000 ms, 1000000 records in flight
    persists records of 'payments' before they go by #0
    replays by 'replay:payments' in slot 1:
      #10  as #0 to watermarks-1  input 0  any channel
  stream 'shop/process-1': 5 attempts of 30000 ms, 1000000 records in flight
    persists timers' records of 'process-1' before they go by #5
    stores key_hash[0] = subtask
    replays by 'replay:process-1' in slot 0:
      #11  as #5 to filter-1  input 0  by key_hash[0]
  stream 'shop/process-1:late': 5 attempts of 30000 ms, 1000000 records in flight
    persists timers' records of 'process-1' before they go by #6
    replays by 'replay:process-1:late' in slot 1:
      #12  as #6 to late  input 0  any channel"""

MERMAID = """\
flowchart LR
    c0["orders ×2<br/>source(2 iterables)"]
    c1["payments ×1<br/>source(1 iterable)"]
    c2["watermarks-1 ×2<br/>watermarks(ts - 1000 ms)"]
    c3["map-1 ×2<br/>map(parse)<br/>watermarks(ts - 5000 ms)"]
    c4["join-1 ×2<br/>join(pair by id = id, -1000 to 60000 ms)"]
    c5["process-1 ×2<br/>process(Overdue by id)"]
    c6["filter-1 ×2<br/>filter(parse)<br/>sink(write)"]
    c7["late ×1<br/>sink(write)"]
    c8["reduce-1 ×2<br/>reduce(total by user)<br/>sink(write)"]
    ft[("FTLayer vertex")]
    c1 -->|"rebalance"| c2
    c0 -->|"forward"| c3
    c3 -->|"hash(id)"| c4
    c2 -->|"hash(id), input 1"| c4
    c4 -->|"hash(id)"| c5
    c5 -->|"forward"| c6
    c5 -->|"[late] rebalance"| c7
    c0 -->|"hash(user)"| c8
    c0 -.->|"persist records"| ft
    ft -.->|"replay orders: by key_hash[0]"| c3
    ft -.->|"replay orders: by key_hash[1]"| c8
    c1 -.->|"persist records"| ft
    ft -.->|"replay payments: any channel"| c2
    c5 -.->|"persist timers' records"| ft
    ft -.->|"replay process-1: by key_hash[0]"| c6
    c5 -.->|"[late] persist timers' records"| ft
    ft -.->|"replay process-1: any channel"| c7"""

DOT = """\
digraph "shop" {
    rankdir=LR;
    node [shape=box];
    c0 [label="orders ×2\\nsource(2 iterables)"];
    c1 [label="payments ×1\\nsource(1 iterable)"];
    c2 [label="watermarks-1 ×2\\nwatermarks(ts - 1000 ms)"];
    c3 [label="map-1 ×2\\nmap(parse)\\nwatermarks(ts - 5000 ms)"];
    c4 [label="join-1 ×2\\njoin(pair by id = id, -1000 to 60000 ms)"];
    c5 [label="process-1 ×2\\nprocess(Overdue by id)"];
    c6 [label="filter-1 ×2\\nfilter(parse)\\nsink(write)"];
    c7 [label="late ×1\\nsink(write)"];
    c8 [label="reduce-1 ×2\\nreduce(total by user)\\nsink(write)"];
    ft [label="FTLayer vertex", shape=cylinder];
    c1 -> c2 [label="rebalance"];
    c0 -> c3 [label="forward"];
    c3 -> c4 [label="hash(id)"];
    c2 -> c4 [label="hash(id), input 1"];
    c4 -> c5 [label="hash(id)"];
    c5 -> c6 [label="forward"];
    c5 -> c7 [label="[late] rebalance"];
    c0 -> c8 [label="hash(user)"];
    c0 -> ft [label="persist records", style=dashed];
    ft -> c3 [label="replay orders: by key_hash[0]", style=dashed];
    ft -> c8 [label="replay orders: by key_hash[1]", style=dashed];
    c1 -> ft [label="persist records", style=dashed];
    ft -> c2 [label="replay payments: any channel", style=dashed];
    c5 -> ft [label="persist timers' records", style=dashed];
    ft -> c6 [label="replay process-1: by key_hash[0]", style=dashed];
    c5 -> ft [label="[late] persist timers' records", style=dashed];
    ft -> c7 [label="replay process-1: any channel", style=dashed];
}"""


def test_in_words(shop: StreamGraph) -> None:
    assert explain(job_graph(shop)) == EXPLAINED


def test_as_mermaid(shop: StreamGraph) -> None:
    assert to_mermaid(job_graph(shop)) == MERMAID


def test_as_dot(shop: StreamGraph) -> None:
    assert to_dot(job_graph(shop)) == DOT


def test_pictures_without_tracking_have_no_vertex(shop: StreamGraph) -> None:
    graph = job_graph(shop, FTStatus.OFF)
    for picture in (to_mermaid(graph), to_dot(graph)):
        assert "FTLayer" not in picture
        assert "replay" not in picture


def test_what_a_picture_would_read_as_markup(env: GraphBuilder) -> None:
    def odd(record: Any) -> Any:
        return record

    odd.__qualname__ = 'a"<b>#\\'
    env.source([], "n int").map(odd).sink(write)
    graph = job_graph(env.build())
    assert "map(a#quot;#lt;b#gt;#35;\\)" in to_mermaid(graph)
    assert 'map(a\\"<b>#\\\\)' in to_dot(graph)


def test_in_words_without_tracking(shop: StreamGraph) -> None:
    text = explain(job_graph(shop, FTStatus.OFF))
    assert text.startswith("topology 'shop'")
    assert "fault tolerance off" in text
    assert "vertex" not in text
    assert "key_hash" not in text


def test_two_chains_alone() -> None:
    env = GraphBuilder("tiny")
    env.source([], "n int").sink(write)
    assert explain(job_graph(env.build(), FTStatus.OFF)) == (
        "topology 'tiny': 2 chains on 1 slot, fault tolerance off\n"
        "\n"
        "chains\n"
        "  source-1  ×1  source(1 iterable)\n"
        "  sink-1    ×1  sink(write)\n"
        "\n"
        "edges\n"
        "  #0  source-1 → sink-1  input 0  forward"
    )
