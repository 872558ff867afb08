"""What a call is, and parts of calls of every subject: envelope, options of a stream, ids, records.

The class of a call says all that has to be known of its calls: by its bases what they have an effect on and what
answers them (`AnsweredBy`), by ``route`` where they go, by `Call.check` what cannot be meant. The lists of calls and
replies are made of the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from enum import Enum
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
)

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.common.checks import check_choice, check_instance, check_int, check_number, known_options, shown
from ftlayer.common.failures import MAX_RETRY_LATER_MS
from ftlayer.common.rules.circuit import Limit
from ftlayer.common.rules.restart import BACKOFF_MS
from ftlayer.errors import ConfigError, MalformedRequestError, VertexError
from ftlayer.records.failures import Failure as Failure
from ftlayer.records.ids import RootRange as RootRange
from ftlayer.records.ids import RowRoots as RowRoots

U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]

MAX_ROWS = 1 << 20
"""At most this many rows in a call."""

REPLAYS = ("store", "source")
"""Where a replay of a topology's record comes from."""

LONGEST_MS = 1 << 52  # about 140,000 years: times stay exact, whatever they are added to

# Names become parts of the store's keys, which LMDB limits to 511 bytes.
MAX_NAME_BYTES = 200
# A job's name with some more.
MAX_RUN_BYTES = 256
# A run's name, and the number of a checkpoint.
MAX_FILE_BYTES = MAX_RUN_BYTES + 20


class Route(Enum):
    """Which shard a call goes to: that of the stream, query or job that this field names; without one, all."""

    STREAM = "stream"
    QUERY = "query"
    JOB = "job"
    OWNER = "owner"
    ALL = ""


CALLS: dict[str, type[AnsweredBy[Reply]]] = {}
REPLIES: dict[str, type[Reply]] = {}


class Call:
    """A call, or a base of some without a ``route``; ``asks_all``: its field may be empty."""

    __slots__ = ()
    route: ClassVar[Route]
    asks_all: ClassVar[bool] = False
    enveloped: ClassVar[bool] = False

    def __init_subclass__(cls, route: Route | None = None) -> None:
        if route is not None:
            cls.route = route
        super().__init_subclass__()

    def check(self) -> None:
        """Raise `MalformedRequestError` naming the field, if the call cannot be meant, whatever its types.

        The vertex trusts no sender, and checks calls here alone. Whether they make sense *now* is for the rules to say.
        """
        field = self.route.value
        if field and (getattr(self, field) or not self.asks_all):
            check_name(getattr(self, field), f"{type(self).__name__}.{field}")
        self.check_fields()

    def check_fields(self) -> None:
        """Do so for fields other than the route's."""


class ReadingCall(Call):
    """Changes nothing."""

    __slots__ = ()


class MutatingCall(Call):
    """Changes something. Asked again, it is executed again, and that changes nothing twice."""

    __slots__ = ()
    enveloped = True


class PassingCall(MutatingCall):
    """Has its effect once in an incarnation of the vertex."""

    __slots__ = ()


class MemoryCall(PassingCall):
    """Changes memory alone: no transaction has a part in it."""

    __slots__ = ()
    incarnation: int


class DurableCall(MutatingCall):
    """Has its effect once, over restarts of the vertex too."""

    __slots__ = ()


class IntakeCall(DurableCall):
    """Adds records: for ``store.write(intake=True)``."""

    __slots__ = ()


class Reply:
    __slots__ = ()

    def __init_subclass__(cls) -> None:
        if "__dataclass_fields__" in cls.__dict__:
            REPLIES[cls.__name__] = cls


R = TypeVar("R", bound=Reply)
_R_co = TypeVar("_R_co", bound=Reply, covariant=True)


class AnsweredBy(Call, Generic[_R_co]):
    """A call by its reply, whose class it names: ``class Xor(MemoryCall, AnsweredBy["Xored"])``. Each call is one."""

    __slots__ = ()
    reply_name: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is AnsweredBy:
                (reply,) = get_args(base)
                cls.reply_name = getattr(reply, "__forward_arg__", None) or reply.__name__
        # A dataclass with slots is made twice: this is the one that stays, which gets no arguments.
        if {"route", "__dataclass_fields__"} <= cls.__dict__.keys():
            CALLS[cls.__name__] = cls

    @classmethod
    def expected(cls, answer: Reply) -> _R_co:
        """Return ``answer`` as the reply that it has to be; `VertexError` if it is another."""
        if type(answer) is not REPLIES[cls.reply_name]:
            raise VertexError(
                f"{cls.__name__}: the vertex, or board, answered {type(answer).__name__}, and {cls.reply_name} "
                "was expected: use the same ftlayer on both sides"
            )
        return cast(_R_co, answer)


