"""The console over a vertex with 100,000 dead letters and 1,000,000 pending records, and what an open page costs.

Requests are made to a console in a process of its own, one after the other, each several times; the slowest of the
medians counts. First paint is Chromium's own figure (`first-contentful-paint`), in a new browser context, whose cache
is empty, for each page.

The cost is CPU time, which a loaded machine distorts less than it does rates. Of the vertex above: what it works more
while a page is open. Of a topology at full speed, twice: what the vertex needs to answer the questions of one look, of
which an open page has one a second, as a share of what driver, slots and vertex need in a second; and what driver and
vertex need more for a record while its page and the overview are open than while nobody looks, in turns within one run,
as a share of what all need for it. Slots do the same either way: announcements go out whether someone looks or not.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from bench.harness import Target, note
from bench.jobs import session
from bench.keyed_count import LayerJobs, environment, python_job
from ftlayer.config import VertexOptions
from ftlayer.monitor.gather import Gatherer
from ftlayer.monitor.sources import sources_given
from ftlayer.records.ids import random_root_ids
from ftlayer.vertex.calls import Fail, Failure, OpenStream, Persist, StreamOpened, StreamOptions
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.embedded import EmbeddedVertex

TARGETS = {
    "slowest_request_ms": Target(at_most=300, unit="ms"),
    "slowest_first_paint_ms": Target(at_most=1_000, unit="ms"),
    "open_page_share_of_a_core": Target(at_most=0.01),
    "cost_for_a_topology": Target(at_most=0.01),
}

WARM_S, SETTLE_S = 5.0, 1.5
"""Before a topology is measured at all; before each measurement, after pages were opened or closed."""

LOOKS = 300

DEAD, PENDING = 100_000, 1_000_000
_CALL_ROWS = 5_000
_BULK_ROWS = 16_384
_OPERATORS = ("parse", "price", "enrich", "store")
_REASONS = (
    "ValueError: could not convert string to float: '{}'",
    "KeyError: 'field_{}'",
    "TimeoutError: no answer from host-{}.example within 5 s",
    "ZeroDivisionError: division by zero",
    "UnicodeDecodeError: invalid byte at position {}",
)
_TRACEBACK = 'Traceback (most recent call last):\n  File "job.py", line 12, in parse\n    return float(row)\n'

_API = "/api/v1"
REQUESTS = {
    "overview": f"{_API}/overview",
    "groups": f"{_API}/dead/groups",
    "dead": f"{_API}/records?state=dead",
    "pending": f"{_API}/records?state=pending",
    "waiting": f"{_API}/records?state=waiting",
    "text that many have": f"{_API}/records?state=dead&q=customer-99",
    "text that none has": f"{_API}/records?state=dead&q={quote('no such text')}",
    "pending text that none has": f"{_API}/records?state=pending&q={quote('no such text')}",
    "condition on a field": f"{_API}/records?state=dead&where={quote('record.order = 99999')}",
    "page of the overview": "/",
    "page of groups": "/dead",
    "page of dead letters": "/records?state=dead",
    "page of pending records": "/records?state=pending",
}
PAGES = ("/", "/dead", "/records?state=dead", "/records?state=pending")

BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_PAINT = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0] ?? null"


def run(quick: bool) -> dict[str, float]:
    """Measure; ``quick`` repeats less."""
    repeats, watch_s = (3, 8.0) if quick else (9, 30.0)
    directory = Path(tempfile.mkdtemp(prefix="ftlayer-bench-"))
    try:
        with EmbeddedVertex(VertexOptions(directory / "vertex", max_store_bytes=4 << 30)) as vertex:
            fill(vertex.client(client_id="bench"), DEAD, PENDING)
            with _console(directory) as (url, token):
                requests = {name: _request_ms(url + path, token, repeats) for name, path in REQUESTS.items()}
                paints = _first_paints(url, token, min(repeats, 5))
                cost = _cost_of_an_open_page(vertex, url, token, watch_s)
    finally:
        shutil.rmtree(directory)
    for name, took in sorted(requests.items(), key=lambda item: -item[1])[:5]:
        note(f"{name}: {took:.0f} ms")
    topology = _cost_for_a_topology(*((5, 2.0) if quick else (24, 4.0)))
    metrics = {
        "slowest_request_ms": max(requests.values()),
        "median_request_ms": statistics.median(requests.values()),
        "open_page_share_of_a_core": cost,
        **topology,
    }
    if paints:
        note(f"first paint: {', '.join(f'{page} {paint:.0f} ms' for page, paint in paints.items())}")
        metrics["slowest_first_paint_ms"] = max(paints.values())
    return metrics


# ---------------------------------------------------------------- records


def fill(client: VertexClient, dead: int, pending: int) -> None:
    """Give the vertex dead letters in 20 groups, and pending records of another stream."""
    options = StreamOptions(timeout_ms=36_000_000, max_pending=10_000_000)
    opened = client.call(OpenStream("shop/orders", options))
    assert isinstance(opened, StreamOpened)
    client.call(OpenStream("shop/clicks", options))
    for start in range(0, dead, _CALL_ROWS):
        roots = random_root_ids(min(_CALL_ROWS, dead - start))
        client.call(Persist("shop/orders", _rows(start, len(roots)), roots, roots))
        failures = tuple(_failure(root, start + place) for place, root in enumerate(roots.tolist()))
        client.call(Fail(failures, opened.incarnation))
    for start in range(0, pending, _BULK_ROWS):
        roots = random_root_ids(min(_BULK_ROWS, pending - start))
        client.call(Persist("shop/clicks", _rows(start, len(roots)), roots, roots))


def _failure(root: int, number: int) -> Failure:
    reason = _REASONS[number % len(_REASONS)].format(number % 7)
    operator = _OPERATORS[number // len(_REASONS) % len(_OPERATORS)]
    return Failure(root, reason, operator, _TRACEBACK, fatal=True)


def _rows(start: int, rows: int) -> pa.RecordBatch:
    numbers = np.arange(start, start + rows)
    return pa.record_batch(
        {
            "order": pa.array(numbers),
            "customer": pa.array([f"customer-{number % 997}" for number in numbers.tolist()]),
            "price": pa.array([f"{number % 500},{number % 100:02}" for number in numbers.tolist()]),
            "note": pa.array(["x" * (number % 60) for number in numbers.tolist()]),
        }
    )


# ---------------------------------------------------------------- the console


@contextmanager
def _console(directory: Path, store: str = "vertex") -> Iterator[tuple[str, str]]:
    """Start a console over the vertex whose ``store`` is in ``directory``; yield its URL and an operator's token."""
    token, login, log = secrets.token_urlsafe(), directory / "login", directory / "console.log"
    login.touch(mode=0o600)
    login.write_text(f"operator bench {token}\n")
    command = [sys.executable, "-m", "ftlayer.cli.main", "console", "--listen", "127.0.0.1:0"]
    command += ["--vertex", str(directory / store), "--login-file", str(login)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield _url(process, log), token
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        found = re.search(r"http://\S+?(?=/?\s)", log.read_text())
        if found:
            return found[0]
        time.sleep(0.05)
    raise RuntimeError(f"the console has ended: {log.read_text()}")


def _open(url: str, token: str) -> Any:
    return urllib.request.urlopen(
        urllib.request.Request(url, headers={"authorization": f"Bearer {token}"}), timeout=60
    )


def _request_ms(url: str, token: str, repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        with _open(url, token) as response:
            response.read()
        samples.append((time.perf_counter() - start) * 1_000)
    return statistics.median(samples)


def _cost_of_an_open_page(vertex: EmbeddedVertex, url: str, token: str, watch_s: float) -> float:
    """Return the share of a core by which the vertex works more while a browser has the overview open."""
    idle = _vertex_share(vertex, watch_s)
    over = threading.Event()

    def look() -> None:
        with _open(f"{url}/events?page=/", token) as news:
            while not over.is_set():
                news.readline()

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    time.sleep(1.0)
    watched = _vertex_share(vertex, watch_s)
    over.set()
    return max(watched - idle, 0.0)


def _vertex_share(vertex: EmbeddedVertex, watch_s: float) -> float:
    before = _cpu_s(vertex.pid)
    time.sleep(watch_s)
    return (_cpu_s(vertex.pid) - before) / watch_s


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far (proc(5): fields 14 and 15 of stat, in clock ticks)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- what a topology pays


def _cost_for_a_topology(pairs: int, window_s: float) -> dict[str, float]:
    """Return what open pages cost a topology, by the vertex's answers and by the difference that they make.

    Spark's JVM, which only waits, and the console itself, which may be on another machine, are not counted.
    """
    costs = []
    with session() as (root, spark):
        bench = LayerJobs(root, spark)
        folder = bench.folder()
        with bench.layer(folder, tracked=True) as layer:
            layer.address  # noqa: B018 - starts the vertex
            env = environment(spark, layer, bench.name)
            python_job(env, folder, 1 << 40)
            job = env.execute_async()
            job.wait_until_running()
            time.sleep(WARM_S)
            asked = [os.getpid(), layer.vertex.pid]
            slots = [slot.pid for slot in job.status().slots]
            began, cpu_s = time.monotonic(), sum(map(_cpu_s, asked + slots))
            with _console(folder, "ft") as (url, token):
                for number in range(pairs):
                    found = {}
                    for is_open in (True, False) if number % 2 else (False, True):
                        with _pages_open(url, token, bench.name) if is_open else nullcontext():
                            found[is_open] = _cpu_per_record(job, asked, slots, window_s)
                    costs.append((found[True][0] - found[False][0]) / sum(found[False]))
            used = (sum(map(_cpu_s, asked + slots)) - cpu_s) / (time.monotonic() - began)
            job.cancel()
            look_s = _cpu_of_a_look(layer.vertex, folder / "ft", bench.name)
    error = statistics.stdev(costs) / math.sqrt(pairs)
    note(
        f"the topology used {used:.2f} cores; {pairs} pairs differ by {statistics.mean(costs):+.2%} ± {error:.2%}"
    )
    return {"look_cpu_ms": look_s * 1_000, "cost_for_a_topology": look_s / used}


def _cpu_of_a_look(vertex: EmbeddedVertex, store: Path, job: str) -> float:
    """Return the CPU time that the vertex needs to answer what the overview and a job's page ask each second."""
    gatherer = Gatherer(lambda: sources_given([str(store)], token=str))
    before = _cpu_s(vertex.pid)
    for _ in range(LOOKS):
        (view,) = gatherer.gather()
        gatherer.hour(view.vertex)
        gatherer.job(view.vertex, job)
        gatherer.hour(view.vertex, job)
    used = _cpu_s(vertex.pid) - before
    gatherer.close()
    return used / LOOKS


def _cpu_per_record(job: Any, asked: list[int], slots: list[int], window_s: float) -> tuple[float, float]:
    """Return the seconds that processes which are asked take for a record, and those that slots take."""

    def now() -> tuple[float, float, int]:
        return sum(map(_cpu_s, asked)), sum(map(_cpu_s, slots)), job.status().counters["records_in"]

    time.sleep(SETTLE_S)
    before = now()
    time.sleep(window_s)
    asked_s, slots_s, records = (after - value for after, value in zip(now(), before, strict=True))
    return asked_s / records, slots_s / records


@contextmanager
def _pages_open(url: str, token: str, job: str) -> Iterator[None]:
    """Have a process of its own read the news of the overview and of a job's page."""
    lookers = [
        subprocess.Popen(
            [sys.executable, "-c", _LOOK, f"{url}/events?page={quote(page)}"],
            env=os.environ | {"FTLAYER_BENCH_TOKEN": token},
            stdout=subprocess.DEVNULL,
        )
        for page in ("/", f"/jobs/ft:{job}")
    ]
    try:
        yield
    finally:
        for looker in lookers:
            looker.kill()
            looker.wait()


_LOOK = """
import os, sys, urllib.request
token = os.environ["FTLAYER_BENCH_TOKEN"]
request = urllib.request.Request(sys.argv[1], headers={"authorization": f"Bearer {token}"})
with urllib.request.urlopen(request) as news:
    while news.readline():
        pass
"""


# ---------------------------------------------------------------- a browser


def chromium() -> str | None:
    """Return where Chromium is; None where it is not."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def _first_paints(url: str, token: str, repeats: int) -> dict[str, float]:
    """Return the median of each page; nothing without Chromium and Playwright."""
    path = chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        note("playwright is not installed (pip install '.[test]'): no slowest_first_paint_ms")
        return {}
    if path is None:
        note("there is no chromium: no slowest_first_paint_ms")
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(BROWSER_FLAGS))
        context = browser.new_context()
        login = context.new_page()
        login.goto(f"{url}/login")
        login.fill("input[name=token]", token)
        login.keyboard.press("Enter")
        login.wait_for_url(f"{url}/")
        cookies = context.cookies()
        paints = {
            path: statistics.median(_paint_ms(browser, cookies, url + path) for _ in range(repeats))
            for path in PAGES
        }
        browser.close()
    return paints


def _paint_ms(browser: Any, cookies: Any, url: str) -> float:
    # The console's content security policy lets no one evaluate text in its pages, Playwright included.
    context = browser.new_context(viewport={"width": 1_280, "height": 800}, bypass_csp=True)
    context.add_cookies(cookies)
    page = context.new_page()
    page.goto(url)
    paint: float = page.wait_for_function(_PAINT).json_value()
    context.close()
    return paint
