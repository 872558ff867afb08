"""The columns of a stream of dead letters."""

from __future__ import annotations

import pyarrow as pa

LETTER_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("stream", pa.string()),
        ("origin_id", pa.int64()),
        ("attempts", pa.int32()),
        ("first_failed_at", pa.timestamp("us", tz="UTC")),
        ("died_at", pa.timestamp("us", tz="UTC")),
        ("reason", pa.string()),
        ("operator", pa.string()),
        ("traceback", pa.string()),
        ("record", pa.string()),
    ]
)
"""The columns of a stream of dead letters; ``record`` is the payload as JSON, ``origin_id`` a signed number."""
