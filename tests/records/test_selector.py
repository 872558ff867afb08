from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import ConfigError, UnhashableKeyError
from ftlayer.records.keyhash import spark_hash
from ftlayer.records.traced import KeySelector


@pytest.fixture
def batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"host": ["a", "b", None], "user": [{"id": 1}, None, {"id": None}]})


def test_a_selector_hashes_its_columns_in_order(batch: pa.RecordBatch) -> None:
    ids = pa.array([1, None, None])
    assert KeySelector(("host",)).hash(batch).tolist() == spark_hash([batch.column("host")]).tolist()
    both = KeySelector(("user.id", "host")).hash(batch).tolist()
    assert both == spark_hash([ids, batch.column("host")]).tolist()
    assert both != KeySelector(("host", "user.id")).hash(batch).tolist()


def test_a_schema_is_checked_before_any_row(batch: pa.RecordBatch) -> None:
    KeySelector(("host", "user.id")).check(batch.schema)
    with pytest.raises(ConfigError, match="no column is called 'port'"):
        KeySelector(("host", "port")).check(batch.schema)
    with pytest.raises(UnhashableKeyError, match="'m'"):
        KeySelector(("m",)).check(pa.schema([("m", pa.map_(pa.string(), pa.string()))]))


@pytest.mark.parametrize("columns", ["host", ["host"], (), (1,)])
def test_what_is_not_a_key_is_refused(columns: Any) -> None:
    with pytest.raises(ConfigError):
        KeySelector(columns)
