"""A console's probes: asked by no one in particular, by any name."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import pytest

from ftlayer.common.clock import Now
from ftlayer.monitor.console.options import ConsoleOptions
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.serve import create_app, liveness
from ftlayer.monitor.gather import Gatherer
from ftlayer.vertex.rules.operating import STUCK_AFTER_MS


@dataclasses.dataclass
class Clock:
    """A clock that the test moves."""

    ms: int = 1_000_000

    def __call__(self) -> Now:
        return Now(self.ms, self.ms)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def console(clock: Clock) -> Console:
    options = ConsoleOptions(listen="127.0.0.1:7080")
    return Console.of(options, Gatherer(lambda: (), clock=clock), clock)


async def ask(console: Console, path: str, method: str = "GET") -> httpx.Response:
    # As a kubelet does: by the pod's address, which the console is not called.
    transport = httpx.ASGITransport(create_app(console))
    async with httpx.AsyncClient(transport=transport, base_url="http://10.1.2.3:7080") as client:
        return await client.request(method, path)


def run(awaitable: Any) -> Any:
    import asyncio

    return asyncio.run(awaitable)


def test_no_token_and_no_name_is_asked_for(console: Console) -> None:
    for path in ("/livez", "/readyz"):
        answer = run(ask(console, path))
        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "phase": "serving", "reasons": [], "notes": []}
    assert run(ask(console, "/")).status_code == 421
    assert run(ask(console, "/livez", "POST")).status_code == 421


def test_a_thread_that_asks_no_more_is_a_fault(console: Console, clock: Clock) -> None:
    clock.ms += STUCK_AFTER_MS + 1
    for path in ("/livez", "/readyz"):
        answer = run(ask(console, path))
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["the thread that asks the vertices has not come round for 30 s"]


def test_one_that_closes_is_live_and_not_ready(console: Console) -> None:
    console.closing.set()
    assert run(ask(console, "/livez")).status_code == 200
    answer = run(ask(console, "/readyz"))
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["the console is stopping"]


def test_a_vertex_that_is_away_is_a_note(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    @dataclasses.dataclass
    class View:
        is_up: bool
        is_gone: bool = False

    views = [View(is_up=True), View(is_up=False), View(is_up=False, is_gone=True)]
    monkeypatch.setattr(console.watch, "known", lambda: views)
    result = liveness(console)
    assert result.passes
    assert result.notes == ("1 of 2 vertices give no answer",)
