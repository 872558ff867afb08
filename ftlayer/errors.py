"""The exceptions a user can meet. What a user's function raises itself is in `ftlayer.common.failures`.

Every message says what is wrong, where, and what to do. Errors that cross the vertex service carry
their ``code`` on the wire, so that the client raises the class the vertex raised.

Each class also says whether starting again may mend it (``recoverable``): `ftlayer.common.rules.restart` judges so.
"""

from __future__ import annotations

from typing import ClassVar


class FTLayerDeprecationWarning(DeprecationWarning):
    """A public name or option that a later version will not have; says what to use, and until when it is there.

    docs/project/versions.md says how long that is at least.
    """


class NeverStartedWarning(UserWarning):
    """A query or topology that was built and thrown away before anything started it, or a stream that nothing took."""


class FTLayerError(Exception):
    """Base of everything ftlayer raises on purpose.

    Attributes:
        code: names the class on the wire.
        recoverable: whether what failed may succeed when it is started again, with nothing else changed: True where
            that depends on the outside or on chance, False where it meets the same program and the same data again,
            None where the error's cause has to be asked (and True where it has none that says otherwise).
        operator: uid of the operator or source whose function it comes from, "" where that is not known.
        is_programs: whether it tells of a mistake in the program (`ftlayer.common.rules.restart.is_programs`),
            whatever its cause.
    """

    code: ClassVar[str] = "FTLAYER"
    recoverable: ClassVar[bool | None] = None
    operator: str = ""
    is_programs: bool = False


# ---------------------------------------------------------------- set-up


class ConfigError(FTLayerError, ValueError):
    """An option, or a combination of options, makes no sense; the message names them."""

    code = "CONFIG"
    recoverable = False


class MachineError(FTLayerError):
    """The machine lacks something: Java, address space, a free port, a Spark version."""

    code = "ENVIRONMENT"
    recoverable = False


class JavaMissingError(MachineError):
    """No Java, or one that is too old for this Spark; the message says how to install one."""

    code = "JAVA"
    recoverable = False


class UnsupportedError(FTLayerError):
    """A thing that works elsewhere and not here; the message names the alternative."""

    code = "UNSUPPORTED"
    recoverable = False


class NotHereError(FTLayerError, AttributeError):
    """A method that Spark or Flink has, and the object it was asked of does not; says what to call."""

    code = "NOT_HERE"
    recoverable = False


class UnhashableKeyError(FTLayerError, TypeError):
    """A key column has a type that Spark cannot hash, or Arrow cannot carry; names the column."""

    code = "UNHASHABLE_KEY"
    recoverable = False


class FunctionLoadError(FTLayerError, ImportError):
    """A function cannot be loaded where it is to run: a module is missing there, or a class has moved."""

    code = "FUNCTION_LOAD"
    recoverable = False


class InvalidTopologyError(FTLayerError):
    """A graph or a query that could not be tracked; names the operators."""

    code = "TOPOLOGY"
    recoverable = False


# ---------------------------------------------------------------- records


class ResultRowError(FTLayerError, TypeError):
    """What a function returned does not fit its schema. It fails its record, and where records cannot fail, the job.

    Another run of the same function over the same record would return the same.
    """

    code = "RESULT_ROW"
    recoverable = False


class CodecError(FTLayerError, ValueError):
    """Bytes or a schema that are not a tracked batch."""

    code = "CODEC"
    recoverable = False


# ---------------------------------------------------------------- store


class StoreError(FTLayerError):
    """Base of the store's errors; the path is part of the message."""

    code = "STORE"
    recoverable = True


class StoreLockedError(StoreError):
    """Another process holds this store."""

    code = "STORE_LOCKED"
    recoverable = True


class StoreVersionError(StoreError):
    """The store was written by a newer ftlayer."""

    code = "STORE_VERSION"
    recoverable = False


class StorePathError(StoreError):
    """The directory is missing, not a directory, or cannot be written."""

    code = "STORE_PATH"
    recoverable = False


class StoreDamagedError(StoreError):
    """The store's files fail their checks."""

    code = "STORE_DAMAGED"
    recoverable = False


class StoreFullError(StoreError):
    """The store has used the share of its map (or its disk) that intake may use."""

    code = "STORE_FULL"
    recoverable = True


# ---------------------------------------------------------------- vertex


