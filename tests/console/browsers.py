"""A real browser for tests: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright
from programs import find_program

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)

WIDE = {"width": 1280, "height": 800}


def chromium() -> str:
    """Return where Chromium is; ``FTLAYER_CHROMIUM`` names another one."""
    return os.environ.get("FTLAYER_CHROMIUM") or find_program("chromium", "chromium-browser", "google-chrome")


@contextmanager
def started() -> Iterator[Browser]:
    """Run a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def logged_in(browser: Browser, url: str, token: str, **options: Any) -> Page:
    """Return a page of a browser in which somebody has logged in."""
    context = browser.new_context(**{"viewport": WIDE, "base_url": url} | options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto("/login")
    page.get_by_label("Your token").fill(token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/")
    return page


def tab_to(page: Page, tag: str, name: str, *, back: bool = False) -> None:
    """Press Tab until something of this name has the focus."""
    for _ in range(100):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        found = page.evaluate(
            "() => { const e = document.activeElement;"
            " return [e.tagName.toLowerCase(), e.getAttribute('aria-label') || e.textContent]; }"
        )
        if found[0] == tag and name in found[1]:
            return
    raise AssertionError(f"no {tag} {name} can be reached")
