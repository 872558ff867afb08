"""Files and tables of a store that speaks S3."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from ftlayer.connectors.delta import DeltaLog
from ftlayer.errors import ConfigError, UncommittableError
from ftlayer.sinks import DeltaSink, FileSink, IcebergSink

COUNT = count()


@pytest.fixture
def bucket(s3_server: Any) -> str:
    name = f"bucket-{os.getpid()}-{next(COUNT)}"
    s3_server.make_bucket(name)
    return name


@pytest.fixture
def _fsspec_knows(s3_server: Any) -> Iterator[None]:
    """Credentials where users of fsspec have them."""
    import s3fs

    before = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = s3_server.fsspec_options
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    fsspec.config.conf.clear()
    fsspec.config.conf.update(before)
    s3fs.S3FileSystem.clear_instance_cache()


def rows(*numbers: int) -> Any:
    keys = [f"a b/{number % 2}" for number in numbers]
    return iter([pa.record_batch({"n": pa.array(numbers, pa.int64()), "key": keys})])


@pytest.mark.usefixtures("_fsspec_knows")
def test_files(s3_server: Any, bucket: str) -> None:
    sink = FileSink(f"s3://{bucket}/out")
    first, second, third = (sink.write(rows(number)) for number in range(3))
    assert all("_ftlayer-inprogress" in name for name in s3_server.objects(bucket))
    sink.commit([first, second], 1)
    sink.commit([first, second], 1)
    sink.abort([first, third], 2)
    fs, root = fsspec.core.url_to_fs(f"s3://{bucket}/out")
    fs.invalidate_cache()
    assert sorted(ds.dataset(root, filesystem=fs).to_table()["n"].to_pylist()) == [0, 1]
    assert len(s3_server.objects(bucket)) == 2
    with pytest.raises(UncommittableError, match="is gone"):
        sink.commit([third], 3)
    lost = FileSink(f"s3://{bucket}/out")
    lost.write(rows(4))
    assert len(sink.clean(older_than=-60)) == 1
    assert len(s3_server.objects(bucket)) == 2


def test_a_delta_table(s3_server: Any, bucket: str) -> None:
    deltalake = pytest.importorskip("deltalake")
    url, options = f"s3://{bucket}/table", s3_server.delta_options
    sink = DeltaSink(url, partition_by=["key"], storage_options=options)
    first, second, third = (sink.write(rows(number, number + 1)) for number in (0, 2, 4))
    sink.commit([first, second], 1)
    sink.commit([first, second], 1)
    sink.abort([first, third], 2)
    table = deltalake.DeltaTable(url, storage_options=options)
    assert sorted(table.to_pyarrow_table()["n"].to_pylist()) == [0, 1, 2, 3]
    assert len([name for name in s3_server.objects(bucket) if name.endswith(".parquet")]) == 4
    with pytest.raises(UncommittableError, match="is gone or changed"):
        sink.commit([third], 3)
    DeltaSink(url, storage_options=options).write(rows(4))
    assert len(sink.clean(older_than=-60)) == 1
    two = [DeltaLog(url, options, "it") for _ in range(2)]
    last = sink.write(rows(4))
    two[0].add([last], 4)
    with pytest.raises(deltalake.exceptions.CommitFailedError):
        two[1].add([last], 4)


@pytest.mark.campaign
def test_an_iceberg_table(s3_server: Any, bucket: str, tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    from pyiceberg.catalog import load_catalog

    catalog = s3_server.iceberg_options | {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"s3://{bucket}/warehouse",
    }
    sink = IcebergSink("shop.numbers", catalog, partition_by=["key"])
    first, second, third = (sink.write(rows(number, number + 1)) for number in (0, 2, 4))
    sink.commit([first, second], 1)
    sink.commit([first, second], 1)
    sink.abort([first, third], 2)
    opened = load_catalog("default", **catalog)
    table = opened.load_table("shop.numbers")
    assert sorted(table.scan().to_arrow()["n"].to_pylist()) == [0, 1, 2, 3]
    assert len([name for name in s3_server.objects(bucket) if name.endswith(".parquet")]) == 4
    with pytest.raises(UncommittableError, match="is gone or changed"):
        sink.commit([third], 3)
    opened.close()


def test_options_that_only_one_of_two_clients_has_are_refused() -> None:
    pytest.importorskip("deltalake")
    with pytest.raises(ConfigError, match="storage_options: 'aws_role_arn' is none of those"):
        DeltaSink("s3://bucket/table", storage_options={"aws_role_arn": "x"})
    with pytest.raises(ConfigError, match="path: scheme: expected one of"):
        DeltaSink("gs://bucket/table")