class Asked(Protocol):
    """Makes a call and returns its reply; raises what is answered instead."""

    def __call__(self, call: AnsweredBy[R], /) -> R: ...


_C = TypeVar("_C", bound=Call)
_D = TypeVar("_D", bound=Call)
_E = TypeVar("_E", bound=Call)
_C_co = TypeVar("_C_co", bound=Call, covariant=True)
_Self = TypeVar("_Self")
_With = TypeVar("_With")
_More = ParamSpec("_More")
_Result = TypeVar("_Result")
_Handler: TypeAlias = Callable[Concatenate[_Self, _With, _C, _More], _Result]
_After: TypeAlias = Callable[[], None] | None


class _Mark(Protocol[_C, _C_co]):
    # A method gives the call's reply, maybe with what is to be done after it, or it passes the call on.

    @overload
    def __call__(
        self: _Mark[_C, AnsweredBy[R]], method: _Handler[_Self, _With, _C, _More, R], /
    ) -> _Handler[_Self, _With, _C, _More, R]: ...
    @overload
    def __call__(
        self: _Mark[_C, AnsweredBy[R]], method: _Handler[_Self, _With, _C, _More, tuple[R, _After]], /
    ) -> _Handler[_Self, _With, _C, _More, tuple[R, _After]]: ...
    @overload
    def __call__(
        self, method: _Handler[_Self, _With, _C, _More, None], /
    ) -> _Handler[_Self, _With, _C, _More, None]: ...


@overload
def handles(kind: type[_C], /) -> _Mark[_C, _C]: ...
@overload
def handles(kind: type[_C], other: type[_D], /) -> _Mark[_C | _D, Call]: ...
@overload
def handles(kind: type[_C], other: type[_D], third: type[_E], /) -> _Mark[_C | _D | _E, Call]: ...
def handles(*kinds: type[Call]) -> Any:
    """Register a method for calls of these kinds, or of those derived from them: its second argument is the call."""

    def mark(method: Any) -> Any:
        method.handled = kinds
        return method

    return mark


def registered_in(*owners: object) -> dict[type[Call], Callable[..., Any]]:
    """Return the methods of objects by the calls that they are registered for."""
    found = {
        kind: method.__get__(owner)
        for owner in owners
        for method in vars(type(owner)).values()
        for kind in getattr(method, "handled", ())
    }
    chosen = {kind: next((base for base in kind.__mro__ if base in found), None) for kind in CALLS.values()}
    return {kind: found[base] for kind, base in chosen.items() if base is not None}


