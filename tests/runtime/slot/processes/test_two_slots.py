from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ftlayer.common.failures import PermanentFailure
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.common.rules.telemetry_settings import tracing_of
from ftlayer.errors import StaleOwnerError
from ftlayer.runtime.protocol.messages import AskStack, SourceFailed, StackTaken
from ftlayer.vertex.calls import Stats, StreamOptions

N = 5_000


def numbers(first: int, last: int) -> Any:
    return lambda: range(first, last)


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "plain"])
def test_a_bounded_job_ends_with_everything(jobs: Any, tracked: bool) -> None:
    graph = jobs.graph([numbers(0, N), numbers(N, 2 * N)], lambda n: [n] if n % 3 else [], tracked=tracked)
    slots = jobs.slots(graph, batch_rows=512)
    slots.drain()
    assert sorted(jobs.written()) == [n for n in range(2 * N) if n % 3]
    assert slots.total("records_in") == 2 * N
    assert slots.total("persisted") == (2 * N if tracked else 0)
    assert slots.total("records_out/source") == 2 * N
    if tracked:  # the end was asked for, and answered with what has carried the records
        assert slots.transports() == {"unix"}
    latencies = slots.latencies()
    assert latencies.keys() == {"source|sink"}
    assert latencies["source|sink"].count >= 1
    roots = [exemplar.root for exemplar in latencies["source|sink"].exemplars if exemplar]
    assert all(roots) if tracked else not roots


def test_a_record_that_fails_is_replayed_to_its_task(jobs: Any) -> None:
    def sometimes(n: int) -> list[int]:
        import os

        marker = f"{flags}/{n}"
        if n % 500 == 7 and not os.path.exists(marker):
            open(marker, "w").close()
            raise ValueError("not yet")
        return [n]

    flags = str(jobs.path)
    graph = jobs.graph(
        [numbers(0, N), numbers(N, 2 * N)], sometimes, retry=StreamOptions(backoff_ms=(50,), jitter=0.0)
    )
    slots = jobs.slots(graph)
    slots.drain()
    assert sorted(jobs.written()) == list(range(2 * N))
    assert slots.total("failed") == slots.total("replayed") == 2 * N // 500


def test_a_record_that_fails_once_is_one_trace_over_all_processes(
    jobs: Any, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sometimes(n: int) -> list[int]:
        import os

        marker = f"{flags}/{n}"
        if n == 7 and not os.path.exists(marker):
            open(marker, "w").close()
            raise ValueError("not yet")
        return [n]

    flags = str(jobs.path)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    graph = jobs.graph(
        [numbers(0, 20), numbers(20, 40)], sometimes, retry=StreamOptions(backoff_ms=(50,), jitter=0.0)
    )
    slots = jobs.slots(graph, tracing=tracing_of(os.environ))
    slots.drain()
    jobs.vertex.stop()  # its last spans go out
    attributes = sys.modules["otlp_collector"].attributes
    traces: dict[bytes, list[Any]] = {}
    for span in collector.spans():
        traces.setdefault(span.trace_id, []).append(span)
    assert len(traces) == 40
    (failed,) = [
        spans
        for spans in traces.values()
        if any(span.status.code == span.status.STATUS_CODE_ERROR for span in spans)
    ]
    ids = {span.span_id: span for span in failed}
    assert len(ids) == len(failed)
    (first,) = [span for span in failed if not span.parent_span_id]
    assert first.name == "source"
    assert all(span.parent_span_id in ids for span in failed if span is not first)
    attempts = {span.name: span for span in failed if span.parent_span_id == first.span_id}
    outcomes = {name: attributes(span)["ftlayer.outcome"] for name, span in attempts.items()}
    assert outcomes == {"attempt 1": "failed", "attempt 2": "completed"}
    (said,) = attempts["attempt 1"].events
    assert "not yet" in attributes(said)["exception.message"]
    assert attributes(said)["ftlayer.operator"] == "work"
    below = {
        name: sorted(span.name for span in failed if span.parent_span_id == attempt.span_id)
        for name, attempt in attempts.items()
    }
    replay = next(vertex.uid for vertex in graph.vertices if vertex.uid not in ("source", "work", "last"))
    assert below == {"attempt 1": ["work"], "attempt 2": ["last", f"replay {replay}", "work"]}
    (work,) = [span for span in failed if span.parent_span_id == attempts["attempt 1"].span_id]
    assert work.status.code == work.status.STATUS_CODE_ERROR
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in failed)
    others = [spans for spans in traces.values() if spans is not failed]
    assert {frozenset(span.name for span in spans) for spans in others} == {
        frozenset({"source", "attempt 1", "work", "last"})
    }
    places = {
        attributes(span).get("ftlayer.slot") for spans in others for span in spans if span.name == "last"
    }
    assert places == {0, 1}


