"""Sources and sinks in slots: a third party's, by callback, and with records of 16 MiB."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import PushSource

pytestmark = pytest.mark.spark

EVENT = "event_name string, email string, event_time bigint"


class StandIn:
    """Takes the place of the web service that ``meta_capi`` posts to, in the slot, and lets records through."""

    def __init__(self, kit: ModuleType, directory: Path) -> None:
        self._kit, self._directory = kit.note, str(directory)

    def __call__(self, name: str) -> tuple[str, str, int]:
        from types import SimpleNamespace

        from pyspark_datasources import meta_capi

        note, directory = self._kit, Path(self._directory)

        def post(url: str, json: Any = None, **more: Any) -> Any:
            note(directory, "posted", [event["event_name"] for event in json["data"]])
            answer = {"events_received": len(json["data"])}
            return SimpleNamespace(status_code=200, raise_for_status=lambda: None, json=lambda: answer)

        meta_capi.requests = SimpleNamespace(post=post, exceptions=meta_capi.requests.exceptions)
        return name, f"{name}@example.org", 1


def test_third_parties(environment: Any, logs_kit: ModuleType, tmp_path: Path) -> None:
    """``fake`` and ``meta_capi`` of pyspark-data-sources, as they are."""
    sources = pytest.importorskip("pyspark_datasources")
    from pyspark_datasources.meta_capi import MetaCapiDataSource

    env = environment()
    people = env.source(sources.FakeDataSource, "name string", options={"numRows": 5})
    events = people.rebalance().map(StandIn(logs_kit, tmp_path), EVENT)
    events.sink(
        MetaCapiDataSource, options={"access_token": "t", "pixel_id": "p"}, every="100ms", max_rows=10
    )
    job = env.execute_async()
    posted = logs_kit.Notes(tmp_path, "posted")
    logs_kit.until(job, lambda: len(posted.rows()) >= 30)
    assert job.drain(600)
    status = job.status()
    assert len(posted.rows()) == status.counters["persisted"]
    assert all(isinstance(name, str) and name for name in posted.rows())


def pushing(kit: ModuleType, directory: Path) -> Callable[[Any], Callable[[], None]]:
    """Records by callback from two threads, until it is stopped; notes what was said to be persisted."""
    note, folder = kit.note, str(directory)

    def start(push: Callable[[list[Any]], None]) -> Callable[[], None]:
        stopped = threading.Event()

        def run(first: int) -> None:
            from ftlayer.errors import SourceError

            number = first
            while not stopped.is_set():
                records = list(range(number, number + 7))
                try:
                    push(records)
                except SourceError:
                    return
                note(Path(folder), "pushed", records)
                number += 7

        for first in (0, 1 << 32):
            threading.Thread(target=run, args=(first,), daemon=True).start()
        return stopped.set

    return start


def test_records_by_callback(environment: Any, logs_kit: ModuleType, tmp_path: Path) -> None:
    env = environment()
    numbers = env.source(PushSource(pushing(logs_kit, tmp_path)), "id bigint")
    numbers.key_by("id").map(lambda it: it, "id bigint").sink(logs_kit.Journal(tmp_path))
    job = env.execute_async()
    out, pushed = logs_kit.Notes(tmp_path, "out"), logs_kit.Notes(tmp_path, "pushed")
    logs_kit.until(job, lambda: len(out.rows()) >= 1_000)
    assert job.drain(600)
    came = Counter(row[0] for row in out.rows())
    assert came.keys() >= set(pushed.rows())
    assert set(came.values()) == {1}
    assert len(came) - len(pushed.rows()) <= 2 * 7


def large(records: int) -> Iterator[tuple[int, bytes]]:
    for number in range(records):
        yield number, bytes([number]) * (16 << 20)


class Sizes:
    """A sink that writes down what large records are."""

    def __init__(self, kit: ModuleType, directory: Path) -> None:
        self._note, self._directory = kit.note, str(directory)

    def __call__(self, batch: pa.RecordBatch) -> None:
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        self._note(
            Path(self._directory), "out", [(n, len(it), hashlib.sha256(it).hexdigest()) for n, it in rows]
        )


class FailsOnce:
    """Fails for each record when it comes first."""

    def __init__(self, kit: ModuleType, directory: Path) -> None:
        self._first_time, self._directory = kit.first_time, str(directory)

    def __call__(self, record: tuple[int, bytes]) -> tuple[int, bytes]:
        if self._first_time(f"{self._directory}/{record[0]}"):
            raise RuntimeError(f"at first, in {os.getpid()}")
        return record


@pytest.mark.campaign
def test_records_of_16_mib(environment: Any, logs_kit: ModuleType, tmp_path: Path) -> None:
    records = 6
    env = environment()
    source = env.source(lambda: large(records), "id bigint, data binary")
    keyed = source.key_by("id").map(FailsOnce(logs_kit, tmp_path), "id bigint, data binary")
    keyed.rebalance().sink(Sizes(logs_kit, tmp_path))
    job = env.execute_async()
    assert job.wait(600), job.status()
    rows = Counter(tuple(row) for row in logs_kit.Notes(tmp_path, "out").rows())
    assert rows == Counter((n, len(it), hashlib.sha256(it).hexdigest()) for n, it in large(records))
    assert job.status().counters["replayed"] == records
