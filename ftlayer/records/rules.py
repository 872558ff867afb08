"""Where the tracked columns of an encoded batch come from: the ones with a rule are not written row by row.

Rules travel as a msgpack map:

| entry | value |
| --- | --- |
| ``version`` | `VERSION` |
| ``source_record_id`` | [key, first ordinal, shard, shards] of consecutive derived root ids |
| ``record_id`` | ``"root"``: the root's id; ``"initial"``: `initial_record_ids` of the roots |
| ``key_hash`` | the constant hash of each selector |
| ``attempt`` | the constant |
| ``origin`` | ``"root"``: the root's id |

nil in place of any of them: the column is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from ftlayer.errors import CodecError
from ftlayer.records.batch import MAX_SELECTORS, TRACKED_COLUMNS, RootRun

VERSION = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """How each tracked column is found without writing it; None for one that is written."""

    source_record_id: RootRun | None
    record_id: str | None
    key_hash: tuple[int, ...] | None
    attempt: int | None
    origin: str | None

    def stored_columns(self) -> list[str]:
        """Name the tracked columns that are written, in the order they are written in."""
        return [name for name in TRACKED_COLUMNS if getattr(self, name) is None]

    def pack(self) -> bytes:
        """Return the rules as msgpack."""
        run = self.source_record_id
        packed: bytes = msgpack.packb(
            {
                "version": VERSION,
                "source_record_id": run and [run.key, run.first_ordinal, run.shard, run.shards],
                "record_id": self.record_id,
                "key_hash": self.key_hash,
                "attempt": self.attempt,
                "origin": self.origin,
            }
        )
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Rules:
        """Read what `pack` wrote; CodecError, naming the rule, for anything else."""
        if not packed:
            raise CodecError("an Arrow stream without ftlayer's metadata is no tracked batch")
        try:
            found = msgpack.unpackb(packed)
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
            raise CodecError(f"the rules of the tracked columns cannot be read ({error})") from error
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise CodecError(f"the tracked batch was not written as version {VERSION} of the format")
        return cls(
            _root_run(found.get("source_record_id")),
            _choice(found, "record_id", ("root", "initial")),
            _constant_hashes(found.get("key_hash")),
            _constant_attempt(found.get("attempt")),
            _choice(found, "origin", ("root",)),
        )


def _root_run(value: Any) -> RootRun | None:
    if value is None:
        return None
    if not (
        isinstance(value, list) and len(value) == 4 and isinstance(value[0], bytes) and len(value[0]) == 16
    ):
        raise CodecError("the rule of 'source_record_id' must be [16-byte key, first ordinal, shard, shards]")
    if not all(type(number) is int and number >= 0 for number in value[1:]):
        raise CodecError("the rule of 'source_record_id' must have integers of 0 or more after its key")
    return RootRun(*value)


def _choice(found: dict[str, Any], name: str, choices: tuple[str, ...]) -> str | None:
    value = found.get(name)
    if value is None or (isinstance(value, str) and value in choices):
        return value
    raise CodecError(f"the rule of {name!r} must be one of {choices}, or nil")


def _constant_hashes(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not (
        isinstance(value, list) and 1 <= len(value) <= MAX_SELECTORS and all(_is_int32(v) for v in value)
    ):
        raise CodecError(f"the rule of 'key_hash' must be 1 to {MAX_SELECTORS} int32 numbers, or nil")
    return tuple(value)


def _constant_attempt(value: Any) -> int | None:
    if value is None or (_is_int32(value) and value >= 0):
        return value  # type: ignore[no-any-return]  # msgpack is untyped
    raise CodecError("the rule of 'attempt' must be an int32 of 0 or more, or nil")


def _is_int32(value: Any) -> bool:
    return type(value) is int and -(2**31) <= value < 2**31
