"""A console without a server: requests go to its application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from ftlayer.clock import Now
from ftlayer.console.app import create_app
from ftlayer.console.options import ConsoleOptions
from ftlayer.console.state import Console

ORIGIN = "http://localhost"
TOKENS = {"operator": "operator-token-of-this-test", "reader": "reader-token-of-this-test"}


@dataclass
class ManualClock:
    """A clock that a test moves."""

    now: Now = field(default_factory=lambda: Now(1_000_000, 1_790_000_000_000))

    def __call__(self) -> Now:
        return self.now

    def move(self, ms: int) -> None:
        """Let time pass."""
        self.now = Now(self.now.mono_ms + ms, self.now.wall_ms + ms)


class Visitor:
    """A browser at the console; it follows no redirect."""

    tokens = TOKENS
    origin = ORIGIN

    def __init__(self, client: TestClient) -> None:
        self.client = client

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Open a page."""
        return self.client.get(path, **options)

    def log_in(self, role: str) -> Visitor:
        """Log in as the form does, as the user of this role."""
        answer = self.client.post("/login", data={"token": TOKENS[role]}, headers={"origin": ORIGIN})
        assert answer.status_code == 303, answer.text
        return self

    @property
    def csrf(self) -> str:
        """The token that is in this session's forms."""
        return self.get("/nothing-here").text.split('name="csrf" value="', 1)[1].split('"', 1)[0]

    def post(self, path: str, fields: dict[str, Any] | None = None, **options: Any) -> httpx.Response:
        """Send a form as one of the console's pages does."""
        return self.client.post(
            path, data={"csrf": self.csrf} | (fields or {}), headers={"origin": ORIGIN}, **options
        )

    def api(self, role: str, method: str, path: str, **options: Any) -> httpx.Response:
        """Call the API with the token of this role's user; "" sends none."""
        headers = {"authorization": f"Bearer {TOKENS[role]}"} if role else {}
        return self.client.request(method, f"/api/v1{path}", headers=headers, **options)


@pytest.fixture
def manual_clock() -> Callable[..., ManualClock]:
    """Make clocks."""
    return ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """The console's clock."""
    return ManualClock()


@pytest.fixture
def login_file(tmp_path: Path) -> Path:
    """An operator and a reader."""
    path = tmp_path / "logins"
    path.write_text(f"# who\noperator ada {TOKENS['operator']}\n\nreader bob {TOKENS['reader']}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def console(login_file: Path, clock: ManualClock) -> Console:
    """A console on loopback."""
    return Console.of(ConsoleOptions(login_file=login_file), clock)


@pytest.fixture
def visitor(console: Console) -> Iterator[Visitor]:
    """Somebody who has not logged in."""
    with TestClient(create_app(console), ORIGIN, follow_redirects=False) as client:
        yield Visitor(client)
