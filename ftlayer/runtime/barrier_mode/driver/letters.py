"""A job's dead letters, as its driver carries them out: files, the vertex, and letters that come back.

The rules are `LetterOutbox` and `Readmission`; here their work is done by two threads, one for files and one for the
vertex. Nothing of it holds up a checkpoint, and nothing of it fails one: what cannot be done now is done later. All
public methods belong to the job's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import msgpack
import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.letters import ChainLetter, LetterKind, attempts_of, not_into_source, payload_of
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.dead_letters import LettersInMemory, StoredLetters
from ftlayer.checkpoint.storage.layout import last_name, parent, part
from ftlayer.common.clock import system_now
from ftlayer.common.printable import described
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    ConfigError,
    FTLayerError,
    MalformedRequestError,
    StaleOwnerError,
)
from ftlayer.functions.conversion import schema_text
from ftlayer.functions.failures import raise_signalled
from ftlayer.records.ipc import UNREADABLE, as_stream, read_one_batch
from ftlayer.records.keyhash import spark_hash
from ftlayer.records.partitioning import HashByKeyGroup, OutgoingRows, key_groups, subtasks_of
from ftlayer.runtime.barrier_mode.driver import outbox
from ftlayer.runtime.driver.rules.job_rules import JobContext
from ftlayer.runtime.protocol.messages import Readmit
from ftlayer.runtime.task.routes import key_schemas
from ftlayer.runtime.worker import Worker
from ftlayer.state.snapshots.serializer import unpack
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import Source
from ftlayer.transport.codec import plain_codec
from ftlayer.vertex import calls
from ftlayer.vertex.client.client import VertexClient

logger = logging.getLogger(__name__)


PAGE = 200
"""Letters that are asked for at once."""

_FILE, _VERTEX = b"f", b"\0"
"""What keys of letters begin with, by where they are, and places in the vertex to go on at: no file is called so."""


class LetterCalls:
    """What is asked of the places where letters are, for one thread; each raises what its place raises.

    With the first call of the vertex, and again behind each that failed, the job is claimed and its streams are opened:
    it may be away when the job starts, and be another one when it is back.
    """

    def __init__(self, places: LetterPlaces, job: str, run: str, check_owner: Callable[[], None]) -> None:
        """``check_owner`` raises if another driver has taken the job over: then nothing is claimed, or changed."""
        self._client = places.vertex
        self._files = places.files if isinstance(places.files, StoredLetters) else None
        self._job, self._run = job, run
        self._check_owner = check_owner
        self._is_claimed = False
        self._open: set[str] = set()
        self._said: set[str] = set()
        self._counted = frozenset(places.orders)
        self.ordered = frozenset(places.orders.values())
        """Files with orders, which go to the vertex behind that."""

    def begin(self, chains: Sequence[str]) -> None:
        """Open the streams of these chains, so that they are shown before anything has failed."""
        with self._claimed():
            for chain in chains:
                self._opened(chain)

    def keep(self, file: str, parts: Sequence[Sequence[ChainLetter]]) -> None:
        with self._claimed():
            for number, letters in enumerate(parts):
                if letters:
                    stream = self._opened(letters[0].chain)
                    kept = tuple(map(kept_letter, letters))
                    self._call(calls.KeepLetters(stream, file, number, kept, self._run))

    def forget(self, file: str) -> None:
        with self._claimed():
            self._call(calls.ForgetLetters(self._job, file, self._run))

    def requeued(self, after: bytes) -> tuple[list[tuple[bytes, ChainLetter]], bytes]:
        """Return a page of requeued letters with their keys, and where the next one begins.

        First those of orders beside the files, then the vertex's. Letters that make no sense are dead again then.
        """
        if self._files is not None and not after.startswith(_VERTEX):
            if not after and self._client is not None:
                there = self._files.order_names()
                self.ordered = frozenset(there[path] for path in self._counted & set(there))
            for order in self._files.orders(after.decode(), self._damaged):
                # With a vertex none counts that came later: its letters may be there already.
                if self._client is None or order.path in self._counted:
                    return [(_FILE + each.letter, each) for each in order.letters], order.path.encode()
        return ([], b"") if self._client is None else self._in_vertex(after.removeprefix(_VERTEX))

    def _in_vertex(self, after: bytes) -> tuple[list[tuple[bytes, ChainLetter]], bytes]:
        with self._claimed():
            page = self._call(calls.GetRequeued(self._job, after, PAGE, self._run))
        found = []
        for each in page.letters:
            try:
                found.append((_VERTEX + each.key, letter_of(each)))
            except CheckpointDamagedError as error:
                self.give_back([_VERTEX + each.key], str(error))
        return found, page.more and _VERTEX + page.more

    def readmitted(self, keys: Sequence[bytes]) -> None:
        if ours := self._in_files(keys):
            self._own_files().readmitted(ours, self._damaged)
        for some in _keys_in_vertex(keys):
            with self._claimed():
                self._call(calls.Readmitted(self._job, some, self._run))

    def give_back(self, keys: Sequence[bytes], reason: str) -> None:
        if ours := self._in_files(keys):
            self._own_files().give_back(ours, reason, system_now().wall_ms, self._damaged)
        for some in _keys_in_vertex(keys):
            with self._claimed():
                self._call(calls.ReturnLetters(self._job, some, reason, self._run))

    def _own_files(self) -> StoredLetters:
        self._check_owner()
        assert self._files is not None
        return self._files

    def _in_files(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        return frozenset(key.removeprefix(_FILE) for key in keys if key.startswith(_FILE))

    def _damaged(self, error: CheckpointError) -> None:
        """A file is left alone that is damaged, which is said once."""
        if not isinstance(error, CheckpointDamagedError):
            raise error
        if str(error) not in self._said:
            self._said.add(str(error))
            logger.error("dead letters are left where they are: %s", error)

    def _call(self, call: calls.AnsweredBy[calls.R]) -> calls.R:
        assert self._client is not None
        return self._client.call(call)

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        try:
            if not self._is_claimed:
                # Else the run that is fenced off here would be the one that goes on.
                self._check_owner()
                self._call(calls.ClaimJob(self._job, self._run))
                self._is_claimed = True
            yield
        except FTLayerError as error:
            self._open.clear()
            self._is_claimed = self._is_claimed and not isinstance(error, StaleOwnerError)
            raise

    def _opened(self, chain: str) -> str:
        stream = f"{self._job}/{chain}"
        if stream not in self._open:
            self._call(calls.OpenStream(stream, owner=self._run))
            self._open.add(stream)
        return stream


# ---------------------------------------------------------------- letters


def kept_letter(letter: ChainLetter) -> calls.KeptLetter:
    """Return a letter as the vertex keeps it. Raises `CheckpointDamagedError` for a payload that is no row."""
    facts: bytes = msgpack.packb(plain_codec(ChainLetter).pack(replace(letter, payload=b"", attempts=())))
    return calls.KeptLetter(letter.letter, facts, payload_of(letter), attempts_of(letter))


def letter_of(requeued: calls.RequeuedLetter) -> ChainLetter:
    """Return a letter that comes back, with the payload that people may have given it.

    An edited one has lost its key: it is the payload's. Raises `CheckpointDamagedError` for facts of no letter.
    """
    try:
        letter: ChainLetter = plain_codec(ChainLetter).unpack(msgpack.unpackb(requeued.facts), "letter")
    except (MalformedRequestError, ValueError, msgpack.UnpackException) as error:
        raise CheckpointDamagedError(
            f"a requeued letter of {requeued.stream!r} makes no sense: {described(error)}; is it of a newer ftlayer?"
        ) from error
    is_timer = letter.kind is LetterKind.TIMER
    payload = b"" if is_timer else as_stream(requeued.payload).to_pybytes()
    key = b"" if requeued.edited and not is_timer else letter.key
    return replace(letter, payload=payload, attempts=requeued.attempts, key=key)


def _keys_in_vertex(keys: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    """Return those that are the vertex's, cut to what one call takes."""
    mine = [key.removeprefix(_VERTEX) for key in keys if key.startswith(_VERTEX)]
    return [tuple(mine[at : at + calls.MAX_KEYS]) for at in range(0, len(mine), calls.MAX_KEYS)]


