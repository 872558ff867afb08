"""The files of dead letters, one for each checkpoint that was the first to hold some: where they are without a vertex.

```
<directory>/dead-letters/<job>/<run>-<n>.arrow              letters; emptied, not removed, once they are elsewhere
<directory>/dead-letters/<job>/<run>-<n>.<unique>.purged    names of letters that are gone
<directory>/dead-letters/<job>/<run>-<n>.<unique>.requeued  letters that are to go back into the job, as they go
<directory>/dead-letters/<job>/<run>-<n>.<unique>.returned  letters that could not, as they are since
```

An emptied file says that the letters of its checkpoint were dealt with, so it is never written again. What becomes of
letters is in files of their own: tools never write a letters' file again that the driver may have emptied meanwhile.

A letter that is *ordered*, which means in a file of requeued ones, is not dead any more. The job's driver takes it out
once checkpoints hold it, and the order last: each step may be done again, and the letter is never dead in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from hmac import compare_digest
from urllib.parse import unquote

import pyarrow as pa

from ftlayer import __version__
from ftlayer.checkpoint.custom_storage import FileStatus
from ftlayer.checkpoint.letters import LETTER_BYTES, ChainLetter, LetterBatch, LetterKind, with_attempt
from ftlayer.checkpoint.storage import layout
from ftlayer.checkpoint.storage.files import open_files, raised
from ftlayer.checkpoint.storage.keys import DIGEST_BYTES, Signer, key_of
from ftlayer.checkpoint.storage.layout import part
from ftlayer.common.printable import shown_url
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError, CheckpointError, IncompatibleCheckpointError, other_format
from ftlayer.vertex.calls import Attempt

logger = logging.getLogger(__name__)


# A file is a stream of Arrow batches that any reader of Arrow can read, with a checksum behind its end.
#
# A batch is a *part*: letters of one chain, up to `PART_LETTERS` or `PART_BYTES` (a single letter may be larger), cut
# the same way whenever the file is written. The schema's metadata says how many letters there are, so that a listing
# reads the first bytes alone.

PART_LETTERS = 1_000
PART_BYTES = 4 * MIB
HEAD_BYTES = 16 << 10
"""The schema is within the first so many bytes."""

_VERSION = 1
_VERSION_KEY, _LETTERS_KEY, _LASTING_KEY = b"ftlayer.letters", b"ftlayer.count", b"ftlayer.lasting"
_WRITER_KEY = b"ftlayer.version"
_TEXT_BYTES = 200
# What a letter takes beside its payload and its tracebacks, about.

ATTEMPT_TYPE = pa.struct(
    [
        ("number", pa.int32()),
        ("at_ms", pa.int64()),
        ("reason", pa.string()),
        ("operator", pa.string()),
        ("place", pa.string()),
        ("traceback", pa.string()),
        ("requeued_ms", pa.int64()),
        ("requeued_by", pa.string()),
    ]
)
LETTERS_SCHEMA = pa.schema(
    [
        pa.field("letter", pa.binary(), nullable=False),
        pa.field("checkpoint", pa.int64(), nullable=False),
        pa.field("chain", pa.string(), nullable=False),
        pa.field("subtask", pa.int32(), nullable=False),
        pa.field("input", pa.int32(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("operator", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("event_time_ms", pa.int64()),
        pa.field("attempts", pa.list_(ATTEMPT_TYPE), nullable=False),
        pa.field("first_failed_ms", pa.int64(), nullable=False),
        pa.field("died_ms", pa.int64(), nullable=False),
        pa.field("is_event_timer", pa.bool_(), nullable=False),
    ]
)
"""A letter is a row; ``payload`` is an IPC stream with one row."""


@dataclass(frozen=True, slots=True)
class LetterFile:
    """A file that is there: how many letters were written and not taken out (purged ones count)."""

    name: str
    letters: int
    lasting: bool


def encode_letters(batch: LetterBatch, signer: Signer) -> bytes:
    """Return the file of a batch; one without letters is an emptied file."""
    metadata = {
        _VERSION_KEY: str(_VERSION).encode(),
        _WRITER_KEY: __version__.encode(),
        _LETTERS_KEY: str(len(batch.letters)).encode(),
        _LASTING_KEY: b"1" if batch.lasting else b"0",
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, LETTERS_SCHEMA.with_metadata(metadata)) as writer:
        for letters in parts_of(batch.letters):
            rows = [asdict(letter) for letter in letters]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=LETTERS_SCHEMA))
    data: bytes = sink.getvalue().to_pybytes()
    return data + signer.letters(batch.name, data)


def decode_letters(
    data: bytes, name: str, location: str, signer: Signer
) -> tuple[LetterFile, list[pa.RecordBatch]]:
    """Return what a file's schema says of it, and its parts; ``location`` is for messages.

    Raises `CheckpointDamagedError` for anything but what `encode_letters` with the same key gave for the same name,
    and `IncompatibleCheckpointError` for a format of a newer ftlayer.
    """
    body, mac = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if not compare_digest(mac, signer.letters(name, body)):
        raise CheckpointDamagedError(
            f"{shown_url(location)}: these dead letters were cut off or changed after they were written, or are signed "
            "with another key (see CheckpointConfig.key): give that key, or a copy of the file; remove it to go on "
            "without"
        )
    with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
        return _head_of(reader.schema, name, location), list(reader)


def read_head(data: bytes, name: str, location: str) -> LetterFile:
    """Return what the first `HEAD_BYTES` of a file say; they are not checked. Errors as `decode_letters`."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise _no_letters(location, str(error)) from error
    return _head_of(schema, name, location)


