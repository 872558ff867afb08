"""SIGKILL under load: two client processes persist and XOR while the vertex is killed again and again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ftlayer.config import VertexOptions
from ftlayer.vertex.calls import ListRecords, Stats
from ftlayer.vertex.service.embedded import EmbeddedVertex

CLIENT = """
    import json, sys
    import numpy as np, pyarrow as pa
    from ftlayer.errors import StaleIncarnationError, VertexUnavailableError
    from ftlayer.vertex.calls import OpenStream, Persist, SourcePosition, StreamOptions, Xor
    from ftlayer.records.ids import RootSeed, root_ids
    from ftlayer.vertex.client.client import VertexClient

    address, token, name, calls, rows, shards = json.loads(sys.argv[1])
    client = VertexClient(address, token, client_id=name, deadline_ms=60_000)
    stream = f"{name}/source"
    opened = client.call(OpenStream(stream, StreamOptions(timeout_ms=3_600_000, max_attempts=100)))
    incarnation = opened.incarnation
    shard, shards = client.shard_of(stream)
    rng = np.random.default_rng(len(name))
    accepted, completed = [], []

    def finish(number, future):
        global incarnation
        try:
            reply = future.result()
        except StaleIncarnationError:
            incarnation = client.health().incarnation
            return
        assert reply.completed in (0, rows), reply
        if reply.completed:
            completed.append(number)

    pipeline = client.pipeline(window=32)
    persists, xors = [], []
    for number in range(calls):
        roots = root_ids(RootSeed(name, "run", "source", 0, 0), number * rows, rows, shard=shard, shards=shards)
        values = rng.integers(1, 2**63, rows, dtype=np.uint64)
        first = number * rows
        payload = pa.record_batch({"name": [name] * rows, "n": range(first, first + rows)})
        start = None if number == 0 else str(number - 1).encode()
        position = SourcePosition("0", start, str(number).encode())
        call = Persist(stream, payload, roots, values, None, position)
        persists.append((call, pipeline.submit(call)))
        while len(persists) > 16 or (number == calls - 1 and persists):
            call, future = persists.pop(0)
            assert future.result().rows == rows
            done = len(accepted)
            accepted.append(done)
            if done % 2:
                xors.append((done, pipeline.submit(Xor(call.roots, call.values, incarnation))))
        while len(xors) > 16 or (number == calls - 1 and xors):
            finish(*xors.pop(0))
    pipeline.close()
    print(json.dumps([len(accepted), completed]))
"""


def run_clients(vertex: EmbeddedVertex, calls: int, rows: int) -> list[subprocess.Popen[str]]:
    processes = []
    for name in ("first", "second"):
        order = json.dumps([vertex.address, vertex.token, name, calls, rows, 1])
        command = [sys.executable, "-c", textwrap.dedent(CLIENT), order]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return processes


def kill_under_load(
    vertex: EmbeddedVertex, clients: list[subprocess.Popen[str]], kills: int, seed: int
) -> int:
    """Kill the vertex after a random number of rows each time, while a client is at work."""
    rng = random.Random(seed)
    done = 0
    with vertex.client(deadline_ms=60_000) as client:
        while done < kills and any(process.poll() is None for process in clients):
            incarnation = client.health().incarnation
            wanted = rng.randrange(1, 3_000)
            while any(process.poll() is None for process in clients):
                stats: Any = client.call(Stats())
                if stats.values["persisted"] >= wanted:
                    vertex.kill()
                    done += 1
                    while client.health().incarnation == incarnation:
                        pass
                    break
    return done


def listed(vertex: EmbeddedVertex) -> Counter[tuple[str, int]]:
    """Return every record that the vertex still has, whatever its state."""
    found: Counter[tuple[str, int]] = Counter()
    with vertex.client() as client:
        for state in ("pending", "waiting", "delivery", "dead"):
            after = b""
            while True:
                page: Any = client.call(ListRecords(state, after=after, limit=5_000))
                for record in page.records:
                    [row] = record.payload.to_pylist()
                    found[row["name"], row["n"]] += 1
                after = page.more
                if not after:
                    break
    return found


@pytest.mark.parametrize(("shards", "seed"), [(1, 1), (2, 2)])
def test_nothing_is_lost_and_nothing_stored_twice(tmp_path: Path, shards: int, seed: int) -> None:
    calls, rows = 300, 25
    with EmbeddedVertex(VertexOptions(tmp_path / "vertex", shards=shards)) as vertex:
        clients = run_clients(vertex, calls, rows)
        kills = kill_under_load(vertex, clients, 3, seed)
        outputs = [process.communicate(timeout=900)[0] for process in clients]
        assert [process.returncode for process in clients] == [0, 0]
        assert kills >= 2
        vertex.check()
        # What completed just before a kill may be there again, to be replayed; what did not has to be.
        vertex.kill()
        found = listed(vertex)
    for name, output in zip(("first", "second"), outputs, strict=True):
        accepted, completed = json.loads(output)
        assert accepted == calls
        may_be_gone = {number * rows + row for number in completed for row in range(rows)}
        for number in range(calls * rows):
            count = found.pop((name, number), 0)
            assert count == 1 or (count == 0 and number in may_be_gone), (name, number, count)
    assert not found