def test_over_tls(jobs: Any) -> None:
    graph = jobs.graph([numbers(0, N)], lambda n: [n])
    slots = jobs.slots(graph, certificate=jobs.certificate())
    assert all(peer.address.startswith("grpc+tls://") for peer in slots.peers.values())
    slots.drain()
    assert slots.transports() == {"flight"}
    assert sorted(jobs.written()) == list(range(N))


def test_a_slot_that_is_killed_takes_nothing_with_it(jobs: Any) -> None:
    def slowly(n: int) -> list[int]:
        import time

        if n % 12 == 0:
            time.sleep(0.002)
        return [n]

    graph = jobs.graph([numbers(0, 2 * N), numbers(2 * N, 4 * N)], slowly)
    slots = jobs.slots(graph, batch_rows=256)
    for slot, least in ((1, 500), (0, 4_000)):
        slots.until(lambda least=least: len(jobs.written()) > least)
        slots.replace(slot)
    slots.drain()
    written = Counter(jobs.written())
    assert set(written) == set(range(4 * N)), "each at least once"
    # Sources that can be read again persist nothing twice.
    assert slots.total("persisted") < 4 * N


def test_a_vertex_that_is_killed_takes_nothing_with_it(jobs: Any) -> None:
    def slowly(n: int) -> list[int]:
        import time

        if n % 12 == 0:
            time.sleep(0.002)
        return [n]

    graph = jobs.graph([numbers(0, N), numbers(N, 2 * N)], slowly, retry=StreamOptions(timeout_ms=5_000))
    slots = jobs.slots(graph, batch_rows=256)
    for least in (250, 4_000):
        slots.until(lambda least=least: len(jobs.written()) > least)
        jobs.vertex.kill()
    slots.drain()
    assert set(jobs.written()) == set(range(2 * N))
    assert slots.total("persisted") == 2 * N
    assert not slots.lost[:-2], "no slot was lost with it"


def test_a_second_run_takes_the_job_over_and_the_slots_of_the_first_one_end(jobs: Any) -> None:
    def slowly(n: int) -> list[int]:
        import time

        if n % 12 == 0:
            time.sleep(0.002)
        return [n]

    graph = jobs.graph([numbers(0, N), numbers(N, 2 * N)], slowly)
    first = jobs.slots(graph, batch_rows=64)
    first.until(lambda: len(jobs.written()) > 500)
    second = jobs.slots(graph, batch_rows=64, run="job-2")
    # The other slot may say before that it has lost this one.
    while not (refused := [each for each in first.failures if each.code == StaleOwnerError.code]):
        first.listen()
    assert "'job' was started again by another driver, as run job-2" in refused[0].reason

    second.drain()
    assert set(jobs.written()) == set(range(2 * N))
    with jobs.vertex.client() as client:
        counters = client.call(Stats()).values
    # Each record once, and behind the one before it, whichever run's source had read it.
    assert counters["persisted"] == 2 * N
    assert counters["dead_letters"] == counters["pending"] == 0


def test_cancel_ends_a_slot_at_once_and_leaves_what_is_pending(jobs: Any) -> None:
    def slowly(n: int) -> list[int]:
        import os
        import time

        if not os.path.exists(flag):
            time.sleep(0.001)
        return [n]

    flag = str(jobs.path / "cancelled")
    graph = jobs.graph([numbers(0, N), numbers(N, 2 * N)], slowly)
    slots = jobs.slots(graph, batch_rows=64)
    slots.until(lambda: len(jobs.written()) > 500)
    slots.send_all(jobs.cancel("that is enough"))
    slots.until(lambda: len(slots.ended) == 2)
    for process in slots.processes.values():
        assert process.wait(600) == 0
    assert len(set(jobs.written())) < 2 * N

    Path(flag).touch()
    again = jobs.slots(graph)
    again.drain()
    assert set(jobs.written()) == set(range(2 * N))
    assert again.total("persisted") + slots.total("persisted") <= 2 * N


