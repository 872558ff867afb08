"""What a console tells Prometheus: of itself, and of jobs whose driver has no vertex."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from ftlayer.errors import UnsupportedError
from ftlayer.monitor.console.options import ConsoleOptions
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.serve import create_app
from ftlayer.monitor.gather import Gatherer
from ftlayer.monitor.sources import VertexSource
from ftlayer.vertex.calls import Call, ListStreams, Reply, Stats

HELPERS = Path(__file__).parents[1] / "vertex" / "metrics" / "conftest.py"


class Board:
    """What a driver without a vertex serves: jobs, and no records."""

    def __init__(self, vertex: Any) -> None:
        self.vertex = vertex

    def call(self, call: Call, *, deadline_ms: int | None = None) -> Reply:
        """Make one call and return its reply."""
        if isinstance(call, Stats | ListStreams):
            raise UnsupportedError("a driver's own board keeps no records")
        reply: Reply = self.vertex.call(call)
        return reply

    def close(self) -> None:
        """Stay open."""


@pytest.fixture
def both(login_file: Path, vertex: Any, clock: Any, kit: Any, tmp_path: Path) -> Iterator[Console]:
    """A console over a vertex with a query, and over a driver's board with a topology."""
    path = tmp_path / "board"
    path.mkdir()
    board = kit.LiveVertex(path, clock)
    vertex.announce(kit.query(clock))
    board.announce(kit.topology(clock, "alone"))
    sources = {
        "shop": VertexSource("shop", "grpc://127.0.0.1:7077", "token", path="/var/lib/shop"),
        "driver-7": VertexSource("driver-7", "grpc://127.0.0.1:7078", "token"),
    }
    clients = {"shop": vertex, "driver-7": Board(board)}
    gatherer = Gatherer(
        lambda: list(sources.values()), clock=clock, connect=lambda source, label: clients[source.name]
    )
    console = Console.of(ConsoleOptions(login_file=login_file), gatherer, clock)
    console.watch.refresh()
    yield console
    console.watch.close()
    board.vertex.close()


@pytest.fixture
def scrape(both: Console, kit: Any) -> Iterator[Callable[..., Any]]:
    """Scrape it with a token, "" for none."""
    with TestClient(create_app(both), "http://localhost", follow_redirects=False) as client:

        def ask(path: str = "/metrics", *, role: str = "reader", **headers: str) -> Any:
            given = {"authorization": f"Bearer {kit.tokens[role]}"} if role else {}
            return client.get(path, headers=given | headers)

        yield ask


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_token_is_needed(scrape: Any) -> None:
    """It names jobs and operators: a scraper brings a user's token, and is not sent to a form."""
    answer = scrape(role="")
    assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Bearer")
    assert scrape().status_code == 200


def test_requests_are_counted_by_kind_and_code(scrape: Any, both: Console) -> None:
    """Each once, when its answer has ended; sessions and ages are of now."""
    scrape("/")
    scrape("/")
    scrape("/api/v1/jobs/nowhere:x")
    scrape("/static/console.css")
    scrape("/api/v1/overview", role="")
    both.sessions.start(both.users.first)
    found = samples(scrape().text)
    counted = {labels: value for (name, labels), value in found.items() if name.endswith("requests_total")}
    assert counted == {
        (("code", "200"), ("kind", "page")): 2,
        (("code", "400"), ("kind", "api")): 1,
        (("code", "401"), ("kind", "api")): 1,
        (("code", "200"), ("kind", "static")): 1,
    }
    assert found["ftlayer_console_request_seconds_count", (("kind", "page"),)] == 2
    assert found["ftlayer_console_sessions", ()] == 1
    assert found["ftlayer_console_open_pages", ()] == 0


def test_how_old_what_is_shown_is(scrape: Any, both: Console, clock: Any, vertex: Any) -> None:
    """It grows while a vertex gives no answer, and a scraper is nobody who looks."""
    clock.move(7_000)
    vertex.is_gone = True
    both.watch.refresh()
    found = samples(scrape().text)
    assert found["ftlayer_console_shown_age_seconds", (("vertex", "shop"),)] == 7
    assert found["ftlayer_console_shown_age_seconds", (("vertex", "driver-7"),)] == 0
    assert found["ftlayer_console_vertex_up", (("vertex", "shop"),)] == 0
    assert found["ftlayer_console_vertex_up", (("vertex", "driver-7"),)] == 1


def test_jobs_without_a_vertex_are_told_of(scrape: Any) -> None:
    """With all that their driver announces; those of a vertex it tells of itself."""
    found = samples(scrape().text)
    labels = (("operator", "parse"), ("slot", "0"), ("topology", "alone"))
    assert found["ftlayer_operator_records_in_total", labels] == 400
    assert not [name for name, labels in found if ("query", "clean-orders") in labels]


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_both_formats(scrape: Any, accept: str) -> None:
    """As it is asked for."""
    answer = scrape(accept=accept)
    assert answer.headers["content-type"].startswith(accept.partition(";")[0] or "text/plain")
    assert answer.text.endswith("# EOF\n") == bool(accept)


def test_names_and_texts_are_as_prometheus_wants_them(scrape: Any, load_module: Any) -> None:
    scrape("/")
    promtool = load_module(HELPERS).promtool
    assert promtool("check", "metrics", stdin=scrape().text) == (0, "")


def test_scrapes_from_many_threads(scrape: Any) -> None:
    """None is lost."""
    threads = [threading.Thread(target=scrape, args=("/",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = samples(scrape().text)
    assert found["ftlayer_console_requests_total", (("code", "200"), ("kind", "page"))] == 8
