"""The console in a real browser over the demo: what is clicked is what the demo's own ledger has at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from ftlayer.cli.demo.driver import RunDirectory
from ftlayer.cli.demo.ledger import recount
from ftlayer.cli.demo.programs import prepared_files
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.vertex.service.directory import FOUND_ACCESS_FILE, AccessFile, write_access

pytestmark = [pytest.mark.spark, pytest.mark.browser]

PATIENCE_S = 300.0
LINES = 3_000
BACK = "the next output was committed"


@pytest.fixture(scope="module")
def browsers(load_module: Any) -> Any:
    """What tests in a browser share."""
    return load_module(Path(__file__).parents[1] / "console" / "browsers.py")


@pytest.fixture(scope="module")
def browser(browsers: Any) -> Iterator[Browser]:
    with browsers.started() as started:
        yield started


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """What another program of this user serves: it is none of the demo's."""
    directory = SocketDirectory.make()
    assert directory is not None
    access = AccessFile("grpc://127.0.0.1:9", "its-token", None, None, os.getpid())
    write_access(Path(directory.path) / FOUND_ACCESS_FILE, access)
    yield
    directory.remove()


class Demo:
    """A demo whose processes are killed as usual, and whose last file of input comes when `end` is called.

    Until then that file is a pipe, and its reader waits: the job runs, with all that came before in it.
    """

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        assert process.stdout is not None
        self.run = RunDirectory(directory / "run")
        self._ledger = directory / "ledger.json"
        self._process = process
        self._said: list[str] = []
        self._reader = threading.Thread(target=lambda: self._said.extend(iter(process.stdout.readline, "")))
        self._reader.start()
        self.link = self.said(r"Open the console: (\S+)", 1)[0]
        self.all_bad_lines = self._bad_lines()
        self._held = max(self.run.input.glob("part-*.txt"))
        self._kept = self._held.rename(self._held.with_suffix(".kept"))
        self.bad_lines = self._bad_lines()
        os.mkfifo(self._held)
        self._pipe = os.open(self._held, os.O_RDWR)

    def _bad_lines(self) -> int:
        return len(recount(prepared_files(self.run.input)).reasons)

    def said(self, pattern: str, times: int) -> list[str]:
        """Wait until the demo has said something so often."""
        deadline = time.monotonic() + PATIENCE_S
        while len(found := re.findall(pattern, "".join(self._said))) < times:
            assert time.monotonic() < deadline, "".join(self._said)
            assert self._reader.is_alive(), "".join(self._said)
            time.sleep(0.05)
        return found

    def end(self) -> dict[str, Any]:
        """Let the input end, and return the ledger."""
        text = self._kept.read_bytes()
        self._kept.rename(self._held)
        os.write(self._pipe, text)  # to the one who waits; anyone else reads the file
        os.close(self._pipe)
        self._reader.join(PATIENCE_S)
        assert self._process.wait() == 0, "".join(self._said)
        assert "The ledger balances" in "".join(self._said)
        values: dict[str, Any] = json.loads(self._ledger.read_text())
        assert values["balanced"]
        return values