def check_name(name: str, where: str, most: int = MAX_NAME_BYTES) -> None:
    """Raise `MalformedRequestError` unless ``name`` has 1 to ``most`` bytes and no NUL."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= most or "\0" in name:
        raise MalformedRequestError(f"{where}: expected 1 to {most} bytes without NUL, got {size} bytes")


def check_least(value: int, least: int, where: str) -> None:
    if not least <= value < 1 << 63:
        raise MalformedRequestError(f"{where}: expected {least} to 2^63-1, got {value}")


def check_limit(value: int, most: int, where: str) -> None:
    if not 1 <= value <= most:
        raise MalformedRequestError(f"{where}: expected 1 to {most}, got {value}")


def check_most(items: Sized, most: int, where: str, what: str = "") -> None:
    if len(items) > most:
        raise MalformedRequestError(f"{where}: expected {most} {what}at most, got {len(items)}")


def check_id(value: int, where: str) -> None:
    if not 0 < value < 1 << 64:
        raise MalformedRequestError(f"{where}: expected an id, 1 to 2^64-1, got {value}")


def check_rows(rows: int, where: str) -> None:
    if rows > MAX_ROWS:
        raise MalformedRequestError(f"{where}: {rows} rows in one call; send {MAX_ROWS} at most")


def check_one_row(payload: pa.RecordBatch, where: str) -> None:
    if payload.num_rows != 1:
        raise MalformedRequestError(f"{where}.payload: expected 1 row, got {payload.num_rows}")


def check_ids(ids: RowRoots, where: str) -> None:
    # Twice as fast as `all`, and four times for a few ids.
    if not isinstance(ids, RootRange) and np.count_nonzero(ids) != ids.size:
        index = int(np.flatnonzero(ids == 0)[0])
        raise MalformedRequestError(f"{where}[{index}]: 0 is never an id")


def check_lengths(call: str, rows: int, **columns: Sized) -> None:
    for name, column in columns.items():
        if len(column) != rows:
            raise MalformedRequestError(
                f"{call}.{name}: expected {rows} rows, as {call}.roots has, got {len(column)}"
            )


def check_key_hashes(key_hashes: I32 | None, rows: int, where: str) -> None:
    if key_hashes is None:
        return
    if len(key_hashes) != rows:
        raise MalformedRequestError(f"{where}: expected {rows} rows, as roots has, got {len(key_hashes)}")
    if key_hashes.ndim not in (1, 2) or 0 in key_hashes.shape[1:]:
        raise MalformedRequestError(
            f"{where}: expected shape (n,) or (n, selectors), got {key_hashes.shape}; leave it out without keys"
        )


def check_range(start: int, end: int, where: str) -> None:
    check_least(start, 0, f"{where}.start")
    check_least(end, start, f"{where}.end")


def check_streams(streams: tuple[str, ...], where: str) -> None:
    if not streams:
        raise MalformedRequestError(f"{where}: expected one name or more, got none")
    for index, stream in enumerate(streams):
        check_name(stream, f"{where}[{index}]")
        if stream in streams[:index]:
            raise MalformedRequestError(f"{where}[{index}]: {stream!r} is named twice")


def check_failures(failures: tuple[Failure, ...], where: str) -> None:
    for index, failure in enumerate(failures):
        check_id(failure.root, f"{where}[{index}].root")
        if failure.after_ms is not None and not 0 <= failure.after_ms <= MAX_RETRY_LATER_MS:
            raise MalformedRequestError(
                f"{where}[{index}].after_ms: expected 0 to {MAX_RETRY_LATER_MS}, got {failure.after_ms}"
            )


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who calls, and the how-many-eth call of theirs it is (from 1, without gaps).

    A client's call with a sequence already seen has no second effect and gets the first one's reply.
    """

    client: str
    sequence: int

    def check(self) -> None:
        check_name(self.client, "client")
        check_least(self.sequence, 1, "sequence")


@dataclass(frozen=True, slots=True)
class StreamCircuit:
    """A circuit breaker that holds a topology's stream while it is not closed.

    Streams of one topology that name it have it in common. It looks at the failures in the operator ``name``; one
    called "", or as the stream's source, at those in operators without one of their own. ``counts`` False: what becomes
    of this stream's records is not counted (those that it becomes are, in a stream of their own).
    """

    name: str
    limit: Limit
    counts: bool = True