def letters_of(part: pa.RecordBatch) -> list[ChainLetter]:
    letters = []
    for row in part.to_pylist():
        attempts = tuple(Attempt(**attempt) for attempt in row["attempts"])
        letters.append(ChainLetter(**{**row, "kind": LetterKind(row["kind"]), "attempts": attempts}))
    return letters


def parts_of(letters: tuple[ChainLetter, ...]) -> Iterator[list[ChainLetter]]:
    """Cut letters into parts; they come chain by chain, and in their order within a chain."""
    by_chain: dict[str, list[ChainLetter]] = {}
    for letter in letters:
        by_chain.setdefault(letter.chain, []).append(letter)
    for chain in sorted(by_chain):
        part: list[ChainLetter] = []
        size = 0
        for letter in by_chain[chain]:
            own = _size(letter)
            if part and (len(part) >= PART_LETTERS or size + own > PART_BYTES):
                yield part
                part, size = [], 0
            part.append(letter)
            size += own
        yield part


def _size(letter: ChainLetter) -> int:
    texts = sum(len(attempt.traceback) + len(attempt.reason) for attempt in letter.attempts)
    return len(letter.payload) + len(letter.key) + texts + _TEXT_BYTES


def _head_of(schema: pa.Schema, name: str, location: str) -> LetterFile:
    said = schema.metadata or {}
    try:
        version = int(said[_VERSION_KEY])
        if version != _VERSION:
            writer = said.get(_WRITER_KEY)
            raise IncompatibleCheckpointError(other_format(location, version, _VERSION, writer))
        return LetterFile(name, int(said[_LETTERS_KEY]), said[_LASTING_KEY] == b"1")
    except (KeyError, ValueError) as error:
        raise _no_letters(location, repr(error)) from error


def _no_letters(location: str, error: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"{shown_url(location)}: this is no file of dead letters: {error}")


_LETTERS, _PURGED, _REQUEUED, _RETURNED = ".arrow", ".purged", ".requeued", ".returned"


@dataclass(frozen=True, slots=True)
class LetterOrder:
    """Letters of the file ``name`` that are to go back into the job, as they go; ``path`` is the order's own file."""

    path: str
    name: str
    letters: tuple[ChainLetter, ...]


