import numpy as np
import numpy.typing as npt

_U64 = npt.NDArray[np.uint64]
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
def replay_root_ids(roots: _U64, attempts: _I32, incarnation: int, shard_bits: int, out: _U64, /) -> None: ...
def xor_fold(roots: _U64, values: _U64, unique: _U64, folded: _U64, /) -> int: ...
def xor_runs(roots: _U64, values: _U64, unique: _U64, folded: _U64, /) -> int: ...
