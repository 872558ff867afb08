"""The exceptions a user can meet.

Every message says what is wrong, where, and what to do. Errors that cross the vertex service carry
their ``code`` on the wire, so that the client raises the class the vertex raised.
"""

from __future__ import annotations

from typing import ClassVar


class FTLayerError(Exception):
    """Base of everything ftlayer raises on purpose."""

    code: ClassVar[str] = "FTLAYER"


# ---------------------------------------------------------------- set-up


class ConfigError(FTLayerError, ValueError):
    """An option, or a combination of options, makes no sense; the message names them."""

    code = "CONFIG"


class MachineError(FTLayerError):
    """The machine lacks something: Java, a free address space, a Spark version."""

    code = "ENVIRONMENT"


class JavaMissingError(MachineError):
    """No Java, or one that is too old for this Spark; the message says how to install one."""

    code = "JAVA"


class UnsupportedError(FTLayerError):
    """A thing that works elsewhere and not here; the message names the alternative."""

    code = "UNSUPPORTED"


class UnhashableKeyError(FTLayerError, TypeError):
    """A key column has a type that Spark cannot hash, or Arrow cannot carry; names the column."""

    code = "UNHASHABLE_KEY"


class InvalidTopologyError(FTLayerError):
    """A graph or a query that could not be tracked; names the operators."""

    code = "TOPOLOGY"


# ---------------------------------------------------------------- records


class FailException(FTLayerError):  # noqa: N818 - the name the original design gave it
    """Raised by a user's function to fail the record it was called for."""

    code = "FAIL"


class PermanentFailure(FailException):
    """Raised by a user's function: trying this record again is of no use, so it is a dead letter at once."""

    code = "PERMANENT"


MAX_RETRY_LATER_MS = 366 * 24 * 3_600_000
"""The longest pause that a `RetryLater` may ask for."""


class RetryLater(FailException):
    """Raised by a user's function: try this record again after a pause of its own, whatever `backoff` says.

    The pause is kept exactly: no jitter shortens it. `retry_on` and `dead_on` are not asked.

    Args:
        reason: what is noted as the attempt's failure.
        after: the pause, a duration like ``"30s"`` or milliseconds, up to 366 days; None: as `backoff` says.
        uses_attempt: False: the failure does not count, and the record has as many attempts left as before. It
            is tried without end if its function goes on saying so.

    Raises `ConfigError` for an ``after`` that is no such duration, which fails the record as any other error does.
    """

    code = "RETRY_LATER"

    def __init__(
        self, reason: str = "", *, after: str | int | None = None, uses_attempt: bool = True
    ) -> None:
        # Late, because options raise the errors of this module.
        from ftlayer.checks import duration_ms

        super().__init__(reason)
        self.after_ms = None if after is None else duration_ms(after, "RetryLater: after")
        if self.after_ms is not None and self.after_ms > MAX_RETRY_LATER_MS:
            raise ConfigError(f"RetryLater: after: expected 366 days at most, got {after!r}")
        if not isinstance(uses_attempt, bool):
            raise ConfigError(f"RetryLater: uses_attempt: expected True or False, got {uses_attempt!r}")
        self.uses_attempt = uses_attempt


class CodecError(FTLayerError, ValueError):
    """Bytes or a schema that are not a tracked batch."""

    code = "CODEC"


# ---------------------------------------------------------------- store


class StoreError(FTLayerError):
    """Base of the store's errors; the path is part of the message."""

    code = "STORE"


class StoreLockedError(StoreError):
    """Another process holds this store."""

    code = "STORE_LOCKED"


class StoreVersionError(StoreError):
    """The store was written by a newer ftlayer."""

    code = "STORE_VERSION"


class StorePathError(StoreError):
    """The directory is missing, not a directory, or cannot be written."""

    code = "STORE_PATH"


class StoreDamagedError(StoreError):
    """The store's files fail their checks."""

    code = "STORE_DAMAGED"


class StoreFullError(StoreError):
    """The store has used the share of its map (or its disk) that intake may use."""

    code = "STORE_FULL"


# ---------------------------------------------------------------- vertex


class VertexError(FTLayerError):
    """Base of the errors of the vertex and its clients."""

    code = "VERTEX"


class MalformedRequestError(VertexError, ValueError):
    """A request the vertex cannot read; names the field. Nothing was changed."""

    code = "MALFORMED"


class UnauthorizedError(VertexError):
    """The token is missing or wrong."""

    code = "UNAUTHORIZED"