@known_options
@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream's records are retried and how many may be in flight.

    ``max_attempts`` counts runs, the first included; None: a record is tried again without end. ``backoff_ms``
    lists the pause before attempt 2, 3, …; its last entry serves all later ones. ``jitter``
    (0 to 1) is the share of a pause that is drawn at random (deterministically, from the record's origin and attempt).
    ``circuits`` and ``replay`` are set by a topology for its streams (from ``max_failing``, and from ``replay`` of a
    source), and not stored: each run says them again.

    Raises `ConfigError` naming the option. A vertex asks for a ``timeout_ms`` of at least its ``timeout_buckets`` − 1.
    """

    timeout_ms: int = 30_000
    max_attempts: int | None = 5
    backoff_ms: tuple[int, ...] = BACKOFF_MS
    jitter: float = 0.1
    max_pending: int = 1_000_000
    circuits: tuple[StreamCircuit, ...] = ()
    replay: str = "store"

    def __post_init__(self) -> None:
        check_int(self.timeout_ms, "timeout_ms", least=1, most=LONGEST_MS)
        if self.max_attempts is not None:
            check_int(self.max_attempts, "max_attempts", least=1)
        if not isinstance(self.backoff_ms, tuple):
            raise ConfigError(
                f"backoff_ms: expected a tuple of pauses in milliseconds, got {shown(self.backoff_ms)}"
            )
        for place, pause in enumerate(self.backoff_ms):
            check_int(pause, f"backoff_ms[{place}]", least=0, most=LONGEST_MS)
        check_number(self.jitter, "jitter", least=0, most=1)
        check_int(self.max_pending, "max_pending", least=1, most=LONGEST_MS)
        check_instance(self.circuits, "circuits", tuple)
        for circuit in self.circuits:
            check_instance(circuit, "circuits", StreamCircuit)
        check_choice(self.replay, "replay", REPLAYS)


@dataclass(frozen=True, slots=True)
class EventIds:
    """The ids that values were folded from, for a vertex with ``tracker="exact"``; others take no note of them.

    ``values[i]`` is the XOR of ``ids[offsets[i]:offsets[i + 1]]``: ids uint64[m], offsets int32[n + 1], as
    Arrow lays lists out. ``owners``, int32[m], has for each id the position in ``operators`` of the operator
    that is to acknowledge it, or -1 where this event acknowledges the id itself.
    """

    ids: U64
    offsets: I32
    owners: I32
    operators: tuple[str, ...] = ()

    def take(self, which: npt.NDArray[np.int64]) -> EventIds:
        """Return the lists at the positions ``which``, in that order."""
        sizes = np.diff(self.offsets)[which]
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])
        places = np.repeat(self.offsets[which] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return EventIds(self.ids[places], offsets, self.owners[places], self.operators)


@dataclass(frozen=True, slots=True)
class Records:
    """Stored records as they came, with what the vertex knows of them. Arrays have one entry a row.

    ``first_failed_ms`` is the Unix time of each one's first failure, 0 where it has none; None where no row has any.
    ``edited``: the payload of all of them is not the one that ``key_hashes`` were made of.
    """

    payload: pa.RecordBatch
    roots: U64
    origins: U64
    attempts: I32  # 1 on the first run
    key_hashes: I32 | None = None
    first_failed_ms: U64 | None = None
    edited: bool = False


@dataclass(frozen=True, slots=True)
class RecordBatches(Reply):
    """Records, in several batches where schemas differ; ``held``: a circuit breaker may hold more."""

    batches: tuple[Records, ...]
    held: bool = False


def check_event_ids(ids: EventIds | None, values: U64, where: str) -> None:
    """Raise `MalformedRequestError` naming the field unless ``ids`` are what ``values`` were folded from."""
    if ids is None:
        return
    count = len(ids.ids)
    if ids.ids.dtype != np.uint64 or ids.ids.ndim != 1:
        raise MalformedRequestError(f"{where}.ids: expected a one-dimensional uint64 array")
    for name, array in (("offsets", ids.offsets), ("owners", ids.owners)):
        if array.dtype != np.int32 or array.ndim != 1:
            raise MalformedRequestError(f"{where}.{name}: expected a one-dimensional int32 array")
    if not ids.ids.all():
        raise MalformedRequestError(f"{where}.ids[{int(np.flatnonzero(ids.ids == 0)[0])}]: 0 is never an id")
    if len(ids.owners) != count:
        raise MalformedRequestError(
            f"{where}.owners: expected {count} items, one for each id, got {len(ids.owners)}"
        )
    if count and not -1 <= int(ids.owners.min()) <= int(ids.owners.max()) < len(ids.operators):
        raise MalformedRequestError(
            f"{where}.owners: expected -1 or positions in {where}.operators, which has {len(ids.operators)}"
        )
    offsets = ids.offsets
    if (
        len(offsets) != len(values) + 1
        or offsets[0] != 0
        or offsets[-1] != count
        or (offsets[1:] < offsets[:-1]).any()
    ):
        raise MalformedRequestError(
            f"{where}.offsets: expected {len(values) + 1} numbers rising from 0 to {count}, the number of ids"
        )
    wrong = np.flatnonzero(_folded(ids) != values)
    if len(wrong):
        raise MalformedRequestError(
            f"{where}: the XOR of list {int(wrong[0])} is not values[{int(wrong[0])}]; send the lists that "
            "the values were folded from"
        )


def check_values(roots: RowRoots, values: U64 | None, ids: EventIds | None, where: str) -> None:
    if values is not None:
        check_lengths(where, len(roots), values=values)
        check_event_ids(ids, values, f"{where}.ids")
    elif ids is not None:
        raise MalformedRequestError(f"{where}.ids: they need the values that were folded from them")


def plain_event_ids(ids: EventIds | None) -> list[Any] | None:
    if ids is None:
        return None
    return [ids.ids.tobytes(), ids.offsets.tobytes(), ids.owners.tobytes(), list(ids.operators)]


def stored_event_ids(plain: list[Any] | None) -> EventIds | None:
    """Return what `plain_event_ids` was given; arrays are read-only."""
    if plain is None:
        return None
    ids, offsets, owners, operators = plain
    return EventIds(
        np.frombuffer(ids, np.uint64),
        np.frombuffer(offsets, np.int32),
        np.frombuffer(owners, np.int32),
        tuple(operators),
    )


def _folded(ids: EventIds) -> U64:
    running = np.concatenate([np.zeros(1, np.uint64), np.bitwise_xor.accumulate(ids.ids)])
    folded: U64 = running[ids.offsets[1:]] ^ running[ids.offsets[:-1]]
    return folded
