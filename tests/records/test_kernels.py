from __future__ import annotations

import gc
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.errors import MachineError
from ftlayer.records.ids import child_ids
from ftlayer.records.kernels import native
from tests.programs import find_program


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


SHIFTED = """
import importlib.util, sys
from decimal import Decimal
import numpy as np, pyarrow as pa

spec = importlib.util.spec_from_file_location("ftlayer._native", sys.argv[1])
sys.modules["ftlayer._native"] = native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
from ftlayer.records.ipc import as_stream, read_one_batch
from ftlayer.records.keyhash import spark_hash

def everything_of(plain, keyed, summed, states):
    rows = keyed.num_rows
    yield spark_hash(keyed.columns).tolist()
    yield native.read_records(*plain.__arrow_c_array__(), 0, rows)
    driver = native.ChainDriver((("map", tuple),), b"O", b"\1", None, (), None, float("nan"), False)
    yield driver.run(*plain.__arrow_c_array__(), None, None)
    index, slots = native.KeyIndex(7), np.empty(rows, np.int32)
    yield index.find(*plain.__arrow_c_array__(), slots), slots.tolist()
    values = native.Accumulators(b"csm<>sc", b"-lggzd-", bytes([0, 0, 0, 0, 0, 20, 0]))
    values.reserve(rows)
    yield values.add(slots, *summed.__arrow_c_array__(), True, True), values.export(slots)
    values.load(slots, *states.__arrow_c_array__())
    yield values.export(slots)

n, kinds = [None, 7, -1, 7], (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())
numbers = [pa.array(n, kind) for kind in kinds]
texts = [None, "a longer text than a view has room for", "", "b"]
kept = [pa.array(texts, kind) for kind in (pa.string(), pa.binary())]
wide = [pa.array(texts, kind) for kind in (pa.large_string(), pa.string_view())]
lists = [pa.array([[1, None], None, [], [2]], kind(pa.int32())) for kind in
         (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)]
decimals = [pa.array([None, Decimal(5), Decimal(-5), Decimal(0)], pa.decimal128(digits, 0)) for digits in (9, 20)]
indices = [pa.array(kept[0].dictionary_encode().indices, kind) for kind in (pa.int16(), pa.int32(), pa.int64())]
coded = [pa.DictionaryArray.from_arrays(each, kept[0].dictionary_encode().dictionary) for each in indices]
long, double, whole = numbers[3], numbers[5], pa.array([1, 2, 3, 4])
batches = [
    pa.record_batch(columns, [str(i) for i in range(len(columns))])
    for columns in (
        numbers + kept,
        numbers + kept + wide + lists + decimals + coded,
        [long, long, double, double, kept[0], decimals[1], long],
        [whole, long, double, whole, double, kept[0], decimals[1], whole],
    )
]
shifted = [read_one_batch(pa.py_buffer(b"x" + as_stream(batch).to_pybytes()).slice(1)) for batch in batches]
assert all(batch.columns[0].buffers()[1].address % 2 for batch in shifted)
for right, found in zip(everything_of(*batches), everything_of(*shifted), strict=True):
    assert repr(found) == repr(right), (found, right)
print("all read")
"""


def test_columns_that_a_message_has_not_aligned_are_read_without_an_instruction_that_needs_it(
    tmp_path: Path,
) -> None:
    """An extension that ends its process where a pointer is not aligned: many machines take it silently."""
    extension = tmp_path / "_native.so"
    traps = (
        "-fsanitize=alignment",
        "-fsanitize-undefined-trap-on-error",
        "-fwrapv",
        "-fPIC",
        "-shared",
        "-O0",
    )
    sources = sorted(Path(__file__, "../../../native").resolve().glob("*.c"))
    include = f"-I{sysconfig.get_paths()['include']}"
    subprocess.run(
        [find_program("gcc", "cc"), "-std=c11", *traps, include, *sources, "-o", extension], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", SHIFTED, extension],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "all read\n")
