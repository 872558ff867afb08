from collections.abc import Callable
from typing import Any, final, overload

import numpy as np
import numpy.typing as npt

from ftlayer.functions.handles import ValueHandle

_U64 = npt.NDArray[np.uint64]
_I64 = npt.NDArray[np.int64]
_I32 = npt.NDArray[np.int32]

def mix64(values: _U64, out: _U64, /) -> None: ...
def child_ids(
    parent_ids: _U64, operator: int, edge: int, ordinals: _U64, channel: int | _U64, out: _U64, /
) -> None: ...
def join_ids(
    left: _U64,
    right: _U64,
    side: int,
    operator: int,
    edge: int,
    ordinals: _U64,
    channel: int | _U64,
    out: _U64,
    /,
) -> None: ...
def root_ids(key0: int, key1: int, first_ordinal: int, shard: int, shard_bits: int, out: _U64, /) -> None: ...
def xor_fold(roots: _U64, values: _U64, unique: _U64, folded: _U64, /) -> int: ...
def xor_runs(roots: _U64, values: _U64, unique: _U64, folded: _U64, /) -> int: ...
def child_ordinals(parents: _I64, counts: _U64, out: _U64, /) -> None: ...
def xor_at(folded: _U64, places: _I64, values: _U64, /) -> None: ...
def split_rows(selection: _I32, order: _I64, ends: _I64, /) -> None: ...
def read_records(schema: object, array: object, start: int, rows: int, /) -> list[object] | None: ...
def write_records(
    records: list[object] | tuple[object, ...], types: bytes, nullable: bytes, /
) -> list[tuple[bytes | None, bytes | list[object], bytes | None, int]] | None: ...
def msgpack_cost(data: object, most: int, /) -> int: ...
def hash_column(schema: object, array: object, hashes: _I32, /) -> None: ...

@final
class ChainDriver:
    @property
    def done(self) -> int: ...
    @property
    def unwritten(self) -> int: ...
    def __init__(
        self,
        steps: tuple[tuple[Any, ...], ...],
        types: bytes,
        nullable: bytes,
        names: tuple[str, ...] | None,
        passes: tuple[type[BaseException], ...],
        fails: tuple[type[BaseException], ...],
        entries: list[Any] | None,
        nan: float,
        /,
    ) -> None: ...
    def forget(self) -> None: ...
    def take_done(self) -> int: ...
    def write_back(self) -> None: ...
    def run(
        self, schema: object, array: object, fail: Callable[[int, int, BaseException, int], None], /
    ) -> tuple[list[Any], int, bytes, bool] | None: ...

def mark_exit(page: object, place: int, /) -> None: ...

@final
class DictValueHandle(ValueHandle):  # registered there
    @overload
    def __init__(
        self, context: object, table: dict[Any, Any], pop: Callable[[Any, None], object], default: Any, /
    ) -> None: ...
    @overload
    def __init__(
        self,
        context: object,
        table: dict[Any, Any],
        pop: Callable[[Any, None], object],
        default: Any,
        entries: list[Any],
        restore: Callable[[Any, Any], object],
        read: Callable[[Any, Any], object],
        absent: object,
        /,
    ) -> None: ...

@final
class LoggedLookup:
    def __init__(
        self,
        table: dict[Any, Any],
        entries: list[Any],
        restore: Callable[[Any, Any], object],
        read: Callable[[Any, Any], object] | None,
        absent: object,
        /,
    ) -> None: ...
    def __call__(self, key: object, /) -> Any: ...