class StaleIncarnationError(VertexError):
    """The call was meant for an earlier incarnation of the vertex, which has restarted since."""

    code = "STALE_INCARNATION"


class StaleOwnerError(VertexError):
    """A newer run of the same query has taken over; this one has to stop."""

    code = "STALE_OWNER"


class IntakeTimeoutError(VertexError):
    """``max_pending`` or a full store held intake back for longer than ``persist_timeout``."""

    code = "INTAKE_TIMEOUT"


class VertexUnavailableError(VertexError):
    """The vertex did not answer before the deadline."""

    code = "UNAVAILABLE"


class ProtocolError(VertexError):
    """A call that is well-formed and makes no sense now (a commit without a seal, say)."""

    code = "PROTOCOL"


# ---------------------------------------------------------------- queries


class QueryError(FTLayerError):
    """Base of the errors of a wrapped query."""

    code = "QUERY"


class RecomputedResultError(QueryError):
    """What was handed to the sink is not what was sealed: Spark recomputed it differently."""

    code = "RECOMPUTED"


class CheckpointMismatchError(QueryError):
    """The Spark checkpoint belongs to another query, or to the same one with other options."""

    code = "CHECKPOINT"


# ---------------------------------------------------------------- topologies


class JobError(FTLayerError):
    """Base of the errors that end a continuous topology; says which slot and why."""

    code = "JOB"


class JobStartError(JobError):
    """A topology did not come up: too few task slots, or a slot that cannot start or be reached."""

    code = "JOB_START"


class SlotLostError(JobError):
    """A slot was lost and is not started again: fault tolerance is off, or the restart strategy has given up."""

    code = "SLOT_LOST"


class PeerRefusedError(JobError):
    """A stream between slots of an instance that does not count, or of another job."""

    code = "PEER_REFUSED"


class PeerLostError(JobError):
    """Another slot cannot be reached, and the coordinator has not replaced it."""

    code = "PEER_LOST"


class PeerUnreachableError(PeerLostError):
    """Another slot, which is up for the coordinator, could not be reached at its address from the beginning."""

    code = "PEER_UNREACHABLE"


class SourceError(FTLayerError):
    """A source cannot go on, or gave something that does not fit its schema; names it and what it gave."""

    code = "SOURCE"


class SourceRowError(SourceError):
    """A source gave a row that does not fit its schema; names source, row and schema, and ends the topology.

    Read again it would give the same row.
    """

    code = "SOURCE_ROW"


class TimerFailedError(FTLayerError):
    """A function's ``on_timer``, or an operator behind it, raised: there is no record to blame, so the slot ends.

    ``operator`` is the uid of the one that raised, ``traceback`` what it raised.
    """

    code = "TIMER"

    def __init__(self, message: str, operator: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.operator = operator
        self.traceback = traceback


class CheckpointError(FTLayerError):
    """A checkpoint could not be taken, found or restored. The more exact errors below say which."""

    code = "CHECKPOINTING"


class CheckpointStorageError(CheckpointError):
    """The storage of checkpoints cannot be read or written (full, read-only, gone). Names the path."""

    code = "CHECKPOINT_STORAGE"


class CheckpointDamagedError(CheckpointError):
    """What was read is not what was written: a file is missing, cut off, changed, or signed with another key."""

    code = "CHECKPOINT_DAMAGED"


class IncompatibleCheckpointError(CheckpointError):
    """A checkpoint does not fit the job that is to be restored from it; names operators and the way out."""

    code = "CHECKPOINT_INCOMPATIBLE"


class StateSerializationError(CheckpointError):
    """A key or value of the state cannot be written; names operator, table and type."""

    code = "STATE_SERIALIZATION"


class SnapshotCancelledError(CheckpointError):
    """A snapshot was given up while it was written; nobody waits for it."""

    code = "SNAPSHOT_CANCELLED"


class CommitFailedError(CheckpointError):
    """A sink could not commit what a completed checkpoint holds. Nothing is lost: it is committed on restore."""

    code = "COMMIT_FAILED"


class SinkError(FTLayerError):
    """A ready-made sink cannot write, commit or abort; names where, and what to do."""

    code = "SINK"


def error_for_code(code: str) -> type[FTLayerError]:
    """Return the class with this wire ``code``, or `FTLayerError` for one this version lacks."""
    todo: list[type[FTLayerError]] = [FTLayerError]
    while todo:
        cls = todo.pop()
        if cls.__dict__.get("code") == code:
            return cls
        todo.extend(cls.__subclasses__())
    return FTLayerError
