"""Dead letters as an ordinary source: a stream reader whose position is the key of the last letter that was read.

Keys of a stream's letters only ascend, so a position is durable wherever the reader's user keeps it: in Spark's
checkpoint, with a topology's positions in the vertex, in a checkpoint of barrier mode. A letter that was requeued or
purged before it was read does not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.types import StructType

from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA, all_letters_behind, letter_of, row_of
from ftlayer.errors import ConfigError
from ftlayer.functions.data_sources import DataSourceStreamReader, ReadLimit, ReadMaxRows, from_arrow_schema
from ftlayer.vertex.calls import RecordPage, SelectRecords
from ftlayer.vertex.client.client import VertexClient

FORMAT = "ftlayer_dead_letters"
PAGE = 1_000
RANGE_ROWS = 10_000
"""Letters of a stream that are read at a time, unless all there are are asked for."""


@dataclass(frozen=True)
class LetterRange(InputPartition):
    """Letters of a stream behind one key up to another."""

    stream: str
    after: str
    last: str


class DeadLetterReader(DataSourceStreamReader):
    """Reads the dead letters of ``streams``, those that are there already first."""

    def __init__(self, client: VertexClient, streams: Sequence[str]) -> None:
        self._client = client
        self._streams = tuple(streams)
        self._told = dict.fromkeys(self._streams, "")

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        return dict.fromkeys(self._streams, "")

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(RANGE_ROWS)

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        """Ask the vertex for the last letter of each stream, as many rows further on as the limit says."""
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        self._told = {stream: self._end(stream, start.get(stream, ""), rows) for stream in self._streams}
        return self._told

    def reportLatestOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the last letter of each stream, for Spark's progress; where it is gone, the last that was told of."""
        return {stream: max(self._told[stream], self._last(stream)) for stream in self._streams}

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        return [
            LetterRange(stream, start.get(stream, ""), last)
            for stream, last in sorted(end.items())
            if last != start.get(stream, "")
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LetterRange)
        last = bytes.fromhex(partition.last)
        rows = []
        for info in all_letters_behind(self._client, partition.stream, bytes.fromhex(partition.after), PAGE):
            if info.key > last:
                break
            rows.append(row_of(letter_of(info)))
        yield pa.RecordBatch.from_pylist(rows, schema=LETTER_SCHEMA)

    def commit(self, end: dict[str, str]) -> None:
        """Nothing: letters stay until they are requeued or purged."""

    def stop(self) -> None:
        self._client.close()

    def _last(self, stream: str) -> str:
        page = self._client.call(SelectRecords("dead", stream, newest=True, keys_only=True, limit=1))
        assert isinstance(page, RecordPage)
        return page.keys[0].hex() if page.keys else ""

    def _end(self, stream: str, after: str, rows: int | None) -> str:
        found = islice(all_letters_behind(self._client, stream, bytes.fromhex(after), PAGE), rows)
        last = after
        for info in found:
            last = info.key.hex()
        return last


class DeadLetterSource(DataSource):
    """The Data Source behind `FTLayer.dead_letter_stream`; register it with ``spark.dataSource.register``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return from_arrow_schema(LETTER_SCHEMA)

    def streamReader(self, schema: StructType) -> DeadLetterReader:  # noqa: N802 - Spark's name
        for name in ("address", "token", "streams"):
            if not self.options.get(name):
                raise ConfigError(f'format("{FORMAT}"): option {name!r} is missing')
        certs = self.options.get("root_certs", "").encode() or None
        client = VertexClient(
            self.options["address"],
            self.options["token"],
            root_certs=certs,
            client_pem=self.options.get("client_pem", "").encode() or None,
            client_id="dead-letters",
        )
        return DeadLetterReader(client, self.options["streams"].split("\n"))