ASK_EVERY_MS = 2_000
ORDERS_EVERY_MS = 10_000
"""Without a vertex: orders are looked for in a listing of files, which may be far away."""
MOST_PAUSE_MS = 60_000


@dataclass(frozen=True, slots=True)
class AskRequeued:
    """Ask the vertex for a page of requeued letters; answered by `Readmission.offered`, or `failed`."""

    after: bytes


@dataclass(frozen=True, slots=True)
class ConfirmLetters:
    """Have the vertex delete these letters, by its keys: checkpoints hold them. Answered by `done`, or `failed`."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReturnToDead:
    """Have the vertex make these letters dead again, by its keys. Answered by `done`, or `failed`."""

    keys: tuple[bytes, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SendLetters:
    slot: int
    uid: str
    subtask: int
    letters: tuple[ChainLetter, ...]


ReadmissionWork: TypeAlias = AskRequeued | ConfirmLetters | ReturnToDead


@dataclass(frozen=True, slots=True)
class Target:
    slot: int
    uid: str
    subtask: int


@dataclass(frozen=True, slots=True)
class Offered:
    """A letter that the vertex offers; ``target`` is where it goes, or why it cannot go back."""

    key: bytes
    letter: ChainLetter
    target: Target | str


class Readmission:
    """Requeued letters on their way from the vertex, or from orders beside files, back into the job, each exactly once.

    Either offers what was requeued, page by page, until checkpoints hold it. A letter that none holds is sent to its
    subtask, whose next checkpoint names it; what is lost with the subtask before that is offered, and sent, again.
    Who offers a letter hears of it once *every* checkpoint holds it that the job may be restored from: going back to an
    older one loses none. Until then checkpoints go on naming it (`to_publish`), though the subtask has forgotten it.

    What it returns of `work` is to be answered, one after the other. No I/O, no threads, no clock.
    """

    def __init__(self, slots: Iterable[int], every_ms: int = ASK_EVERY_MS) -> None:
        """``slots`` are all of the job's; none of them runs its tasks yet. It is asked for letters ``every_ms``."""
        self._every_ms = every_ms
        self._held: dict[int, frozenset[bytes]] = {}
        self._latest = 0
        self._sent: dict[bytes, Target] = {}
        self._down = set(slots)
        self._ended = False
        self._after = b""
        self._ask_at_ms = 0
        self._failures = 0
        self._to_confirm: list[bytes] = []
        self._to_return: dict[str, list[bytes]] = {}
        # Held before this walk through all that is offered began, and not offered in it: the vertex has them no more.
        self._unseen: set[bytes] = set()
        self._doing: ReadmissionWork | None = None

    def to_publish(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint as it is to be published: it names what earlier ones hold and the vertex still has."""
        own = _named_by(checkpoint)
        return replace(checkpoint, readmitted=tuple(sorted(self._held.get(self._latest, frozenset()) - own)))

    def stands(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete, or was restored; it is as `to_publish` gave it."""
        self._latest = checkpoint.checkpoint
        held = self._held[checkpoint.checkpoint] = _named_by(checkpoint)
        self._sent = {letter: target for letter, target in self._sent.items() if letter not in held}

    def retained(self, checkpoints: Iterable[Checkpoint]) -> None:
        """The job may be restored from these, and from the one that `stands` was told of last."""
        known = {each.checkpoint: each for each in checkpoints}
        kept = {
            number: held for number, held in self._held.items() if number in known or number == self._latest
        }
        added = {number: _named_by(each) for number, each in known.items() if number not in kept}
        self._held = kept | added

    def down(self, slots: Collection[int]) -> None:
        """Tasks in these slots are gone: what was sent to them is, too, unless a checkpoint holds it."""
        self._down.update(slots)
        self._sent = {letter: target for letter, target in self._sent.items() if target.slot not in slots}

    def up(self, slots: Collection[int]) -> None:
        self._down.difference_update(slots)
        if not self._failures:
            self._ask_at_ms = 0

    def ending(self) -> None:
        """The job comes to its end: nothing is sent any more. What checkpoints hold is still confirmed."""
        self._ended = True
        self._ask_at_ms = 0

    def work(self, now_ms: int) -> list[ReadmissionWork]:
        """Return what is to be asked of the vertex now; one thing at a time."""
        if self._doing is not None or now_ms < self._ask_at_ms:
            return []
        if self._to_confirm:
            self._doing = ConfirmLetters(tuple(self._to_confirm))
        elif self._to_return:
            reason, keys = next(iter(self._to_return.items()))
            self._doing = ReturnToDead(tuple(keys), reason)
        else:
            if not self._after:
                self._unseen = set(self._held.get(self._latest, ()))
            self._doing = AskRequeued(self._after)
        return [self._doing]

    def offered(self, letters: Sequence[Offered], more: bytes, now_ms: int) -> list[SendLetters]:
        """The answer to `AskRequeued`: ``more`` goes on, b"" at the end. Returns what is to be sent."""
        if not isinstance(self._doing, AskRequeued):
            raise ValueError("nothing was asked")
        self._doing, self._after, self._failures = None, more, 0
        self._unseen -= {each.letter.letter for each in letters}
        groups: dict[Target, list[ChainLetter]] = {}
        for each in letters:
            name = each.letter.letter
            if name in self._held.get(self._latest, ()):
                if all(name in held for held in self._held.values()):
                    self._to_confirm.append(each.key)
            elif isinstance(each.target, str):
                self._to_return.setdefault(each.target, []).append(each.key)
            elif name not in self._sent and each.target.slot not in self._down and not self._ended:
                self._sent[name] = each.target
                groups.setdefault(each.target, []).append(each.letter)
        if not more:
            if gone := frozenset(self._unseen):
                self._held = {number: held - gone for number, held in self._held.items()}
            if not (self._to_confirm or self._to_return):
                self._ask_at_ms = now_ms + self._every_ms
        return [
            SendLetters(target.slot, target.uid, target.subtask, tuple(some))
            for target, some in groups.items()
        ]

    def done(self) -> None:
        match self._doing:
            case ConfirmLetters():
                self._to_confirm = []
            case ReturnToDead(_, reason):
                del self._to_return[reason]
            case _:
                raise ValueError(f"{self._doing} has another answer")
        self._doing, self._failures = None, 0

    def failed(self, now_ms: int) -> None:
        """What was asked for is not done, or nobody knows: it is asked for again after a pause."""
        if self._doing is None:
            raise ValueError("nothing was asked")
        if isinstance(self._doing, AskRequeued):
            # A walk is of one vertex: what was seen before may be back.
            self._after = b""
        self._doing = None
        self._ask_at_ms = now_ms + min(MOST_PAUSE_MS, self._every_ms << min(self._failures, 10))
        self._failures += 1

    @property
    def on_their_way(self) -> int:
        """Letters that were sent, and that no checkpoint holds."""
        return len(self._sent)


def _named_by(checkpoint: Checkpoint) -> frozenset[bytes]:
    own = (letter for part in checkpoint.subtasks for letter in part.readmitted)
    return frozenset((*own, *checkpoint.readmitted))


def target_of(letter: ChainLetter, graph: JobGraph) -> Target | str:
    """Return the subtask that is to have a letter: by its key where the chain's input has one, else the one it was in.

    A letter of an operator that was a chain's head, and has others before it now, goes to the chain that it is in. A
    text says why it cannot go back: no such operator, another schema, no failure policy.
    """
    vertex = next((each for each in graph.vertices if letter.chain in _uids(each)), None)
    if vertex is None:
        there = ", ".join(repr(each.uid) for each in graph.vertices if each.failures is not None) or "none"
        return (
            f"the job has no operator {letter.chain!r} (any more); those with a failure policy are: {there}"
        )
    if isinstance(vertex.operators[0], Source):
        return not_into_source(letter.chain)
    if vertex.failures is None:
        return f"{letter.chain!r} has no failure policy (any more), so a record that fails again would fail the job"
    if vertex.uid != letter.chain:
        return _inside(letter, graph, vertex)
    edge = next((each for each in graph.edges_into(vertex.uid) if each.input == letter.input), None)
    if edge is None:
        return f"{letter.chain!r} has no input {letter.input} (any more)"
    try:
        is_timer = letter.kind is LetterKind.TIMER
        subtask = _of_timer(letter, graph, vertex, edge) if is_timer else _of_record(letter, vertex, edge)
    except (FTLayerError, *UNREADABLE) as error:
        return f"where it belongs in {letter.chain!r} is not known: {error}"
    return (
        subtask
        if isinstance(subtask, str)
        else Target(graph.slot_of(vertex.uid, subtask), vertex.uid, subtask)
    )


def _inside(letter: ChainLetter, graph: JobGraph, vertex: JobVertex) -> Target | str:
    """`target_of` where others stand before its operator. Those have no keys, and one input."""
    if letter.kind is LetterKind.TIMER:
        return f"{letter.chain!r} has no key (any more), and its timers none of one"
    if letter.input:
        return f"{letter.chain!r} has no input {letter.input} (any more)"
    before = vertex.operators[_uids(vertex).index(letter.chain) - 1]
    try:
        problem = _other_columns(letter, read_one_batch(letter.payload).schema, before.schema)
    except (FTLayerError, *UNREADABLE) as error:
        problem = f"the record for {letter.chain!r} cannot be read: {error}"
    subtask = letter.subtask % vertex.parallelism
    return problem or Target(graph.slot_of(vertex.uid, subtask), vertex.uid, subtask)


def _of_record(letter: ChainLetter, vertex: JobVertex, edge: JobEdge) -> int | str:
    payload = read_one_batch(letter.payload)
    problem = _other_columns(letter, payload.schema, edge.schema)
    if problem:
        return problem
    if isinstance(edge.partitioner, HashByKeyGroup):
        rows = OutgoingRows(payload, np.zeros(1, np.uint64))
        return int(edge.partitioner.select(rows, vertex.parallelism)[0])
    return letter.subtask % vertex.parallelism


def _of_timer(letter: ChainLetter, graph: JobGraph, vertex: JobVertex, edge: JobEdge) -> int | str:
    if not isinstance(edge.partitioner, HashByKeyGroup):
        return f"{letter.chain!r} has no key (any more), and its timers none of one"
    inputs = {each.input: each.schema for each in graph.edges_into(vertex.uid)}
    schema = key_schemas(vertex.operators, [inputs[number] for number in sorted(inputs)]).get(vertex.uid)
    if schema is None:
        return f"{letter.chain!r} has no timers (any more)"
    key = unpack(letter.key)
    values = key if isinstance(key, tuple) and len(schema) > 1 else (key,)
    columns = [pa.array([value], field.type) for value, field in zip(values, schema, strict=True)]
    groups = key_groups(spark_hash(columns), graph.max_parallelism)
    return int(subtasks_of(groups, vertex.parallelism, graph.max_parallelism)[0])


def _other_columns(letter: ChainLetter, has: pa.Schema, takes: pa.Schema) -> str:
    """Say why a record is not one that its operator takes; "" if it is."""
    if has.equals(takes):
        return ""
    return f"{letter.chain!r} takes other records now: {schema_text(takes)}; this one has {schema_text(has)}"


def _uids(vertex: JobVertex) -> list[str]:
    return [operator.uid for operator in vertex.operators]


WRITE_WAIT_S = 30.0
"""How long the end of a job waits for letters to be written. They are in its last checkpoint alone before that."""

SEND_WAIT_S = 5.0
"""How long it waits for them to be sent then: what is left is done by the next driver, where there are files."""

T = TypeVar("T")


@dataclass(frozen=True)
class LetterPlaces:
    """Where a job's dead letters go: files, which ``found`` tells of, and the vertex, None where there is none.

    ``orders`` were beside the files when the driver began: paths, and the files' names.
    """

    files: StoredLetters | LettersInMemory
    found: tuple[outbox.OutboxFile, ...] = ()
    vertex: VertexClient | None = None
    orders: Mapping[str, str] = field(default_factory=dict)


def open_letters(config: CheckpointConfig, job: str, key: bytes, checkpoints: Sequence[str]) -> LetterPlaces:
    """Return a job's files of dead letters, with what is there; ``checkpoints`` are the locations of its checkpoints.

    Raises `CheckpointStorageError` for a directory that cannot be read.
    """
    if config.directory is None:
        return LetterPlaces(LettersInMemory())
    files = StoredLetters(config.directory, job, key)
    runs = {last_name(parent(location)) for location in checkpoints}
    found = tuple(
        outbox.OutboxFile(file.name, file.letters, file.lasting or part(file.name.rpartition("-")[0]) in runs)
        for file in files.found()
    )
    return LetterPlaces(files, found, orders=files.order_names())


def check_place(graph: JobGraph, config: CheckpointConfig, *, has_vertex: bool) -> None:
    """Raise `ConfigError` for a job whose records may die, and whose letters would be gone with its driver.

    Letters that are records of the topology (`DataStream.dead_letters`) need no place.
    """
    dying = [
        vertex.uid
        for vertex in graph.vertices
        if vertex.failures is not None and not graph.sends_letters(vertex.uid)
    ]
    if dying and config.directory is None and not has_vertex:
        raise ConfigError(
            f"failures, directory: a record that {dying[0]!r} gives up becomes a dead letter, and there is no place "
            "for it: without a directory checkpoints and letters are in the driver's memory. Give CheckpointConfig a "
            "directory, or the environment a vertex: board=FTLayer.connect(…); or let the letters of each chain go to "
            "dead_letters().sink(…), and say on_failure='fail' for its sinks"
        )


class JobLetters:
    def __init__(self, places: LetterPlaces, job: JobContext, check_owner: Callable[[], None]) -> None:
        """``check_owner`` raises `StaleOwnerError` once another driver has taken the job over."""
        self._graph, self._later, self._tell = job.graph, job.later, job.tell
        self._check_owner = check_owner
        self._files = places.files
        self._has_vertex = places.vertex is not None
        self._calls = LetterCalls(places, job.graph.name, job.run, check_owner)
        self._chains = tuple(vertex.uid for vertex in job.graph.vertices if vertex.failures is not None)
        self._outbox = outbox.LetterOutbox(
            job.run, has_vertex=self._has_vertex, files_stay=not isinstance(self._files, LettersInMemory)
        )
        self._outbox.found(places.found)
        self._outbox.held_back = self._calls.ordered
        self._slots = range(job.graph.slots)
        self._readmission = Readmission(self._slots, ASK_EVERY_MS if self._has_vertex else ORDERS_EVERY_MS)
        self._storage = Worker("letters", _failed)
        self._vertex = Worker("letters-vertex", _failed)
        self._under_way = 0
        self._is_heard = threading.Event()
        self._begun = self._closed = self._is_taken_over = False
        self._said_away = False

    @property
    def unsent(self) -> int:
        """Letters that wait to be sent to the vertex, or to be written where there is none. Any thread."""
        return self._outbox.unsent

    def to_publish(self, checkpoint: Checkpoint) -> Checkpoint:
        return self._readmission.to_publish(self._outbox.to_publish(checkpoint))

    def stands(self, checkpoint: Checkpoint, retained: Collection[Checkpoint]) -> None:
        self._outbox.stands(checkpoint)
        self._readmission.stands(checkpoint)
        self.retained(retained)

    def retained(self, checkpoints: Collection[Checkpoint]) -> None:
        self._outbox.retained(checkpoints)
        self._readmission.retained(checkpoints)
        self.tick()

    def down(self, slots: Collection[int]) -> None:
        self._readmission.down(slots)

    def running(self) -> None:
        self._readmission.up(self._slots)

    def ending(self) -> None:
        self._readmission.ending()

    def tick(self) -> None:
        if self._closed or self._is_taken_over:
            return
        now_ms = system_now().mono_ms
        if self._chains:
            if self._has_vertex and not self._begun:
                self._begun = True
                self._do_in_vertex(lambda places: places.begin(self._chains), lambda _: None, lambda _: None)
            for asked in self._readmission.work(now_ms):
                self._ask(asked)
        for work in self._outbox.work(now_ms):
            self._do(work)

    def close(self, take_events: Callable[[], None], close_by_s: float | None) -> None:
        """The job is over: go on for a while with what is to be done, and end the threads. Behind `write_all`.

        ``take_events`` calls what `JobContext.later` was given meanwhile.
        """
        self.ending()
        wait_s = WRITE_WAIT_S if isinstance(self._files, LettersInMemory) else SEND_WAIT_S
        self._go_on(lambda: not self._under_way, take_events, wait_s, close_by_s)
        self._closed = True
        if self.unsent and self._has_vertex:
            self._say_what_is_unsent()
        self._storage.stop()
        self._vertex.stop()

    def write_all(self, take_events: Callable[[], None], close_by_s: float | None) -> bool:
        """Wait until all letters of its checkpoints, which have to stay until then, are in files; whether they are."""
        self.ending()

        def are_written() -> bool:
            # Another driver has what this one has left.
            return self._is_taken_over or not self._outbox.unwritten

        self._go_on(are_written, take_events, WRITE_WAIT_S, close_by_s)
        return are_written()

    def _go_on(
        self,
        is_enough: Callable[[], bool],
        take_events: Callable[[], None],
        wait_s: float,
        close_by_s: float | None,
    ) -> None:
        until = time.monotonic() + wait_s
        if close_by_s is not None:
            until = min(until, close_by_s)
        self.tick()
        while not is_enough() and (left_s := until - time.monotonic()) > 0:
            # A failed letter is tried again behind a pause, which ends without a message.
            self._is_heard.wait(min(left_s, outbox.FIRST_PAUSE_MS / 1_000))
            self._is_heard.clear()
            take_events()
            self.tick()

    def _say_what_is_unsent(self) -> None:
        if isinstance(self._files, LettersInMemory):
            logger.error(
                "%r: %d of its dead letters could not be sent to the vertex, and are lost with its driver's memory; "
                "with CheckpointConfig(directory=…) they would be in files",
                self._graph.name,
                self.unsent,
            )
        else:
            logger.warning(
                "%r: %d of its dead letters have not been sent to the vertex; they are in files beside its "
                "checkpoints, and its next start sends them",
                self._graph.name,
                self.unsent,
            )

    def _do(self, work: outbox.OutboxWork) -> None:
        def done(_: object) -> None:
            self._outbox.done(work)

        def failed(error: FTLayerError) -> None:
            damaged = isinstance(error, CheckpointDamagedError)
            if damaged:
                logger.error("dead letters are left where they are: %s", error)
            self._outbox.failed(work, system_now().mono_ms, damaged=damaged)

        match work:
            case outbox.WriteFile(batch):
                self._do_in_files(lambda: self._files.write(batch), done, failed)
            case outbox.EmptyFile(name):
                self._do_in_files(lambda: self._files.empty(name), done, failed)
            case outbox.RemoveFile(name):
                self._do_in_files(lambda: self._files.remove(name), done, failed)
            case outbox.SendFile(name):
                self._do_in_vertex(lambda places: places.keep(name, self._files.read(name)), done, failed)
            case outbox.ForgetBatch(name):
                self._do_in_vertex(lambda places: places.forget(name), done, failed)

    def _ask(self, work: ReadmissionWork) -> None:
        def done(_: object) -> None:
            self._readmission.done()

        def failed(_: FTLayerError) -> None:
            self._readmission.failed(system_now().mono_ms)

        match work:
            case AskRequeued(after):
                self._do_in_vertex(lambda places: self._offers(places, after), self._take_offers, failed)
            case ConfirmLetters(keys):
                self._do_in_vertex(lambda places: places.readmitted(keys), done, failed)
            case ReturnToDead(keys, reason):
                self._do_in_vertex(lambda places: places.give_back(keys, reason), done, failed)

    def _offers(self, places: LetterCalls, after: bytes) -> tuple[list[Offered], bytes]:
        letters, more = places.requeued(after)
        return [Offered(key, letter, target_of(letter, self._graph)) for key, letter in letters], more

    def _take_offers(self, offers: tuple[list[Offered], bytes]) -> None:
        letters, more = offers
        self._outbox.held_back = self._calls.ordered
        for sent in self._readmission.offered(letters, more, system_now().mono_ms):
            self._tell(sent.slot, Readmit(sent.uid, sent.subtask, sent.letters))

    def _do_in_files(
        self, work: Callable[[], T], done: Callable[[T], None], failed: Callable[[FTLayerError], None]
    ) -> None:
        def guarded() -> T:
            self._check_owner()
            return work()

        def not_done(error: FTLayerError) -> None:
            self._is_taken_over = self._is_taken_over or isinstance(error, StaleOwnerError)
            failed(error)

        self._run(self._storage, guarded, done, not_done)

    def _do_in_vertex(
        self,
        work: Callable[[LetterCalls], T],
        done: Callable[[T], None],
        failed: Callable[[FTLayerError], None],
    ) -> None:
        def away(error: FTLayerError) -> None:
            self._is_taken_over = self._is_taken_over or (
                isinstance(error, StaleOwnerError) and not self._has_vertex
            )
            if not self._said_away and not self._is_taken_over:
                self._said_away = True
                place = "the vertex" if self._has_vertex else "the files"
                logger.warning("dead letters wait for %s of %r: %s", place, self._graph.name, error)
            failed(error)

        def there(answer: T) -> None:
            self._said_away = False
            done(answer)

        self._run(self._vertex, lambda: work(self._calls), there, away)

    def _run(
        self,
        worker: Worker,
        work: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[FTLayerError], None],
    ) -> None:
        """What comes of it is heard in the job's thread."""

        def over(hear: Callable[[], None]) -> None:
            def heard() -> None:
                self._under_way -= 1
                hear()
                self.tick()

            self._later(heard)
            self._is_heard.set()

        def run() -> None:
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the rules wait for an answer
                raise_signalled(error)
                said = _said(error)
                over(lambda: failed(said))
            else:
                over(lambda: done(answer))

        self._under_way += 1
        worker.do(run)


def _said(error: BaseException) -> FTLayerError:
    if isinstance(error, FTLayerError):
        return error
    logger.error("dead letters failed in a way they never should", exc_info=error)
    return CheckpointError(described(error))


def _failed(error: BaseException) -> None:
    logger.error("dead letters failed in a way they never should", exc_info=error)
