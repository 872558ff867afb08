"""The demo's input as the partitions of a topology's source: they can be read again, and come at a steady pace."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ftlayer.demo.text import FILES_A_BATCH

FILE_S = 1.0
"""Each partition gives a file a second: slow enough to be killed in the middle, quick enough to be watched."""

STEP = 50
"""Lines between two pauses."""


@dataclass(frozen=True)
class Partition:
    """Every so-manyth file, line by line. ``mark`` is a file that holds how many lines have ever been read.

    Up to there a reader that begins again gets the lines at once, behind it at the pace of `FILE_S`.
    """

    files: tuple[str, ...]
    mark: str

    def __call__(self) -> Iterator[str]:
        """Yield the records, the same ones each time."""
        reached = lines_read(Path(self.mark))
        number = 0
        mark = os.open(self.mark, os.O_WRONLY | os.O_CREAT)
        try:
            for file in self.files:
                lines = Path(file).read_bytes().decode().removesuffix("\n").split("\n")
                for place, line in enumerate(lines, 1):
                    yield line
                    number += 1
                    if number > reached and (place % STEP == 0 or place == len(lines)):
                        # Overwritten in place by a number of the same length: whole at any moment.
                        os.pwrite(mark, b"%012d" % number, 0)
                        time.sleep(FILE_S * (1 + (place - 1) % STEP) / len(lines))
        finally:
            os.close(mark)


def lines_read(mark: Path) -> int:
    """Return what a mark holds; 0 where there is none yet."""
    try:
        return int(mark.read_bytes() or b"0")
    except FileNotFoundError:
        return 0


def input_partitions(directory: Path, marks: Path) -> list[Partition]:
    """Return the partitions of the files that `ftlayer.demo.text.prepare` wrote."""
    paths = sorted(str(path) for path in directory.glob("part-*.txt"))
    return [
        Partition(tuple(paths[number::FILES_A_BATCH]), str(marks / f"lines-{number}"))
        for number in range(FILES_A_BATCH)
    ]