@contextmanager
def demo(directory: Path, *arguments: str) -> Iterator[Demo]:
    (directory / "text").write_text("".join(f"{text(number)}\n" for number in range(LINES)))
    command = [sys.executable, "-m", "ftlayer.cli.main", "demo", "--console", *arguments]
    command += ["--input", str(directory / "text"), "--batches", "6"]
    command += ["--dir", str(directory / "run"), "--json", str(directory / "ledger.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Demo(process, directory)
        finally:
            process.terminate()


def text(number: int) -> str:
    """Lines of three words; of a hundred one is not ASCII, and of five hundred one has an odd number."""
    if number % 500 == 250:
        return f"an {number}bit line"
    return f"naïve line {number}" if number % 100 == 50 else f"words of line_{number}"


@pytest.fixture
def opened(browsers: Any, browser: Browser) -> Iterator[Callable[[str], Page]]:
    """Log in by a link; no page has complained of anything at the end."""
    complaints: list[str] = []

    def open_page(link: str) -> Page:
        url, _, token = link.partition("/login?token=")
        page: Page = browsers.logged_in(browser, url, token)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        return page

    yield open_page
    assert not complaints


def there_are(page: Page, letters: int) -> None:
    """Wait until there are so many dead letters; the page keeps itself current."""
    page.goto("/dead")
    expect(page.get_by_role("heading", name=f"{letters} dead letters in")).to_be_visible()


def edit(page: Page) -> None:
    """Mend the payload of the first letter that is found, and requeue it."""
    page.locator("tbody th a").first.click()
    page.get_by_role("link", name="Edit and requeue").click()
    payload = json.loads(page.get_by_role("textbox").input_value())
    page.get_by_role("textbox").fill(json.dumps({"value": payload["value"].replace("bit", "")}))
    page.get_by_role("button", name="Check").click()
    page.get_by_role("button", name="Requeue 1 letter with this payload").click()
    expect(page.get_by_role("status").filter(has_text="requeued with its new payload")).to_be_visible()


def requeue(page: Page) -> None:
    """Requeue the first letter that is found as it is."""
    page.locator("tbody th a").first.click()
    page.get_by_role("button", name="Requeue", exact=True).click()
    page.get_by_role("button", name="Requeue 1 letter").click()
    expect(page.get_by_role("status").filter(has_text="1 of 1 letter requeued")).to_be_visible()


def purge_by_keys(page: Page, browsers: Any, group: str, letters: int) -> None:
    """Purge a group without a mouse: Tab, Space and Enter alone."""
    page.goto("/")
    browsers.tab_to(page, "a", "Dead letters")
    page.keyboard.press("Enter")
    page.wait_for_url("**/dead")
    browsers.tab_to(page, "input", group)
    page.keyboard.press("Space")
    browsers.tab_to(page, "button", "Purge selected", back=True)
    page.keyboard.press("Enter")
    page.wait_for_url("**/dead/plans/*")
    browsers.tab_to(page, "button", f"Purge {letters} letters for good")
    page.keyboard.press("Enter")
    expect(
        page.get_by_role("status").filter(has_text=f"{letters} of {letters} letters purged")
    ).to_be_visible()


@pytest.mark.campaign
def test_letters_of_a_tracked_topology_are_mended(opened: Any, browsers: Any, tmp_path: Path) -> None:
    """Slot, vertex and driver are killed; one letter is edited, one requeued, the others of its group are purged."""
    with demo(tmp_path, "--engine", "continuous") as running:
        running.said(BACK, 3)
        page = opened(running.link)
        odd, letters = 5, running.bad_lines
        there_are(page, letters)
        page.goto("/")
        expect(page.get_by_role("region", name="Vertices").locator("tbody tr")).to_have_count(1)
        expect(page.get_by_role("region", name="Health")).to_contain_text("dead letters")
        page.get_by_role("link", name="demo", exact=True).click()
        expect(page.get_by_role("heading", name="demo", exact=True)).to_be_visible()
        expect(page.get_by_role("img", name="The graph of demo")).to_be_visible()
        expect(page.get_by_role("region", name="Slots")).to_contain_text("running")
        expect(page.get_by_role("region", name="What happened")).to_contain_text("running")
        page.goto("/records?state=pending")
        expect(page.get_by_role("heading", name="Pending")).to_be_visible()
        page.goto("/records?state=dead&q=LineError")
        expect(page.locator("tbody tr")).to_have_count(odd)
        edit(page)
        there_are(page, letters - 1)
        page.goto("/records?state=dead&q=LineError")
        requeue(page)
        there_are(page, letters - 1)  # it cannot be parsed this time either
        purge_by_keys(page, browsers, "LineError", odd - 1)
        there_are(page, letters - odd)
        page.goto("/audit")
        changes = page.get_by_role("row").filter(has_text="operator@console").all_inner_texts()
        assert [line.split("\t")[2] for line in changes] == ["purge", "requeue", "edit"]
        values = running.end()
    assert (values["mended"], values["purged"]) == (1, odd - 1)
    dead = sum(values["dead_letters"].values())
    assert dead == running.all_bad_lines - odd
    done = sum(values[f"done_{how}"] for how in ("first_try", "after_replay", "repeated"))
    assert done + odd + dead == LINES
    assert [recovery["victim"] for recovery in values["recoveries"]] == ["slot", "vertex", "driver"]


@pytest.mark.campaign
def test_a_savepoint_of_a_topology_with_checkpoints(opened: Any, tmp_path: Path) -> None:
    """Two slots and the driver are killed; the savepoint that is clicked is in the last driver's list."""
    with demo(tmp_path, "--mode", "barrier") as running:
        running.said(BACK, 3)
        page = opened(running.link)
        # The board of the driver that was killed gives no answer any more.
        up = (
            page.get_by_role("region", name="Vertices")
            .get_by_role("row")
            .filter(has_text=re.compile(r"\bup\b"))
        )
        board = up.get_by_role("rowheader").inner_text().split()[0]
        page.goto(f"/jobs/{board}:demo")
        page.get_by_role("link", name="Checkpoints").last.click()
        expect(page.get_by_role("region", name="History")).to_contain_text("completed")
        page.get_by_role("link", name="Savepoint", exact=True).click()
        page.get_by_role("button", name="Savepoint", exact=True).click()
        orders = page.get_by_role("region", name="Asked of it")
        expect(orders.get_by_role("row").filter(has_text="savepoint")).to_contain_text("done")
        page.goto("/audit")
        asked = page.get_by_role("row").filter(has_text="savepoint").filter(has_text="operator@console")
        expect(asked.filter(has_text="done")).to_have_count(1)
        values = running.end()
    assert [kept["outcome"] for kept in values["last_checkpoints"] if kept["kind"] == "savepoint"] == [
        "completed"
    ]
    assert values["lost"] == values["duplicated"] == values["miscounted"] == 0
    done = values["done_first_try"] + values["done_after_replay"]
    assert done + sum(values["dead_letters"].values()) == LINES
    assert [recovery["victim"] for recovery in values["recoveries"]] == ["slot", "slot", "driver"]
    assert values["restores"] >= 3
    assert values["last_checkpoints"][-1]["kind"] == "final checkpoint"
    assert {kept["outcome"] for kept in values["last_checkpoints"]} == {"completed"}
