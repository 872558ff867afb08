"""Files of dead letters are made a piece at a time, and hold what was listed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyarrow import parquet

from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA
from ftlayer.errors import ConfigError
from ftlayer.monitor.rules.exporting import GROUP_ROWS, Page, exported
from ftlayer.monitor.rules.file_formats import ExportFormat
from ftlayer.monitor.rules.names import JobNames
from ftlayer.vertex.calls import Attempt, RecordInfo

NAMES = JobNames(())
PAGE = 1_000


def letter(number: int, text: str = "x") -> RecordInfo:
    return RecordInfo(
        key=number.to_bytes(8),
        stream="orders/lines",
        state="dead",
        root=number,
        origin=number,
        attempt=1,
        not_before_ms=0,
        history=(Attempt(1, 1_000, "ValueError: no", "parse", "slot 1", "Traceback"),),
        payload=pa.record_batch({"id": [number], "text": [text]}),
    )


def pages(count: int, taken: list[int], text: str = "x") -> Iterator[Page]:
    for start in range(0, count, PAGE):
        taken.append(start)
        yield "shop", [letter(number, text) for number in range(start, min(start + PAGE, count))]


@pytest.mark.parametrize("format", list(ExportFormat))
def test_each_letter_is_in_the_file_once(format: ExportFormat) -> None:
    """In the order in which they came, and in one form whatever the pages were."""
    data = b"".join(exported(pages(2_500, []), NAMES, format))
    if format is ExportFormat.JSONL:
        records = [json.loads(line)["record"] for line in data.splitlines()]
    else:
        table = parquet.read_table(io.BytesIO(data))
        assert table.schema == LETTER_SCHEMA
        records = [json.loads(text) for text in table["record"].to_pylist()]
    assert records == [{"id": number, "text": "x"} for number in range(2_500)]


@pytest.mark.parametrize("format", list(ExportFormat))
def test_no_letters_are_a_file_without_rows(format: ExportFormat) -> None:
    data = b"".join(exported(pages(0, []), NAMES, format))
    assert data == b"" or parquet.read_table(io.BytesIO(data)).num_rows == 0


def test_parquet_keeps_a_row_group_and_no_more() -> None:
    """The first bytes come when the first group is full, by rows or by what they hold."""
    taken: list[int] = []
    first = next(exported(pages(10 * GROUP_ROWS, taken), NAMES, ExportFormat.PARQUET))
    assert first.startswith(b"PAR1")
    assert len(taken) * PAGE == GROUP_ROWS
    taken.clear()
    next(exported(pages(10 * GROUP_ROWS, taken, "x" * 20_000), NAMES, ExportFormat.PARQUET))
    assert len(taken) == 1


def test_small_pages_share_a_row_group() -> None:
    """A search gives pages of a letter or two: a group each would make a file of footers."""
    few = ((f"shop-{number % 3}", [letter(number)]) for number in range(200))
    data = b"".join(exported(few, NAMES, ExportFormat.PARQUET))
    assert parquet.ParquetFile(io.BytesIO(data)).num_row_groups == 1


@pytest.mark.parametrize("name", ["letters.txt", "letters", "letters.parquet.bak", ".parquet"])
def test_a_name_that_says_no_format_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"neither \.jsonl .* nor \.parquet"):
        ExportFormat.of_name(name)
