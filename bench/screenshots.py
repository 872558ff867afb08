"""Writes the docs' pictures, ``docs/images/console-*.png``, from runs of the demo: ``python -m bench.screenshots``.

The demo runs three times, as a topology in either mode and as a wrapped query, with its console; each page is looked at
in Chromium at 1280x800 when it has something to show. It takes some minutes and needs Java, Chromium and Playwright.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.checkout import installed_package

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDE, PHONE = (1_280, 800), (360, 740)
MOST_BYTES = 150_000
WAIT_S = 300.0
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEPT_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IEND")


def main() -> None:
    """Make all pictures, or those of the runs that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.screenshots", description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="*", choices=[[], *RUNS], metavar="RUN", help=f"{', '.join(RUNS)}; default: all"
    )
    parser.add_argument("--to", type=Path, default=IMAGES, metavar="DIRECTORY")
    options = parser.parse_args()
    with installed_package():
        _make(options.runs or list(RUNS), options.to)


def _make(runs: list[str], to: Path) -> None:
    from playwright.sync_api import sync_playwright

    # Late: which ftlayer it is has been settled now.
    from bench.console import BROWSER_FLAGS, chromium

    to.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(BROWSER_FLAGS))
        for name in runs:
            arguments, take = RUNS[name]
            with _demo(*arguments) as link:
                take(Camera(browser, link, to))
        browser.close()


class Camera:
    """A browser at a console, logged in, which writes what it sees."""

    def __init__(self, browser: Any, link: str, directory: Path) -> None:
        self._browser = browser
        self._link = link
        self._directory = directory
        self.page = self._logged_in("light")

    def take(self, name: str, scheme: str = "light", size: tuple[int, int] = WIDE) -> None:
        """Write ``console-<name>.png``: the page that is open, or the same one in the dark or on a phone."""
        page = self.page
        if (scheme, size) != ("light", WIDE):
            page = self._logged_in(scheme, size)
            page.goto(self.page.url)
            page.locator("#live.on").wait_for()
        page.mouse.move(0, 0)
        picture = smaller(page.screenshot())
        if len(picture) > MOST_BYTES:
            raise RuntimeError(f"console-{name}.png has {len(picture):,} bytes; {MOST_BYTES:,} are the most")
        (self._directory / f"console-{name}.png").write_bytes(picture)
        print(f"console-{name}.png: {len(picture):,} bytes", flush=True)

    def until(self, text: str | re.Pattern[str]) -> None:
        """Wait until the page shows a text; it keeps itself current."""
        self.page.get_by_text(text).first.wait_for()

    def _logged_in(self, scheme: str, size: tuple[int, int] = WIDE) -> Any:
        where = self._link.partition("/login")[0]
        viewport = {"width": size[0], "height": size[1]}
        context = self._browser.new_context(viewport=viewport, base_url=where, color_scheme=scheme)
        context.set_default_timeout(WAIT_S * 1_000)
        page = context.new_page()
        page.goto(self._link)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/")
        return page


def smaller(png: bytes) -> bytes:
    """Return the same picture in as few bytes as zlib can; what a viewer does not need is left out."""
    chunks: list[tuple[bytes, bytes]] = []
    pixels = b""
    place = len(_SIGNATURE)
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        kind, data = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += length + 12
        if kind == b"IDAT":
            pixels += data
        elif kind in _KEPT_CHUNKS:
            chunks.append((kind, data))
    chunks.insert(-1, (b"IDAT", zlib.compress(zlib.decompress(pixels), 9)))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@contextmanager
def _demo(*arguments: str) -> Iterator[str]:
    """Run the demo; gives the link to its console.

    ftlayer is imported by a path of the run's directory, since tracebacks show it.
    """
    import ftlayer

    with tempfile.TemporaryDirectory(prefix="ftlayer-bench-") as directory:
        library = Path(directory, "lib")
        library.mkdir()
        (library / "ftlayer").symlink_to(Path(ftlayer.__file__).parent)
        environment = os.environ | {"PYTHONPATH": str(library)}
        command = [sys.executable, "-m", "ftlayer.cli.main", "demo", "--console", "--dir", f"{directory}/run"]
        with subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        ) as demo:
            assert demo.stdout is not None
            try:
                yield next(line.split()[-1] for line in demo.stdout if line.startswith("Open the console: "))
            finally:
                demo.terminate()


# ---------------------------------------------------------------- what is looked at


def _topology(camera: Camera) -> None:
    page = camera.page
    camera.until(re.compile(r"dead letters? .*in the last"))
    time.sleep(CHARTS_S)
    camera.take("overview")
    camera.take("overview-dark", "dark")
    page.get_by_role("link", name="demo", exact=True).click()
    page.locator("svg.graph").wait_for()
    camera.take("topology")
    page.goto("/dead")
    camera.until("in 2 groups")
    camera.take("dead-letters")
    camera.take("phone", size=PHONE)
    page.locator("tbody th a").first.click()
    page.locator("tbody th a").first.click()
    camera.take("record")
    page.get_by_role("link", name="Edit and requeue").click()
    text = page.get_by_role("textbox")
    text.fill(re.sub(r"\d[A-Za-z]\w*", "1", text.input_value()))
    page.get_by_role("button", name="Check").click()
    camera.take("edit")


def _checkpoints(camera: Camera) -> None:
    page = camera.page
    page.get_by_role("region", name="Jobs").locator("tbody th a").first.wait_for()
    time.sleep(CHARTS_S)
    page.get_by_role("link", name="demo", exact=True).first.click()
    page.get_by_role("link", name="Checkpoints").last.click()
    page.locator("details.fold").nth(1).click()
    camera.take("checkpoints")


def _query(camera: Camera) -> None:
    page = camera.page
    page.get_by_role("region", name="Jobs").locator("tbody th a").first.click()
    page.get_by_role("rowheader", name=str(BATCHES), exact=True).wait_for()
    camera.take("query")


BATCHES = 24
CHARTS_S = 40.0
"""So long a run goes on before it is looked at, that its charts have something to show."""

RUNS: dict[str, tuple[tuple[str, ...], Callable[[Camera], None]]] = {
    "topology": (
        ("--engine", "continuous", "--kill", "slot", "--lines", "100000", "--batches", "150"),
        _topology,
    ),
    "checkpoints": (
        ("--mode", "barrier", "--kill", "slot", "--lines", "100000", "--batches", "150"),
        _checkpoints,
    ),
    "query": (("--kill", "none", "--lines", "100000", "--batches", "150"), _query),
}
"""By name: what the demo is told, and what is looked at."""

if __name__ == "__main__":
    main()
