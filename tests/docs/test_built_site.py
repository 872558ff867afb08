"""The built site: nothing of it is loaded from elsewhere, and its search works from a server and from a disk."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.site

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, strictly: a page without a place, or a link that leads nowhere, fails it."""
    target = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        "docs/site/mkdocs.yml",
        "-d",
        str(target),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return target


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(load_module: Any) -> Iterator[Browser]:
    with load_module(ROOT / "tests" / "console" / "browsers.py").started() as started:
        yield started


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source|embed)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=[\"']?([^\"'\s>]+)", text)
        assert loaded
        assert not [each for each in loaded if re.match(r"(?:\w+:)?//", each)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:\w+:)?//|@import", sheet.read_text("utf-8")), sheet


@pytest.mark.parametrize("way", ["disk", "server"])
def test_the_search_finds_a_word_without_a_network(
    way: str, site: Path, served: str, browser: Browser
) -> None:
    address = (site / "index.html").as_uri() if way == "disk" else served
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.locator("input[name=query]").click()
    page.locator("input[name=query]").press_sequentially("requeue")
    results = page.locator(".md-search-result__item")
    expect(results.first).to_contain_text("requeue", ignore_case=True)
    here = address.removesuffix("index.html")
    assert asked
    assert not [url for url in asked if not url.startswith((here, "data:", "blob:", "about:"))]
    page.close()


def test_docstrings_are_on_their_page(site: Path) -> None:
    text = (site / "reference" / "api" / "layer.html").read_text("utf-8")
    assert 'id="ftlayer.FTLayer.requeue"' in text
