"""What `FTLayer` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, UnsupportedError
from ftlayer.spark.facade import FTLayer


@pytest.mark.parametrize("first", [KeyboardInterrupt(), ValueError("the program's own")])
def test_an_interrupt_of_the_close_behind_an_interrupt_is_one_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: BaseException
) -> None:
    layer = FTLayer.embedded(tmp_path / "ft")

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer, "close", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised, layer:
        raise first
    # Another error of the program is not hidden.
    hides = raised.value.__suppress_context__
    assert hides if isinstance(first, KeyboardInterrupt) else raised.value.__context__ is first


def test_an_embedded_vertex_cannot_serve_a_session_of_spark_connect(tmp_path: Path) -> None:
    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    layer = FTLayer.embedded(tmp_path / "ft")
    with pytest.raises(UnsupportedError, match=r"ftlayer serve.*FTLayer\.connect"):
        layer.client_for(session)
    assert layer.vertex is None
    connected = FTLayer.connect("grpc://127.0.0.1:1", token="x" * 16)
    assert connected.client_for(session) is connected.client


@pytest.mark.parametrize("keys", [None, "abc123", b"\x01", 7])
@pytest.mark.parametrize("change", ["requeue", "purge"])
def test_keys_of_dead_letters_come_as_a_list(tmp_path: Path, change: str, keys: Any) -> None:
    with (
        FTLayer.embedded(tmp_path / "ft", status=FTStatus.OFF) as layer,
        pytest.raises(
            ConfigError, match=r"keys: expected a list of keys of dead letters, got .*write \[key\]"
        ),
    ):
        getattr(layer, change)(keys)
