"""The console in a real browser: every page, light and dark, wide and narrow; by mouse, by keys, without the script."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from draws import every_other
from playwright.sync_api import Browser, Page, expect

from ftlayer.common.clock import system_now
from ftlayer.monitor.console.options import ConsoleOptions
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.serve import create_app
from ftlayer.monitor.gather import Gatherer
from ftlayer.monitor.sources import VertexSource
from ftlayer.vertex.calls import AnnounceJob, OrderAnswer, OrderState, Stats

pytestmark = pytest.mark.browser

STREAM = "orders/lines"
SCRIPT = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
QUERY = "ab" * 16
CUT = """
() => [...document.querySelectorAll("table")].flatMap((table) =>
  [...table.querySelectorAll("tbody th, tbody td")]
    .filter((cell) => cell.getBoundingClientRect().right > innerWidth + 1)
    .map((cell) => cell.innerText))
"""
"""What of tables is outside of the window."""


@pytest.fixture(scope="module")
def browsers(load_module: Any) -> Any:
    """What tests in a browser share."""
    return load_module(Path(__file__).with_name("browsers.py"))


@pytest.fixture(scope="module")
def browser(browsers: Any) -> Iterator[Browser]:
    """One browser for all tests."""
    with browsers.started() as started:
        yield started


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, kit: Any) -> Iterator[SimpleNamespace]:
    """A console that listens, over a vertex in memory with a job of each kind."""
    path = tmp_path_factory.mktemp("site")
    logins = path / "logins"
    logins.write_text("".join(f"{role} {role} {token}\n" for role, token in kit.tokens.items()))
    logins.chmod(0o600)
    vertex = kit.LiveVertex(path, system_now)
    vertex.announce(kit.topology(system_now, line=SCRIPT))
    vertex.announce(kit.query(system_now))
    vertex.open(STREAM)
    gatherer = Gatherer(
        lambda: [VertexSource("shop", "grpc://127.0.0.1:7077", "token", path="/var/lib/shop")],
        connect=lambda source, label: vertex,
    )
    console = Console.of(ConsoleOptions(login_file=logins), gatherer, system_now)
    console.watch.start()
    config = uvicorn.Config(
        create_app(console), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield SimpleNamespace(url=url, vertex=vertex, console=console, tokens=kit.tokens, kit=kit)
    server.should_exit = True
    thread.join()
    console.watch.close()
    vertex.vertex.close()


@pytest.fixture
def letters(site: Any) -> None:
    """Three dead letters more, in a group of their own, with a script wherever a record can say something."""
    rows = [{"id": n, "name": SCRIPT, SCRIPT: n} for n in range(3)]
    site.vertex.kill(STREAM, rows, f"parse{SCRIPT}", f"ValueError: {SCRIPT}")
    site.console.watch.refresh()


@pytest.fixture
def opened(browsers: Any, browser: Browser, site: Any) -> Callable[..., Page]:
    """Open a page of a browser in which somebody has logged in."""

    def open_page(role: str = "operator", **options: Any) -> Page:
        page: Page = browsers.logged_in(browser, site.url, site.tokens[role], **options)
        return page

    return open_page


def dead(site: Any) -> int:
    return int(site.vertex.call(Stats()).values["dead_letters"])


def a_record(page: Page) -> str:
    page.goto("/records?state=dead")
    link = page.locator("tbody th a").first.get_attribute("href")
    assert link is not None
    return link


@pytest.mark.usefixtures("letters")
@every_other("scheme, window", ["light", "dark"], ["wide", "phone"])
def test_every_page_can_be_read(opened: Any, site: Any, scheme: Any, window: str) -> None:
    """axe finds nothing to complain of: contrast, names, landmarks; nothing is wider than the window."""
    width, height = {"wide": (1280, 800), "phone": (360, 740)}[window]
    page = opened(viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True)
    paths = [
        *("/", "/jobs/shop:orders", "/jobs/shop:orders/checkpoints", "/jobs/shop:orders/ask/cancel"),
        *(f"/jobs/shop:{QUERY}", "/dead", "/records?state=dead", a_record(page), "/nothing-here"),
        *(f"{a_record(page)}/edit", "/audit"),
    ]
    for path in paths:
        page.goto(path)
        found = Axe().run(page).response["violations"]
        said = [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]
        assert not said, (path, said)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        if window == "phone":
            assert not page.evaluate(CUT), path
    page.context.clear_cookies()
    page.goto("/login")
    assert not Axe().run(page).response["violations"]
    page.context.close()


@pytest.mark.usefixtures("letters")
def test_what_records_say_does_nothing(opened: Any, site: Any) -> None:
    """No script of theirs runs, and there was none to be blocked."""
    page = opened()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    for path in ("/", "/jobs/shop:orders", "/dead", "/records?state=dead", a_record(page)):
        page.goto(path)
        expect(page.locator("main")).to_contain_text("<script>" if path != "/jobs/shop:orders" else "onerror")
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0
    assert not [text for text in complaints if "Content Security Policy" in text]
    page.context.close()


@pytest.mark.usefixtures("letters")
def test_a_group_is_requeued(opened: Any, site: Any) -> None:
    """Chosen, counted, confirmed: the vertex has them no more."""
    before = dead(site)
    page = opened()
    page.goto("/dead")
    row = page.get_by_role("row").filter(has_text="onerror").first
    row.get_by_role("checkbox").check()
    page.get_by_role("button", name="Requeue selected").click()
    button = page.get_by_role("button", name=re.compile(r"Requeue \d+ letters"))
    text = button.inner_text()
    assert dead(site) == before
    button.click()
    expect(page.get_by_role("status").filter(has_text="requeued")).to_be_visible()
    count = int("".join(filter(str.isdigit, text)))
    assert dead(site) == before - count
    page.context.close()


@pytest.mark.usefixtures("letters")
def test_letters_are_purged_by_keys_alone(opened: Any, browsers: Any, site: Any) -> None:
    """Tab, Space and Enter lead to every button; what has the focus is seen."""
    before = dead(site)
    page = opened()
    browsers.tab_to(page, "a", "Dead letters")
    page.keyboard.press("Enter")
    page.wait_for_url("**/dead")
    browsers.tab_to(page, "input", "Select all groups")
    page.keyboard.press("Space")
    browsers.tab_to(page, "button", "Purge selected", back=True)
    page.keyboard.press("Enter")
    page.wait_for_url("**/dead/plans/*")
    expect(page.get_by_text("There is no way back")).to_be_visible()
    browsers.tab_to(page, "button", "for good")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="purged")).to_be_visible()
    assert before > 0
    assert dead(site) == 0
    page.context.close()


def test_a_page_keeps_itself_current(opened: Any, site: Any) -> None:
    """What happens is seen without a reload; a part that somebody is in waits."""
    page = opened()
    page.goto("/dead")
    expect(page.locator("#live")).to_have_text("live")
    site.vertex.kill(STREAM, [{"id": 1}], "first", "KeyError: a")
    expect(page.get_by_role("cell", name="first", exact=True)).to_be_visible()
    page.get_by_label("Select all groups").focus()
    site.vertex.kill(STREAM, [{"id": 1}], "second", "KeyError: b")
    expect(page.locator("#part-dead_groups")).to_have_class("old")
    expect(page.get_by_role("cell", name="second", exact=True)).to_have_count(0)
    page.get_by_role("link", name="Overview").focus()
    expect(page.get_by_role("cell", name="second", exact=True)).to_be_visible()
    page.context.close()


def test_times_are_the_viewer_s_and_a_range_is_in_the_url(opened: Any, site: Any) -> None:
    page = opened(timezone_id="Europe/Berlin")
    expect(page.locator("#zone")).to_have_text("Times are Europe/Berlin.")
    shown = page.locator("#part-vertices time").first
    expect(shown).to_have_attribute("title", re.compile(r"Europe/Berlin \(.*Z\)$"))
    page.get_by_role("link", name="5 minutes").first.click()
    page.wait_for_url("**/?range=5m")
    expect(page.get_by_role("heading", name="The last 5 minutes").first).to_be_visible()
    assert page.request.get(f"{site.url}/?range=7m").status == 400


def test_a_savepoint_is_asked_for(opened: Any, site: Any) -> None:
    """The driver gets the order, and its answer is seen without a reload."""
    job = site.kit.topology(system_now)
    site.vertex.announce(job)  # nothing is asked of a driver that is silent
    page = opened()
    page.goto("/jobs/shop:orders")
    page.get_by_role("link", name="Savepoint", exact=True).click()
    page.get_by_role("button", name="Savepoint", exact=True).click()
    page.wait_for_url("**/jobs/shop:orders")
    (order,) = site.vertex.call(AnnounceJob(job)).orders
    assert order.by == "operator@console"
    for state, text in ((OrderState.TAKEN, ""), (OrderState.DONE, "/savepoints/sp-7")):
        site.vertex.call(AnnounceJob(job, (OrderAnswer(order.id, state, text, job.at_ms),)))
    expect(page.get_by_text("/savepoints/sp-7")).to_be_visible()
    page.context.close()


def test_a_payload_is_edited(opened: Any, site: Any) -> None:
    """What does not fit is said beside the form; what fits is shown beside what was, and then requeued."""
    site.vertex.kill(STREAM, [{"id": 1, "price": "12,5"}], "price", "ValueError: 12,5")
    site.console.watch.refresh()
    before = dead(site)
    page = opened()
    page.goto("/records?state=dead&operator=price")
    page.locator("tbody th a").first.click()
    page.get_by_role("link", name="Edit and requeue").click()
    page.get_by_role("textbox").fill('{"id": "one", "price": "12.5"}')
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("alert")).to_contain_text("id")
    page.get_by_role("textbox").fill('{"id": 1, "price": "12.5"}')
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("cell", name='"12.5"', exact=True)).to_be_visible()
    page.get_by_role("button", name="Requeue 1 letter").click()
    expect(page.get_by_role("status").filter(has_text="new payload")).to_be_visible()
    assert dead(site) == before - 1
    page.goto("/audit")
    expect(page.get_by_role("cell", name="operator@console").first).to_be_visible()
    page.context.close()


@pytest.mark.usefixtures("letters")
def test_it_works_without_the_script(opened: Any, site: Any) -> None:
    """Forms and links are enough."""
    before = dead(site)
    page = opened(java_script_enabled=False)
    page.goto(a_record(page))
    page.get_by_role("button", name="Purge").click()
    page.get_by_role("button", name="Purge 1 letter for good").click()
    expect(page.get_by_role("status").filter(has_text="1 of 1 letter purged")).to_be_visible()
    assert dead(site) == before - 1
    page.context.close()


@pytest.mark.usefixtures("letters")
def test_a_reader_is_offered_nothing(opened: Any, site: Any) -> None:
    """No buttons but the search and the way out."""
    page = opened(role="reader")
    for path in ("/", "/jobs/shop:orders", "/dead", a_record(page)):
        page.goto(path)
        assert page.get_by_role("button").all_inner_texts() == ["Log out"], path
        assert page.get_by_role("checkbox").count() == 0
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.context.close()