class StoredLetters:
    """The files of one job, by the names of their batches. Errors are `CheckpointStorageError`."""

    def __init__(self, directory: str, job: str, key: bytes) -> None:
        self._files = open_files(layout.letters_directory(directory, job))
        self._signer = Signer(key)
        self.directory, self.job = directory, job

    def found(self) -> list[LetterFile]:
        """Return all there are; one that makes no sense is logged, and left out."""
        found = []
        for entry in self._files.walk():
            if entry.path.endswith(_LETTERS) and not entry.path.startswith("."):
                name = unquote(layout.last_name(entry.path).removesuffix(_LETTERS))
                try:
                    head = self._files.read(entry.path, 0, HEAD_BYTES)
                    found.append(read_head(head, name, self._at(entry.path)))
                except CheckpointError as error:
                    if self._files.size(entry.path) is not None:
                        logger.error("%s; it is left alone", error)
        return sorted(found, key=lambda file: file.name)

    def write(self, batch: LetterBatch) -> bool:
        """Write a file unless it is there, emptied or not; returns whether it was not."""
        return self._files.publish_new(_path(batch.name), encode_letters(batch, self._signer))

    def read(self, name: str) -> list[list[ChainLetter]]:
        """Return the parts of a file without what is purged: always as many, empty ones too.

        Raises `CheckpointDamagedError`.
        """
        purged, returned = self._purged(name), self._returned(name)
        _, parts = self._decoded(_path(name), name)
        return [
            [returned.get(each.letter, each) for each in letters_of(part) if each.letter not in purged]
            for part in parts
        ]

    def empty(self, name: str) -> None:
        self._empty(name)
        for path in self._beside(name, _REQUEUED):
            # It came while they were on their way: in the vertex they are dead.
            logger.warning("%s: its letters are in the vertex: requeue them there", shown_url(self._at(path)))
            self._files.delete(path)

    def remove(self, name: str) -> None:
        self._files.delete(_path(name))
        for path in self._beside(name, _PURGED, _RETURNED, _REQUEUED):
            self._files.delete(path)

    def status(self) -> tuple[FileStatus, ...]:
        """Return all files as they are: while it stays the same, so do the letters."""
        return tuple(sorted(self._files.walk(), key=lambda entry: entry.path))

    def letters(
        self, broken: Callable[[CheckpointError], None] = raised
    ) -> Iterator[tuple[str, ChainLetter]]:
        """Iterate over the dead letters with the names of their files; ``broken`` is told of what cannot be read."""
        ordered = {each.letter for order in self.orders(broken=broken) for each in order.letters}
        for name, letters in self._all(broken):
            yield from ((name, letter) for letter in letters if letter.letter not in ordered)

    def purge(
        self, letters: Collection[bytes], broken: Callable[[CheckpointError], None] = raised
    ) -> set[bytes]:
        """Delete dead letters by their names; returns those that were there. A file without others is emptied.

        ``broken`` is told of each file that cannot be read.
        """
        ordered = {each.letter for order in self.orders(broken=broken) for each in order.letters}
        return self._take_out(set(letters) - ordered, broken)

    def requeue(
        self, payloads: Mapping[bytes, bytes | None], broken: Callable[[CheckpointError], None] = raised
    ) -> set[bytes]:
        """Order dead letters back into the job, by their names; returns those that were there.

        None leaves a letter as it is, and a payload takes the place of its own.
        """
        found: set[bytes] = set()
        orders: dict[str, list[ChainLetter]] = {}
        for name, letter in self.letters(broken):
            if letter.letter in payloads and letter.letter not in found:
                found.add(letter.letter)
                payload = payloads[letter.letter]
                # The key of an edited record is its payload's.
                changed = letter if payload is None else replace(letter, payload=payload, key=b"")
                orders.setdefault(name, []).append(changed)
        for name, chosen in orders.items():
            self._put_beside(name, _REQUEUED, chosen)
        return found

    def order_names(self) -> dict[str, str]:
        """Return the paths of all orders, sorted, with the names of the files that their letters are of."""
        paths = sorted(each.path for each in self._files.walk() if each.path.endswith(_REQUEUED))
        of = {path: path.removesuffix(_REQUEUED).rpartition(".")[0] for path in paths if path[0] != "."}
        return {path: unquote(name) for path, name in of.items()}

    def orders(
        self, after: str = "", broken: Callable[[CheckpointError], None] = raised
    ) -> Iterator[LetterOrder]:
        """Iterate over the orders behind the path ``after``; ``broken`` is told of each that cannot be read."""
        for path, name in self.order_names().items():
            if path > after:
                try:
                    _, parts = self._decoded(path, name)
                except CheckpointDamagedError as error:
                    if self._files.size(path) is not None:
                        broken(error)
                    continue
                letters = (letter for part in parts for letter in letters_of(part))
                yield LetterOrder(path, name, tuple(letters))

    def readmitted(self, letters: Collection[bytes], broken: Callable[[CheckpointError], None]) -> None:
        """Checkpoints of the job hold these letters: they are gone from here, and their orders last."""
        self._take_out(letters, broken)
        self._withdraw(letters, broken)

    def give_back(
        self, letters: Collection[bytes], reason: str, at_ms: int, broken: Callable[[CheckpointError], None]
    ) -> None:
        """These ordered letters cannot go back into the job: they are dead again, with this reason."""
        for order in self.orders(broken=broken):
            back = []
            for each in order.letters:
                if each.letter in letters:
                    newest = Attempt(1, at_ms, reason, each.operator)
                    attempts = with_attempt(each.attempts, newest, at_ms)
                    back.append(replace(each, attempts=attempts, died_ms=at_ms))
            if back:
                self._put_beside(order.name, _RETURNED, back)
        self._withdraw(letters, broken)

    def _all(self, broken: Callable[[CheckpointError], None]) -> Iterator[tuple[str, list[ChainLetter]]]:
        for file in self.found():
            if file.letters:
                try:
                    parts = self.read(file.name)
                except CheckpointError as error:
                    # Unless its driver has removed it since it was listed.
                    if self._files.size(_path(file.name)) is not None:
                        broken(error)
                    continue
                yield file.name, [letter for part in parts for letter in part]

    def _take_out(self, letters: Collection[bytes], broken: Callable[[CheckpointError], None]) -> set[bytes]:
        found: set[bytes] = set()
        for name, there in self._all(broken):
            gone = [letter.letter for letter in there if letter.letter in letters]
            if gone and len(gone) == len(there):
                self._empty(name)
            elif gone:
                data = b"".join(gone)
                path = f"{part(name)}.{layout.new_unique()}{_PURGED}"
                self._files.publish(path, data + self._signer.letters(name, data))
            found.update(gone)
        return found

    def _withdraw(self, letters: Collection[bytes], broken: Callable[[CheckpointError], None]) -> None:
        for order in self.orders(broken=broken):
            rest = tuple(each for each in order.letters if each.letter not in letters)
            if not rest:
                self._files.delete(order.path)
            elif len(rest) < len(order.letters):
                self._files.publish(order.path, encode_letters(LetterBatch(order.name, rest), self._signer))

    def _empty(self, name: str) -> None:
        head, _ = self._decoded(_path(name), name)
        self._files.publish(_path(name), encode_letters(LetterBatch(name, (), head.lasting), self._signer))
        for path in self._beside(name, _PURGED, _RETURNED):
            self._files.delete(path)

    def _put_beside(self, name: str, ending: str, letters: list[ChainLetter]) -> None:
        path = f"{part(name)}.{layout.new_unique()}{ending}"
        self._files.publish(path, encode_letters(LetterBatch(name, tuple(letters)), self._signer))

    def _decoded(self, path: str, name: str) -> tuple[LetterFile, list[pa.RecordBatch]]:
        return decode_letters(self._files.read(path), name, self._at(path), self._signer)

    def _purged(self, name: str) -> set[bytes]:
        found: set[bytes] = set()
        for path in self._beside(name, _PURGED):
            data = self._files.read(path)
            body, mac = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
            if not compare_digest(mac, self._signer.letters(name, body)):
                raise CheckpointDamagedError(
                    f"{self._at(path)}: it was cut off or changed after it was written, or is signed with another "
                    "key (see CheckpointConfig.key): which letters are purged is not known; remove the file to have "
                    "them again"
                )
            found.update(body[at : at + LETTER_BYTES] for at in range(0, len(body), LETTER_BYTES))
        return found

    def _returned(self, name: str) -> dict[bytes, ChainLetter]:
        """Return what letters are since they came back; of several times the last."""
        parts = [part for path in self._beside(name, _RETURNED) for part in self._decoded(path, name)[1]]
        letters = sorted((each for part in parts for each in letters_of(part)), key=lambda each: each.died_ms)
        return {each.letter: each for each in letters}

    def _beside(self, name: str, *endings: str) -> list[str]:
        prefix = f"{part(name)}."
        paths = [entry.path for entry in self._files.walk()]
        return [path for path in paths if path.startswith(prefix) and path.endswith(endings)]

    def _at(self, path: str) -> str:
        return layout.join(self._files.url, path)


