from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest


def _integers(rng: np.random.Generator, n: int, type_: pa.DataType, bits: int) -> pa.Array:
    edges = [0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1))]
    drawn = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), n - len(edges), dtype=np.int64)
    return pa.array(np.array([*edges, *drawn], np.dtype(f"int{bits}"))).view(type_)


def _floats(rng: np.random.Generator, n: int, bits: int) -> pa.Array:
    # Random bit patterns: NaNs of every payload, denormals and infinities are among them.
    drawn = rng.integers(0, 2**bits, n, dtype=np.uint64).astype(f"uint{bits}").view(f"float{bits}")
    drawn[:6] = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf]
    drawn[6] = np.array([-1], f"int{bits}").view(f"float{bits}")[0]
    return pa.array(drawn, from_pandas=False)


def _decimals(rng: np.random.Generator, n: int, precision: int, scale: int) -> pa.Array:
    """Values of every magnitude, around the powers of two where the number of bytes changes too."""
    top = 10**precision - 1
    unscaled = [0, 1, -1, top, -top]
    unscaled += [sign * (2**bits + d) for bits in range(7, 127) for sign in (1, -1) for d in (-1, 0, 1)]
    unscaled += [
        int(s) * int(rng.integers(0, 2**62)) ** int(e)
        for s, e in zip(rng.choice([1, -1], n), rng.integers(1, 3, n), strict=True)
    ]
    fitting = [u for u in unscaled if abs(u) <= top]
    raw = b"".join(fitting[i % len(fitting)].to_bytes(16, "little", signed=True) for i in range(n))
    return pa.Array.from_buffers(pa.decimal128(precision, scale), n, [None, pa.py_buffer(raw)])


def _binaries(rng: np.random.Generator, n: int) -> pa.Array:
    return pa.array(
        [rng.bytes(int(length)) for length in [*range(20), *rng.integers(0, 40, n - 20)]], pa.binary()
    )


def _strings(rng: np.random.Generator, n: int) -> pa.Array:
    alphabet = list("abc \0é€𝄞ß\U0001f600漢\x7f")
    lengths = [*range(16), *rng.integers(0, 30, n - 16)]
    return pa.array(["".join(rng.choice(alphabet, int(length))) for length in lengths], pa.string())


def _nulled(rng: np.random.Generator, array: pa.Array) -> pa.Array:
    return pa.compute.if_else(pa.array(rng.random(len(array)) < 0.85), array, pa.scalar(None, array.type))


def _lists(rng: np.random.Generator, items: pa.Array, n: int) -> pa.Array:
    bounds = np.sort(rng.integers(0, len(items), n - 1))
    return pa.ListArray.from_arrays(pa.array([0, *bounds, len(items)], pa.int32()), items)


def make_key_table(n: int, seed: int) -> pa.Table:
    """One column of every type that Spark hashes and Arrow carries, with nulls and edge values."""
    rng = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {
        "boolean": pa.array(rng.random(n) < 0.5),
        "byte": _integers(rng, n, pa.int8(), 8),
        "short": _integers(rng, n, pa.int16(), 16),
        "int": _integers(rng, n, pa.int32(), 32),
        "long": _integers(rng, n, pa.int64(), 64),
        "float": _floats(rng, n, 32),
        "double": _floats(rng, n, 64),
        "string": _strings(rng, n),
        "binary": _binaries(rng, n),
        "date": pa.array(rng.integers(-700_000, 2_900_000, n).astype(np.int32)).view(pa.date32()),
        "timestamp": pa.array(rng.integers(-(2**55), 2**57, n)).view(pa.timestamp("us", "UTC")),
        "timestamp_ntz": pa.array(rng.integers(-(2**55), 2**57, n)).view(pa.timestamp("us")),
        "day_time_interval": _integers(rng, n, pa.int64(), 64).view(pa.duration("us")),
        "time": pa.array(rng.integers(0, 86_400_000_000, n) * 1000).view(pa.time64("ns")),
    }
    for precision, scale in [
        (1, 0),
        (9, 2),
        (18, 0),
        (18, 18),
        (19, 0),
        (20, 10),
        (30, 5),
        (38, 0),
        (38, 38),
    ]:
        columns[f"decimal_{precision}_{scale}"] = _decimals(rng, n, precision, scale)
    columns = {name: _nulled(rng, column) for name, column in columns.items()}
    mixed = pa.StructArray.from_arrays(
        [columns["long"], columns["string"], columns["decimal_38_0"], columns["float"]], ["l", "s", "d", "f"]
    )
    columns["struct"] = _nulled(rng, mixed)
    columns["array_int"] = _nulled(rng, _lists(rng, columns["int"], n))
    columns["array_string"] = _nulled(rng, _lists(rng, columns["string"], n))
    columns["array_boolean"] = _nulled(rng, _lists(rng, columns["boolean"], n))
    columns["array_struct"] = _nulled(rng, _lists(rng, columns["struct"], n))
    columns["array_array"] = _nulled(rng, _lists(rng, columns["array_string"], n))
    deep = pa.StructArray.from_arrays([columns["array_struct"], columns["struct"]], ["items", "inner"])
    columns["struct_deep"] = _nulled(rng, deep)
    columns["void"] = pa.nulls(n)
    return pa.table(columns)


@pytest.fixture(scope="session")
def key_table() -> pa.Table:
    return make_key_table(1500, seed=1)