class VertexError(FTLayerError):
    """Base of the errors of the vertex and its clients."""

    code = "VERTEX"
    recoverable = True


class MalformedRequestError(VertexError, ValueError):
    """A request the vertex cannot read; names the field. Nothing was changed."""

    code = "MALFORMED"
    recoverable = False


class UnreadableReplyError(VertexError):
    """The reply is none of this version's calls: the vertex, or a program's own board, runs another ftlayer."""

    code = "UNREADABLE_REPLY"
    recoverable = True


class UnauthorizedError(VertexError):
    """The token is missing or wrong."""

    code = "UNAUTHORIZED"
    recoverable = False


class StaleIncarnationError(VertexError):
    """The call was meant for an earlier incarnation of the vertex, which has restarted since."""

    code = "STALE_INCARNATION"
    recoverable = True


class StaleOwnerError(VertexError):
    """A newer run of the same query or topology has taken over; this one has to stop."""

    code = "STALE_OWNER"
    recoverable = False


class IntakeTimeoutError(VertexError):
    """``max_pending`` or a full store held intake back for longer than ``persist_timeout``."""

    code = "INTAKE_TIMEOUT"
    recoverable = True


class VertexUnavailableError(VertexError):
    """The vertex did not answer before the deadline."""

    code = "UNAVAILABLE"
    recoverable = True


class LayerClosedError(VertexError):
    """An `FTLayer` that was closed, or something it gave out, is asked for something."""

    code = "LAYER_CLOSED"
    recoverable = False


class UnknownJobError(VertexError):
    """No topology or query of that name has announced itself, or it has ended; an order needs one that runs."""

    code = "UNKNOWN_JOB"
    recoverable = False


class ProtocolError(VertexError):
    """A call that is well-formed and makes no sense now (a commit without a seal, say)."""

    code = "PROTOCOL"
    recoverable = True


# ---------------------------------------------------------------- queries


class QueryError(FTLayerError):
    """Base of the errors of a wrapped query."""

    code = "QUERY"
    recoverable: ClassVar[bool | None] = None


class RecomputedResultError(QueryError):
    """The rows that were handed to the sink are not those that were sealed: Spark recomputed it differently."""

    code = "RECOMPUTED"
    recoverable = True


class CheckpointMismatchError(QueryError):
    """The Spark checkpoint belongs to another query, or to the same one with other options."""

    code = "CHECKPOINT"
    recoverable = False


# ---------------------------------------------------------------- topologies


class JobError(FTLayerError):
    """Base of the errors that end a continuous topology; says which slot and why."""

    code = "JOB"
    recoverable: ClassVar[bool | None] = None


class JobStartError(JobError):
    """A topology did not come up: too few task slots, or a slot that cannot start or be reached."""

    code = "JOB_START"
    recoverable = False


class SlotLostError(JobError):
    """A slot was lost and is not started again: fault tolerance is off, or the restart strategy has given up."""

    code = "SLOT_LOST"
    recoverable = False


class SessionLostError(JobError):
    """The Spark session that a topology or a query runs in is gone: stopped, or its JVM or Connect server has ended."""

    code = "SESSION_LOST"
    recoverable = False


class PeerRefusedError(JobError):
    """A stream between slots of an instance that does not count, or of another job, or that cannot be read."""

    code = "PEER_REFUSED"
    recoverable = True


class PeerLostError(JobError):
    """Another slot cannot be reached, and the coordinator has not replaced it."""

    code = "PEER_LOST"
    recoverable = True


class PeerUnreachableError(PeerLostError):
    """Another slot, which is up for the coordinator, could not be reached at its address from the beginning."""

    code = "PEER_UNREACHABLE"
    recoverable = True


class SourceError(FTLayerError):
    """A source cannot go on, or gave something that does not fit its schema; names it and what it gave."""

    code = "SOURCE"
    recoverable: ClassVar[bool | None] = None


class SourceGivenUpError(SourceError):
    """A source failed more often than its restart strategy allows; ends the topology, and says what it raised."""

    code = "SOURCE_GIVEN_UP"
    recoverable = False


class SourceRowError(SourceError):
    """A source gave a row that does not fit its schema; names source, row and schema, and ends the topology.

    Read again it would give the same row.
    """

    code = "SOURCE_ROW"
    recoverable = False


