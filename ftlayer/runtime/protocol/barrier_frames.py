"""A barrier as bytes: what stands behind the header of its frame."""

from __future__ import annotations

import struct

import pyarrow as pa

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.errors import CodecError

# started_ms, timeout_ms (-1: none), alignment, kind, final, full; the location follows as UTF-8.
_BODY = struct.Struct("<qqBBBB")

_ALIGNMENTS = tuple(Alignment)
_KINDS = tuple(SnapshotKind)


def pack_barrier(barrier: Barrier) -> bytes:
    """Return all of a barrier but its checkpoint, which is in the header."""
    body = _BODY.pack(
        barrier.started_ms,
        -1 if barrier.timeout_ms is None else barrier.timeout_ms,
        _ALIGNMENTS.index(barrier.alignment),
        _KINDS.index(barrier.kind),
        barrier.final,
        barrier.full,
    )
    return body + barrier.location.encode()


def unpack_barrier(checkpoint: int, body: pa.Buffer) -> Barrier:
    """Read what `pack_barrier` wrote; `CodecError` for anything else."""
    if body.size < _BODY.size:
        raise CodecError(f"a barrier of {body.size} bytes is truncated; {_BODY.size} are needed")
    started_ms, timeout_ms, alignment, kind, final, full = _BODY.unpack_from(body)
    if alignment >= len(_ALIGNMENTS) or kind >= len(_KINDS) or max(final, full) > 1 or timeout_ms < -1:
        raise CodecError(f"a barrier of checkpoint {checkpoint} makes no sense")
    try:
        location = body[_BODY.size :].to_pybytes().decode()
    except UnicodeDecodeError as error:
        raise CodecError(f"the location in a barrier is not readable ({error})") from None
    return Barrier(
        checkpoint,
        started_ms,
        _ALIGNMENTS[alignment],
        None if timeout_ms < 0 else timeout_ms,
        _KINDS[kind],
        bool(final),
        location,
        bool(full),
    )