@dataclass
class LettersInMemory:
    """The same of a job without a directory: gone with its driver, as its checkpoints are."""

    _batches: dict[str, LetterBatch] = field(default_factory=dict)

    def found(self) -> list[LetterFile]:
        return [LetterFile(each.name, len(each.letters), each.lasting) for each in self._batches.values()]

    def write(self, batch: LetterBatch) -> bool:
        return self._batches.setdefault(batch.name, batch) is batch

    def read(self, name: str) -> list[list[ChainLetter]]:
        return list(parts_of(self._batches[name].letters))

    def empty(self, name: str) -> None:
        self._batches[name] = LetterBatch(name, (), self._batches[name].lasting)

    def remove(self, name: str) -> None:
        self._batches.pop(name, None)


def stored_letters(
    url: str, key: bytes | None = None, broken: Callable[[CheckpointError], None] = raised
) -> list[StoredLetters]:
    """Return the letters of all jobs that have, or had, some somewhere below a directory.

    ``key`` is `CheckpointConfig.key` of the jobs; None: the one that is kept with their checkpoints. ``broken`` is told
    of each job that has none. The directory of letters itself, or of one job's, is taken for the one that it is in:
    there is the key. Raises `CheckpointStorageError`.
    """
    above, only = url, None
    if layout.last_name(url) == layout.DEAD_LETTERS:
        above = layout.parent(url)
    elif layout.last_name(layout.parent(url)) == layout.DEAD_LETTERS:
        above, only = layout.parent(layout.parent(url)), unquote(layout.last_name(url))
    files = open_files(above)
    found: set[tuple[str, str]] = set()
    for entry in files.walk():
        *above_it, name = entry.path.split("/")
        if layout.DEAD_LETTERS in above_it[-2:-1] and name.endswith(_LETTERS) and not name.startswith("."):
            found.add(("/".join(above_it[:-2]), unquote(above_it[-1])))
    stored = []
    for place, job in sorted(found):
        directory = layout.join(files.url, place) if place else files.url
        if only in (None, job):
            try:
                found_key = key_of(layout.job_directory(directory, job), key)
                stored.append(StoredLetters(directory, job, found_key))
            except CheckpointError as error:
                broken(error)
    return stored


def _path(name: str) -> str:
    return part(name) + _LETTERS