class SourceChangedError(SourceError):
    """A source that is read again gives other rows than before, or too few; names the rows, and ends the topology.

    What was in flight of them cannot be had again.
    """

    code = "SOURCE_CHANGED"
    recoverable = False


class TimerFailedError(FTLayerError):
    """A function's ``on_timer``, or an operator behind it, raised: there is no record to blame, so the slot ends.

    ``traceback`` is what the operator raised.
    """

    code = "TIMER"
    recoverable: ClassVar[bool | None] = None

    def __init__(self, message: str, operator: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.operator = operator
        self.traceback = traceback


class CheckpointError(FTLayerError):
    """A checkpoint could not be taken, found or restored. The more exact errors below say which."""

    code = "CHECKPOINTING"
    recoverable: ClassVar[bool | None] = None


class CheckpointStorageError(CheckpointError):
    """The storage of checkpoints cannot be read or written (full, read-only, gone). Names the path."""

    code = "CHECKPOINT_STORAGE"
    recoverable = True


class CheckpointDamagedError(CheckpointError):
    """Data that was read is not what was written: a file is missing, cut off, changed, or signed with another key."""

    code = "CHECKPOINT_DAMAGED"
    recoverable = True


class IncompatibleCheckpointError(CheckpointError):
    """A checkpoint does not fit the job that is to be restored from it; names operators and the way out."""

    code = "CHECKPOINT_INCOMPATIBLE"
    recoverable = False


class StateSerializationError(CheckpointError):
    """A key or value of the state cannot be written; names operator, table and type."""

    code = "STATE_SERIALIZATION"
    recoverable = False


class SnapshotCancelledError(CheckpointError):
    """A snapshot was given up while it was written."""

    code = "SNAPSHOT_CANCELLED"
    recoverable = True


class CommitFailedError(CheckpointError):
    """A sink could not commit what a completed checkpoint holds. Nothing is lost: it is committed on restore."""

    code = "COMMIT_FAILED"
    recoverable: ClassVar[bool | None] = None


class SinkError(FTLayerError):
    """A ready-made sink cannot write, commit or abort; names where, and what to do."""

    code = "SINK"
    recoverable: ClassVar[bool | None] = None


class SinkTargetError(SinkError):
    """What a sink writes to is not there, is closed to it, or has other columns than the rows.

    Until something has succeeded it ends a job at once, as mistakes in a program do.
    """

    code = "SINK_TARGET"
    recoverable: ClassVar[bool | None] = None


class SinkRowError(SinkError):
    """A sink refuses rows in barrier mode where no `FailurePolicy` says what becomes of them, and ends the topology.

    Written again they would be refused again.
    """

    code = "SINK_ROW"
    recoverable = False


class UncommittableError(SinkError):
    """What a checkpoint or batch holds for a sink can never be committed: it is gone, damaged, or another sink's."""

    code = "UNCOMMITTABLE"
    recoverable = False


def install(extra: str) -> str:
    """Return how an extra is installed; ftlayer is in no package index, so it names no package of one."""
    return f"pip install '.[{extra}]' in a checkout of ftlayer, or 'ftlayer-….whl[{extra}]' with the path of a wheel"


def other_format(what: object, found: object, known: int, writer: object = None) -> str:
    """Return the message about something that another ftlayer wrote in a format of its own.

    Args:
        what: where it lies.
        found: its format.
        known: the one that is read here.
        writer: the version that wrote it, text or ASCII; None: it does not say.
    """
    from ftlayer import __version__

    by = writer.decode("ascii", "replace") if isinstance(writer, bytes) else writer
    which, way = "a later ftlayer", "a later one"
    if isinstance(found, int) and found < known:
        which, way = "an earlier ftlayer", "move it away to begin anew"
    return (
        f"{what} has format {found}, written by {which if by is None else f'ftlayer {by}'}; ftlayer {__version__} "
        f"reads format {known}: use the version that wrote it, or {way}"
    )


def error_for_code(code: str) -> type[FTLayerError]:
    """Return the class with this wire ``code``, or `FTLayerError` for one this version lacks."""
    todo: list[type[FTLayerError]] = [FTLayerError]
    while todo:
        cls = todo.pop()
        if cls.__dict__.get("code") == code:
            return cls
        todo.extend(cls.__subclasses__())
    return FTLayerError
