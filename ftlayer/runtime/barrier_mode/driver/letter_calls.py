"""A job's dead letters in its vertex: letters in the vertex' form and back, and the calls about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgpack

from ftlayer.checkpoint.letters import ChainLetter, FailedAttempt, LetterKind
from ftlayer.checkpoint.letters_for_tools import attempts_of, payload_of
from ftlayer.errors import CheckpointDamagedError, FTLayerError, MalformedRequestError, StaleOwnerError
from ftlayer.records.ipc import as_stream
from ftlayer.transport.codec import plain_codec
from ftlayer.vertex.calls import (
    MAX_KEYS,
    ClaimJob,
    ForgetLetters,
    GetRequeued,
    KeepLetters,
    KeptLetter,
    OpenStream,
    Readmitted,
    RequeuedLetter,
    RequeuedLetters,
    ReturnLetters,
)
from ftlayer.vertex.client.client import VertexClient

PAGE = 200
"""Letters that are asked for at once."""


class LetterCalls:
    """The calls, for one thread; each raises what the vertex raises.

    The job is claimed and its streams are opened with the first call, and again behind each that failed: a vertex
    may be away when the job starts, and be another one when it is back.
    """

    def __init__(self, client: VertexClient, job: str, run: str, check_owner: Callable[[], None]) -> None:
        """``check_owner`` raises if another driver has taken the job over: then nothing is claimed."""
        self._client = client
        self._job, self._run = job, run
        self._check_owner = check_owner
        self._is_claimed = False
        self._open: set[str] = set()

    def begin(self, chains: Sequence[str]) -> None:
        """Claim the job, and open the streams of these chains, so that they are shown before anything has failed."""
        with self._claimed():
            for chain in chains:
                self._opened(chain)

    def keep(self, file: str, parts: Sequence[Sequence[ChainLetter]]) -> None:
        """Have the vertex keep the parts of a file, each once."""
        with self._claimed():
            for number, letters in enumerate(parts):
                if letters:
                    stream = self._opened(letters[0].chain)
                    kept = tuple(map(kept_letter, letters))
                    self._client.call(KeepLetters(stream, file, number, kept, self._run))

    def forget(self, file: str) -> None:
        """Have the vertex forget the name of a file."""
        with self._claimed():
            self._client.call(ForgetLetters(self._job, file, self._run))

    def requeued(self, after: bytes) -> tuple[list[tuple[bytes, ChainLetter]], bytes]:
        """Return a page of requeued letters with their keys, and where the next one begins.

        Letters that make no sense are dead again behind this.
        """
        with self._claimed():
            page = self._client.call(GetRequeued(self._job, after, PAGE, self._run))
        assert isinstance(page, RequeuedLetters)
        found = []
        for each in page.letters:
            try:
                found.append((each.key, letter_of(each)))
            except CheckpointDamagedError as error:
                self.give_back([each.key], str(error))
        return found, page.more

    def readmitted(self, keys: Sequence[bytes]) -> None:
        """Have the vertex delete letters that checkpoints hold."""
        with self._claimed():
            for some in _cut(keys):
                self._client.call(Readmitted(self._job, some, self._run))

    def give_back(self, keys: Sequence[bytes], reason: str) -> None:
        """Have the vertex make letters dead again."""
        with self._claimed():
            for some in _cut(keys):
                self._client.call(ReturnLetters(self._job, some, reason, self._run))

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        try:
            if not self._is_claimed:
                # Else the run that is fenced off here would be the one that goes on.
                self._check_owner()
                self._client.call(ClaimJob(self._job, self._run))
                self._is_claimed = True
            yield
        except FTLayerError as error:
            self._open.clear()
            self._is_claimed = self._is_claimed and not isinstance(error, StaleOwnerError)
            raise

    def _opened(self, chain: str) -> str:
        stream = f"{self._job}/{chain}"
        if stream not in self._open:
            self._client.call(OpenStream(stream, owner=self._run))
            self._open.add(stream)
        return stream


# ---------------------------------------------------------------- letters


def kept_letter(letter: ChainLetter) -> KeptLetter:
    """Return a letter as the vertex keeps it. Raises `CheckpointDamagedError` for a payload that is no row."""
    facts: bytes = msgpack.packb(plain_codec(ChainLetter).pack(replace(letter, payload=b"", attempts=())))
    return KeptLetter(letter.letter, facts, payload_of(letter), attempts_of(letter))


def letter_of(requeued: RequeuedLetter) -> ChainLetter:
    """Return a letter that comes back, with the payload that people may have given it.

    An edited one has lost its key: it is the payload's. Raises `CheckpointDamagedError` for facts of no letter.
    """
    try:
        letter: ChainLetter = plain_codec(ChainLetter).unpack(msgpack.unpackb(requeued.facts), "letter")
    except (MalformedRequestError, ValueError, msgpack.UnpackException) as error:
        raise CheckpointDamagedError(
            f"a requeued letter of {requeued.stream!r} makes no sense: {error}; is it of a newer ftlayer?"
        ) from error
    attempts = tuple(
        FailedAttempt(each.number, each.at_ms, each.reason, each.operator, each.place, each.traceback)
        for each in requeued.attempts
    )
    is_timer = letter.kind is LetterKind.TIMER
    payload = b"" if is_timer else as_stream(requeued.payload).to_pybytes()
    key = b"" if requeued.edited and not is_timer else letter.key
    return replace(letter, payload=payload, attempts=attempts, key=key)


def _cut(keys: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    return [tuple(keys[at : at + MAX_KEYS]) for at in range(0, len(keys), MAX_KEYS)]
