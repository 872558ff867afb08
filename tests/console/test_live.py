"""News of pages: parts that have changed, and the end of them with the session."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.datastructures import QueryParams

from ftlayer.monitor.console.guard import Caller
from ftlayer.monitor.console.live import LivePage, Visit, news
from ftlayer.monitor.console.options import Role, User
from ftlayer.monitor.console.pages import jobs, overview

READER = Caller(User("bob", Role.READER, "token"), None)


def gather(page: LivePage, visit: Visit, steps: list[Any]) -> list[tuple[str, dict[str, str]]]:
    """Return the news of a page while ``steps`` happen, one between two rounds."""
    left = list(steps)

    async def pause() -> bool:
        left.pop(0)()
        return True

    async def run() -> list[str]:
        return [event async for event in news(page, visit, lambda: not left, pause)]

    found = []
    for event in asyncio.run(run()):
        kind, data = event.strip().split("\n")
        found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_what_has_changed_is_sent(vertex: Any, console: Any, topology: Any) -> None:
    """First all parts, and then those whose text is another one."""
    visit = Visit(console, READER, {}, QueryParams(""))

    def announce() -> None:
        vertex.announce(topology())
        console.watch.refresh()

    found = gather(overview.LIVE, visit, [lambda: None, announce, lambda: None])
    parts = [data["part"] for kind, data in found if kind == "part"]
    assert parts[:4] == ["part-verdict", "part-jobs", "part-vertices", "part-hours"]
    assert "part-jobs" in parts[4:]
    assert "part-hours" not in parts[4:]
    assert any("orders" in data["html"] for kind, data in found[4:-1])
    assert found[-1] == ("over", {})


def test_a_job_that_is_gone_does_not_end_the_page(console: Any) -> None:
    """It says what is wrong and goes on: the job may come back."""
    visit = Visit(console, READER, {"job": "shop:orders"}, QueryParams(""))
    found = gather(jobs.GRAPH_PAGE, visit, [lambda: None, lambda: None])
    assert [kind for kind, _ in found] == ["trouble", "trouble", "over"]


def test_pages_are_known_by_their_path() -> None:
    """The news that a page asks for are its own."""
    assert overview.LIVE.match("/") == {}
    assert overview.LIVE.match("/jobs/shop:orders") is None
    assert jobs.GRAPH_PAGE.match("/jobs/shop:orders") == {"job": "shop:orders"}
    assert jobs.CHECKPOINT_PAGE.match("/jobs/shop:orders/checkpoints") == {"job": "shop:orders"}


def test_news_are_for_pages_that_have_some(visitor: Any) -> None:
    """Any other path has none."""
    visitor.log_in("reader")
    assert visitor.get("/events?page=/login").status_code == 404
    assert visitor.get("/events").status_code == 404
