"""Draws the pictures of the docs into ``docs/images``: ``python docs/site/pictures.py``.

They are drawn for both colour schemes: a picture follows that of the page that it is on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"

STYLE = """
    .card { fill: #ffffff; }
    .box { fill: #eef1fb; stroke: #5c6bc0; stroke-width: 1.5; }
    .store { fill: #fff4e0; stroke: #c77700; stroke-width: 1.5; }
    .dead { fill: #fdebec; stroke: #c62828; stroke-width: 1.5; }
    .good { fill: #e8f5e9; stroke: #2e7d32; stroke-width: 1.5; }
    .plain { fill: none; stroke: #9aa0ae; stroke-width: 1; stroke-dasharray: 4 4; }
    .way { fill: none; stroke: #4a5060; stroke-width: 1.6; }
    .tip { fill: #4a5060; }
    .row { fill: #5c6bc0; }
    .late { fill: #b6bdd9; }
    .barrier { fill: #c77700; }
    .crash { stroke: #c62828; stroke-width: 2; stroke-dasharray: 5 4; }
    text { font: 14px -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #20242e; }
    .head { font-weight: 600; }
    .note { font-size: 13px; fill: #4a5060; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #1e222d; }
      .box { fill: #2a3150; stroke: #9fa8da; }
      .store { fill: #40331c; stroke: #ffb74d; }
      .dead { fill: #43252a; stroke: #ef9a9a; }
      .good { fill: #21382a; stroke: #81c784; }
      .plain { stroke: #757c8e; }
      .way { stroke: #c3c8d4; }
      .tip { fill: #c3c8d4; }
      .row { fill: #9fa8da; }
      .late { fill: #59618a; }
      .barrier { fill: #ffb74d; }
      .crash { stroke: #ef9a9a; }
      text { fill: #eceff5; }
      .note { fill: #c3c8d4; }
    }
"""

Point = tuple[float, float]


class Picture:
    """An SVG that is drawn a part at a time; coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
            f' height="{height}" role="img">\n  <title>{escape(title)}</title>\n  <style>{STYLE}  </style>'
        )
        self._parts = [f'<rect class="card" width="{width}" height="{height}" rx="10"/>']

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str], kind: str) -> None:
        """Draw a box with a heading and smaller lines, in its middle."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            self.text((x + width / 2, top + 18 * number), line, "note" if number else "head")

    def text(self, at: Point, words: str, kind: str = "note", anchor: str = "middle") -> None:
        """Write words in one line; the point is their anchor on the base line."""
        x, y = at
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def way(self, *points: Point) -> None:
        """Draw a line through points, with a tip at its end."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="way" points="{way}"/>')
        (before, end) = points[-2:]
        angle = math.atan2(end[1] - before[1], end[0] - before[0])
        corners = [end] + [
            (end[0] - 9 * math.cos(angle + turn), end[1] - 9 * math.sin(angle + turn))
            for turn in (0.45, -0.45)
        ]
        tip = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f'<polygon class="tip" points="{tip}"/>')

    def rows(self, x: float, y: float, marks: str) -> None:
        """Draw records and barriers on a channel: ``o`` before the barrier, ``x`` behind it, ``|`` the barrier."""
        for mark in marks:
            if mark == "|":
                self._parts.append(
                    f'<rect class="barrier" x="{x - 2.5:g}" y="{y - 13:g}" width="5" height="26"/>'
                )
            elif mark != " ":
                kind = "row" if mark == "o" else "late"
                self._parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="5"/>')
            x += 15

    def line(self, kind: str, start: Point, end: Point) -> None:
        """Draw a line without a tip."""
        self._parts.append(
            f'<line class="{kind}" x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}"/>'
        )

    def svg(self) -> str:
        """Return all of it."""
        return "\n  ".join([self._head, *self._parts]) + "\n</svg>\n"


def overview() -> Picture:
    """What happens to a record, at a glance."""
    picture = Picture(860, 330, "A record's way: to the sink, back for another try, or to the dead letters")
    picture.box(20, 40, 150, 90, ["source", "Kafka, files, HTTP,", "a callback …"], "box")
    picture.box(
        270,
        30,
        290,
        110,
        [
            "your functions in Python",
            "a wrapped query, batch after batch,",
            "or a topology, record by record",
        ],
        "box",
    )
    picture.box(670, 40, 170, 90, ["sink", "what passed"], "good")
    picture.box(270, 220, 290, 80, ["vertex", "what needs another try, on disk"], "store")
    picture.box(670, 220, 170, 80, ["dead letters", "record, reason,", "traceback"], "dead")
    picture.way((170, 85), (268, 85))
    picture.text((219, 75), "records")
    picture.way((560, 85), (668, 85))
    picture.text((614, 75), "done")
    picture.way((345, 140), (345, 218))
    picture.text((335, 183), "a record fails", anchor="end")
    picture.way((485, 220), (485, 142))
    picture.text((495, 183), "after a pause: again", anchor="start")
    picture.way((560, 245), (668, 245))
    picture.text((614, 235), "no try left")
    picture.way((670, 280), (562, 280))
    picture.text((614, 298), "requeued")
    return picture


def record_life() -> Picture:
    """The states of a record."""
    picture = Picture(860, 360, "The states of a record, and what leads from one to the next")
    picture.box(20, 50, 110, 60, ["source"], "box")
    picture.box(220, 40, 170, 80, ["runs", "attempt 1, 2, 3, …"], "box")
    picture.box(680, 50, 160, 60, ["done"], "good")
    picture.box(220, 240, 170, 80, ["waits", "stored, for its pause"], "store")
    picture.box(20, 240, 130, 80, ["in delivery", "due"], "store")
    picture.box(500, 240, 150, 80, ["dead letter", "kept, with history"], "dead")
    picture.box(740, 250, 100, 60, ["purged"], "plain")
    picture.way((130, 80), (218, 80))
    picture.way((390, 80), (678, 80))
    picture.text((535, 70), "no function raises; its rows are in the sink")
    picture.way((305, 120), (305, 238))
    picture.text((297, 175), "fails,", anchor="end")
    picture.text((297, 192), "attempts left", anchor="end")
    picture.way((220, 280), (152, 280))
    picture.text((186, 300), "pause")
    picture.text((186, 314), "over")
    picture.way((85, 240), (85, 180), (240, 122))
    picture.text((78, 205), "next", anchor="end")
    picture.text((78, 221), "attempt", anchor="end")
    picture.way((375, 120), (560, 238))
    picture.text((492, 172), "fails, none left,", anchor="start")
    picture.text((492, 189), "or not worth another", anchor="start")
    picture.way((650, 280), (738, 280))
    picture.text((694, 270), "purge")
    picture.way((540, 320), (540, 342), (85, 342), (85, 322))
    picture.text((312, 337), "requeue: all attempts again")
    return picture


def barriers() -> Picture:
    """A barrier on its way through one task."""
    picture = Picture(860, 330, "A barrier's way through a task with two inputs, in three steps")
    steps = [
        ("1  sources send barrier n", "oo|xx", "ooo|x", "", "takes records of both"),
        ("2  it has come on one input", "|xx", "oo|x", "oo", "holds that input up"),
        ("3  it has come on both", "xx", "x", "oo|", "keeps its state, sends it on"),
    ]
    for number, (title, upper, lower, behind, what) in enumerate(steps):
        x = 20 + 280 * number
        picture.box(x, 20, 260, 200, [], "plain")
        picture.text((x + 130, 45), title, "head")
        picture.box(x + 110, 85, 60, 90, ["task"], "store" if number == 2 else "box")
        for y, marks in ((105, upper), (155, lower)):
            picture.way((x + 12, y), (x + 108, y))
            picture.rows(x + 88 - 15 * (len(marks) - 1), y, marks[::-1])
        picture.way((x + 170, 130), (x + 248, 130))
        picture.rows(x + 228 - 15 * (len(behind) - 1), 130, behind[::-1])
        picture.text((x + 130, 207), what)
    picture.rows(35, 250, "o")
    picture.text((48, 254), "record of checkpoint n", anchor="start")
    picture.rows(225, 250, "x")
    picture.text((238, 254), "record behind it", anchor="start")
    picture.rows(375, 250, "|")
    picture.text((386, 254), "barrier n", anchor="start")
    picture.text(
        (20, 288),
        "All tasks have kept theirs: checkpoint n is complete, and sinks commit what they wrote before it.",
        anchor="start",
    )
    picture.text(
        (20, 308),
        "After a loss all go back to it: state, the places of the sources, what sinks had written.",
        anchor="start",
    )
    return picture


def crash_points() -> Picture:
    """The steps of a micro-batch, and what a crash between two of them leaves."""
    picture = Picture(
        860, 270, "The steps of a micro-batch, and what the next run does after a crash in between"
    )
    steps = [
        ("run", "functions run", "box"),
        ("verdict", "who failed", "box"),
        ("seal", "synced to disk", "store"),
        ("sink", "good rows", "good"),
        ("commit", "synced to disk", "store"),
    ]
    for number, (name, what, kind) in enumerate(steps):
        x = 20 + 142 * number
        picture.box(x, 25, 114, 64, [name, what], kind)
        if number:
            picture.way((x - 28, 57), (x - 2, 57))
    picture.text((20, 122), "A crash here leaves the batch …", anchor="start")
    spans = [
        (20, 418, "new", ["runs it afresh; nothing of", "the first run is known"], "box"),
        (
            418,
            702,
            "sealed",
            ["leaves out what had failed,", "runs the rest,", "calls the sink (again)"],
            "store",
        ),
        (702, 840, "committed", ["runs nothing"], "good"),
    ]
    for start, end, name, what, kind in spans:
        picture.box(start + 2, 135, end - start - 4, 34, [name], kind)
        for number, line in enumerate(what):
            picture.text(((start + end) / 2, 213 + 18 * number), line)
        if end < 840:
            picture.line("crash", (end, 18), (end, 175))
    picture.text((20, 194), "… and the next run", anchor="start")
    return picture


def topology() -> Picture:
    """Who tells the vertex what while records go through a topology in acker mode."""
    picture = Picture(860, 300, "What the parts of a topology and the vertex say to each other")
    picture.box(40, 25, 800, 70, ["vertex", "store, table of roots, timeouts, replays"], "store")
    picture.box(40, 205, 170, 70, ["source"], "box")
    picture.box(335, 205, 190, 70, ["chain", "map → filter"], "box")
    picture.box(650, 205, 190, 70, ["chain", "map → sink"], "box")
    picture.way((150, 205), (150, 97))
    picture.text((142, 148), "records,", anchor="end")
    picture.text((142, 165), "to be stored", anchor="end")
    picture.way((190, 95), (190, 203))
    picture.text((198, 156), "stored: go", anchor="start")
    picture.way((400, 95), (400, 203))
    picture.text((392, 156), "replays", anchor="end")
    picture.way((470, 205), (470, 97))
    picture.text((478, 148), "one value a record,", anchor="start")
    picture.text((478, 165), "or a failure", anchor="start")
    picture.way((710, 205), (710, 97))
    picture.text((718, 156), "the same", anchor="start")
    picture.way((210, 240), (333, 240))
    picture.text((271, 230), "channels")
    picture.way((525, 240), (648, 240))
    picture.text((586, 230), "channels")
    return picture


PICTURES = {
    "overview": overview,
    "record-life": record_life,
    "barriers": barriers,
    "crash-points": crash_points,
    "topology": topology,
}


def main() -> None:
    """Write all pictures; the same code gives the same bytes."""
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