def test_stopped_sources_end_the_job_with_what_was_accepted(jobs: Any) -> None:
    def endless() -> Any:
        import itertools

        return itertools.count()

    graph = jobs.graph([endless, numbers(-10, 0)], lambda n: [n])
    slots = jobs.slots(graph)
    slots.until(lambda: slots.counted("persisted") > 1_000)
    slots.send_all(jobs.stop_sources())
    slots.drain()
    written = sorted(jobs.written())
    assert len(written) == slots.total("persisted")
    assert written == list(range(-10, len(written) - 10))


def test_a_record_that_no_restart_mends_names_its_operator(jobs: Any) -> None:
    def hopeless(n: int) -> list[int]:
        from ftlayer import PermanentFailure

        raise PermanentFailure("no such host")

    slots = jobs.slots(jobs.graph([numbers(0, 10)], hopeless, tracked=False))
    with pytest.raises(AssertionError):
        slots.until(lambda: False)
    failed = slots.failures[0]
    assert failed.reason == "'work' (flat_map(hopeless)): no such host"
    assert (failed.operator, failed.code) == ("work", PermanentFailure.code)
    # The job's totals have what was read since the last heartbeat.
    assert failed.counters["records_in/work"] > 0


def test_a_source_that_cannot_be_read_on_fails_the_slot(jobs: Any) -> None:
    def breaks() -> Any:
        yield from range(10)
        raise OSError("unplugged")

    graph = jobs.graph([breaks, numbers(0, 10)], lambda n: [n], restart=FixedDelay(attempts=2, delay="10ms"))
    slots = jobs.slots(graph)
    with pytest.raises(AssertionError):
        slots.until(lambda: False)
    failed = slots.failures[0]
    assert failed.operator == "source"
    assert "unplugged" in failed.reason
    assert len([message for _, message in slots.said if isinstance(message, SourceFailed)]) == 2


def test_a_slot_whose_function_hangs_says_where(jobs: Any) -> None:
    def hangs(n: int) -> list[int]:
        import time

        time.sleep(1_000)
        return [n]

    slots = jobs.slots(jobs.graph([numbers(0, 10), numbers(10, 20)], hangs))
    slots.until(lambda: any(beat.busy == "work" for beat in slots.beats.values()))
    slot = next(slot for slot, beat in slots.beats.items() if beat.busy == "work")
    slots.send(slot, AskStack(7))

    def told() -> list[StackTaken]:
        return [message for _, message in slots.said if isinstance(message, StackTaken)]

    slots.until(told)
    (taken,) = told()
    assert taken.number == 7
    loop, *others = taken.text.split("\n\n")
    assert "in hangs" in loop
    assert loop.rstrip().endswith("time.sleep(1_000)")
    assert any("ftlayer-pulse" in other for other in others)


def test_a_slot_ends_when_its_coordinator_is_gone_and_its_function_hangs(jobs: Any) -> None:
    def hangs(n: int) -> list[int]:
        import time

        time.sleep(1_000)
        return [n]

    graph = jobs.graph([numbers(0, 10), numbers(10, 20)], hangs)
    slots = jobs.slots(graph)
    slots.until(lambda: any(beat.busy == "work" for beat in slots.beats.values()))
    slots.lose_coordinator()
    for process in slots.processes.values():
        assert process.wait(600) == 75


def test_a_source_that_fails_goes_on_in_its_slot_where_it_was(jobs: Any) -> None:
    """Each of two partitions breaks twice; the restart strategy is the default one."""

    def breaking(part: int) -> Any:
        def read() -> Any:
            import os

            for n in range(part * N, (part + 1) * N):
                marker = f"{flags}/{n}"
                if n % (N // 2) == N // 3 and not os.path.exists(marker):
                    open(marker, "w").close()
                    raise OSError("connection lost")
                yield n

        return read

    flags = str(jobs.path)
    graph = jobs.graph([breaking(0), breaking(1)], lambda n: [n])
    slots = jobs.slots(graph, batch_rows=256)
    slots.drain()
    assert sorted(jobs.written()) == list(range(2 * N))
    assert slots.total("persisted") == 2 * N
    said = [message for _, message in slots.said if isinstance(message, SourceFailed)]
    assert len(said) == 4
    assert said[0].reason == "source 'source' cannot be read on: OSError: connection lost"
