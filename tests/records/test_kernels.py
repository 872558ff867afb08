from __future__ import annotations

import gc
import sys

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.errors import MachineError
from ftlayer.records.ids import child_ids
from ftlayer.records.kernels import native


def test_a_missing_extension_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import ftlayer

    monkeypatch.delitem(sys.modules, "ftlayer.records.kernels")
    monkeypatch.delattr(ftlayer, "_native")
    monkeypatch.setitem(sys.modules, "ftlayer._native", None)
    with pytest.raises(MachineError, match=r"pip install -e \.|install ftlayer again"):
        import ftlayer.records.kernels


def test_buffers_are_released_when_a_call_is_refused() -> None:
    ids = np.ones(3, np.uint64)
    before = sys.getrefcount(ids)
    for bad in (np.ones(2, np.uint64), np.ones(3, np.int64), "text", None):
        with pytest.raises((TypeError, ValueError)):
            native.child_ids(ids, 1, 0, bad, 0, ids)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError)):
            native.xor_fold(ids, ids, ids, bad)  # type: ignore[arg-type]
    gc.collect()
    assert sys.getrefcount(ids) == before


def test_read_only_output_is_refused() -> None:
    ids = np.ones(3, np.uint64)
    fixed = ids.copy()
    fixed.flags.writeable = False
    with pytest.raises(TypeError, match="out must be a contiguous writable buffer"):
        native.mix64(ids, fixed)
    assert child_ids(fixed, operator=1, edge=0, ordinals=fixed, channel=0).shape == (3,)


def test_hashing_takes_only_arrow_capsules_of_the_right_length() -> None:
    schema, array = pa.array([1, 2]).__arrow_c_array__()
    with pytest.raises(ValueError, match="hashes has 3 items, expected 2"):
        native.hash_column(schema, array, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="PyCapsule"):
        native.hash_column(array, schema, np.zeros(2, np.int32))
    a_map = pa.array([], pa.map_(pa.string(), pa.string())).__arrow_c_array__()
    with pytest.raises(TypeError, match="Arrow's type '\\+m'"):
        native.hash_column(*a_map, np.zeros(0, np.int32))
    nested = pa.int8()
    for _ in range(130):
        nested = pa.list_(nested)
    with pytest.raises(ValueError, match="nested more than"):
        native.hash_column(*pa.nulls(0, nested).__arrow_c_array__(), np.zeros(0, np.int32))


def test_integers_that_are_not_aligned_are_copied_and_not_written_to() -> None:
    values = np.arange(1, 9, dtype=np.uint64)
    shifted = np.frombuffer(b"x" + values.tobytes(), np.uint64, offset=1)
    assert not shifted.flags.aligned
    expected, found = np.empty_like(values), np.empty_like(values)
    native.mix64(values, expected)
    native.mix64(shifted, found)
    assert found.tolist() == expected.tolist()
    room = np.frombuffer(bytearray(65), np.uint64, offset=1)
    with pytest.raises(ValueError, match="must be aligned to 8 bytes"):
        native.mix64(values, room)
