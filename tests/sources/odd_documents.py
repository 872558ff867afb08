"""Odd documents for each format, a thousand in a forked child: prints those that a child died of, and exits with 1."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import random
import resource
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq

from ftlayer.connectors.files.formats import FileFormat
from ftlayer.connectors.files.listing import Piece
from ftlayer.connectors.from_json import CORRUPT, FromJson
from ftlayer.connectors.http.pull import PolledJsonSource
from ftlayer.errors import SourceError

CHILDREN, DOCUMENTS = int(sys.argv[1]) if len(sys.argv) > 1 else 1, 1_000
VALUES = (
    *(
        "null",
        "{}",
        "[]",
        "[null]",
        "1",
        "-1",
        "1e400",
        "9" * 20,
        "true",
        '""',
        '"a"',
        '"\\u0000"',
        '"\\ud800"',
    ),
    *(
        '"2020-01-01"',
        '"99999-01-01"',
        "NaN",
        "Infinity",
        '"1.23"',
        "é",
        "[" * 2_000,
        '{"a":' * 2_000,
        '"',
        "\x00",
    ),
)
SCHEMA = pa.schema(
    [
        ("a", pa.int64()),
        ("b", pa.string()),
        ("c", pa.struct([("a", pa.decimal128(10, 2)), ("b", pa.list_(pa.date32()))])),
        ("d", pa.list_(pa.struct([("a", pa.timestamp("us", "UTC"))]))),
        ("e", pa.binary()),
    ]
)
FLAT = pa.schema([field for field in SCHEMA if not pa.types.is_nested(field.type)])


def value(draw: random.Random, depth: int = 0) -> str:
    kind = draw.random()
    if depth < 4 and kind < 0.3:
        pairs = ",".join(
            f'"{draw.choice("abcde")}":{value(draw, depth + 1)}' for _ in range(draw.randint(0, 4))
        )
        return "{" + pairs + "}"
    if depth < 4 and kind < 0.4:
        return "[" + ",".join(value(draw, depth + 1) for _ in range(draw.randint(0, 3))) + "]"
    return draw.choice(VALUES)


def mutated(draw: random.Random, data: bytes, most: int) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randint(0, most)):
        at = draw.randrange(len(found) + 1)
        found[at : at + draw.randint(0, 3)] = bytes(draw.randrange(256) for _ in range(draw.randint(0, 3)))
    return bytes(found)


def parquet(draw: random.Random) -> bytes:
    rows = [{"a": 1, "b": "x", "c": {"a": None, "b": []}, "d": [None], "e": b"y"}] * 20
    written = io.BytesIO()
    compression = draw.choice(["none", "snappy", "gzip", "zstd"])
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), written, compression=compression, row_group_size=10)
    return mutated(draw, written.getvalue(), 3)


def documents(draw: random.Random) -> Iterator[bytes]:
    yield "\n".join(value(draw) for _ in range(draw.randint(1, 4))).encode()
    yield mutated(draw, "\n".join(value(draw) for _ in range(draw.randint(1, 3))).encode(), 2)
    cells = ("", "1", "a", '"', '"a', '""', "\r", "\x00", "é", '"x,y"', "2020-01-01", "9" * 30)
    lines = [
        ",".join(draw.choice(cells) for _ in range(draw.randint(0, 4))) for _ in range(draw.randint(0, 4))
    ]
    yield mutated(draw, draw.choice(["\n", "\r\n", "\r"]).join(["a,b,e", *lines]).encode(), 2)


def read(draw: random.Random, note: mmap.mmap) -> None:
    """Read a few documents by each reader."""
    formats = [
        FileFormat("json", SCHEMA, malformed="bad"),
        FileFormat("csv", FLAT, malformed="bad", header=draw.random() < 0.5),
        FileFormat("text", pa.schema([("value", pa.string())])),
        FileFormat("parquet", SCHEMA),
    ]
    polled = PolledJsonSource("http://127.0.0.1:1/", id="a")
    parse = FromJson(pa.schema([*SCHEMA, (CORRUPT, pa.string())]))
    found = [*documents(draw), *([parquet(draw)] if draw.random() < 0.1 else [])]
    for data in found:
        note.seek(0)
        note.write(len(data).to_bytes(4) + data[: 1 << 16])
        for form in formats:
            disk = SimpleNamespace(open=lambda path, mode, compression=None, data=data: io.BytesIO(data))
            with contextlib.suppress(Exception):  # Any that Python can catch will do.
                for batch in form.rows(disk, Piece("f", len(data), "", 0, len(data) or 1)):
                    batch.validate(full=True)
                    batch.to_pylist()
        parse(pa.RecordBatch.from_pydict({"value": pa.array([data, b'{"a": 1}'])})).validate(full=True)
        with contextlib.suppress(SourceError):
            polled.found(data)


def main() -> int:
    note = mmap.mmap(-1, 1 << 17)
    died = 0
    for seed in range(CHILDREN):
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            draw = random.Random(seed)
            for _ in range(DOCUMENTS):
                read(draw, note)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            died += 1
            note.seek(0)
            print(f"seed {seed}: status {status}: {note.read(int.from_bytes(note.read(4)))[:500]!r}")
    return 1 if died else 0


if __name__ == "__main__":
    sys.exit(main())
