"""Dead letters of jobs without a vertex, beside their checkpoints: calls about letters, answered from their files."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.letters_for_tools import attempts_of, payload_of
from ftlayer.checkpoint.storage.dead_letters import StoredLetters, stored_letters
from ftlayer.errors import CheckpointError, UnsupportedError
from ftlayer.printable import shown_url
from ftlayer.records.sought import says
from ftlayer.vertex.calls import (
    MAX_PAGE_BYTES,
    Call,
    Changed,
    DeadGroup,
    DeadGroups,
    EditAndRequeue,
    GroupList,
    JobKind,
    ListRecords,
    ListStreams,
    Purge,
    RecordInfo,
    RecordList,
    RecordPage,
    Reply,
    Requeue,
    SelectRecords,
    Stats,
    StatsReply,
    StreamDetails,
    StreamList,
)
from ftlayer.vertex.rules.grouping import kind_of

logger = logging.getLogger(__name__)

_NEVER_MS = (1 << 63) - 1


class BrokenFiles:
    """Files below a directory that cannot be read, beside others that can: they are named in the log, each once."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._found: list[CheckpointError] = []

    def take(self, error: CheckpointError) -> None:
        """One cannot be read, as the error says."""
        self._found.append(error)

    def name(self, *, others: bool) -> None:
        """Name those that were taken since the last call; without ``others`` that can be read, raise the first."""
        found, self._found = self._found, []
        if found and not others:
            raise found[0]
        for error in found:
            if str(error) not in self._named:
                self._named.add(str(error))
                logger.warning("%s. What else there is is shown without it", error)


@dataclass(frozen=True, slots=True)
class _Shown:
    """A letter of a job; ``place`` is its position in the order of deaths."""

    info: RecordInfo
    place: bytes
    died_ms: int


class LetterReader:
    """Answers as a vertex does that has only dead letters. A key is the name of its letter."""

    def __init__(self, url: str, key: bytes | None = None) -> None:
        """``key`` is `CheckpointConfig.key` of the jobs; None: the one that is kept with their checkpoints."""
        self._url = url
        self._key = key
        self._read: tuple[object, list[_Shown]] = (), []
        self._broken = BrokenFiles()

    @property
    def has_some(self) -> bool:
        """Whether there are letters, or were. Errors as `answer`."""
        return bool(stored_letters(self._url, self._key, self._broken.take))

    def answer(self, call: Call) -> Reply | None:
        """Answer a call; None for one about something else, and where there are no letters and never were.

        Raises `CheckpointError` for files that cannot be read where there are no others, and `UnsupportedError` for
        what takes a vertex.
        """
        match call:
            case Requeue() | EditAndRequeue():
                raise UnsupportedError(
                    f"the letters in {shown_url(self._url)} are of jobs without a vertex, so there is "
                    "nothing to requeue them with: give the "
                    "job's environment one (board=FTLayer.connect(…)) and start it again; it sends "
                    "them there, and a requeued one goes back into the job"
                )
            case Stats() | ListStreams() | DeadGroups() | SelectRecords() | ListRecords() | Purge():
                jobs = stored_letters(self._url, self._key, self._broken.take)
                self._broken.name(others=bool(jobs))
                return self._of_jobs(call, jobs) if jobs else None
        return None

    def _of_jobs(self, call: Call, jobs: list[StoredLetters]) -> Reply:
        if isinstance(call, Purge):
            purged = sum(len(job.purge(frozenset(call.keys), self._broken.take)) for job in jobs)
            self._broken.name(others=bool(purged))
            return Changed(purged)
        if isinstance(call, ListRecords):
            wanted = SelectRecords(call.state, call.stream, limit=call.limit, after=call.after)
            page = _page(wanted, self._letters(jobs))
            return RecordList(page.records, page.more)
        letters = self._letters(jobs)
        if isinstance(call, SelectRecords):
            return _page(call, letters)
        if isinstance(call, Stats):
            return StatsReply({"dead_letters": float(len(letters))})
        if isinstance(call, ListStreams):
            return _streams(letters)
        assert isinstance(call, DeadGroups)
        return _groups(call, letters)

    def _letters(self, jobs: list[StoredLetters]) -> list[_Shown]:
        """Return all letters; the files are read again once they have changed."""
        status = [(job.job, job.status()) for job in jobs]
        if status != self._read[0]:
            letters = _in_order(jobs, self._broken)
            self._broken.name(others=bool(letters))
            self._read = status, letters
        return self._read[1]


def _in_order(jobs: Iterable[StoredLetters], broken: BrokenFiles) -> list[_Shown]:
    """Return all letters, in the order of their deaths; ``broken`` is told of files that cannot be read."""
    # A job that went back to an older checkpoint may have written a letter twice.
    found = {
        (job.job, letter.letter): _shown(job.job, letter)
        for job in jobs
        for _, letter in job.letters(broken.take)
    }
    return sorted(found.values(), key=lambda shown: shown.place)


def _shown(job: str, letter: ChainLetter) -> _Shown:
    attempts = attempts_of(letter)
    # Tools know records by numbers of 64 bits, and none of 0.
    root = int.from_bytes(letter.letter[:8], "big") or 1
    info = RecordInfo(
        key=letter.letter,
        stream=f"{job}/{letter.chain}",
        state="dead",
        root=root,
        origin=root,
        attempt=attempts[-1].number,
        not_before_ms=0,
        history=attempts,
        payload=payload_of(letter),
        title=job,
        source=letter.chain,
    )
    return _Shown(info, letter.died_ms.to_bytes(8, "big") + letter.letter, letter.died_ms)


def _page(call: SelectRecords, letters: list[_Shown]) -> RecordPage:
    if call.state != "dead":
        return RecordPage((), (), 0, b"")
    if call.newest:
        letters = letters[::-1]
        behind = [each for each in letters if not call.after or each.place < call.after]
    else:
        behind = [each for each in letters if each.place > call.after]
    found: list[_Shown] = []
    size = 0
    for examined, each in enumerate(behind):
        if len(found) == call.limit or size >= MAX_PAGE_BYTES:
            return _page_of(call, found, examined, behind[examined - 1].place)
        if _is_wanted(call, each):
            found.append(each)
            if not call.keys_only:
                size += each.info.payload.nbytes + sum(len(one.traceback) for one in each.info.history)
    return _page_of(call, found, len(behind), b"")


def _page_of(call: SelectRecords, found: list[_Shown], examined: int, more: bytes) -> RecordPage:
    infos = () if call.keys_only else tuple(each.info for each in found)
    return RecordPage(infos, tuple(each.info.key for each in found), examined, more)


def _is_wanted(call: SelectRecords, shown: _Shown) -> bool:
    info = shown.info
    return (
        call.stream in ("", info.stream, info.title)
        and (call.group == -1 or call.group == _number(info))
        and call.operator in ("", info.operator)
        and call.since_ms <= shown.died_ms < (call.until_ms or _NEVER_MS)
        and call.root in (0, info.root)
        and (not call.keys or info.key in call.keys)
        and (
            not call.text
            or call.text in info.reason
            or call.text in info.operator
            or says(info.payload, call.text.encode())
        )
    )


def _streams(letters: list[_Shown]) -> StreamList:
    counts = Counter((each.info.stream, each.info.title, each.info.source) for each in letters)
    return StreamList(
        tuple(
            StreamDetails(
                stream=stream,
                owner=job,
                title=job,
                source=chain,
                pending=0,
                waiting=0,
                in_delivery=0,
                dead=count,
                persisted=0,
                completed=0,
                failed=0,
                died=0,
                oldest_ms=0,
                max_pending=0,
                kind=JobKind.TOPOLOGY,
            )
            for (stream, job, chain), count in sorted(counts.items())
        )
    )


def _groups(call: DeadGroups, letters: list[_Shown]) -> GroupList:
    groups: dict[tuple[str, int], list[_Shown]] = {}
    for each in letters:
        if call.stream in ("", each.info.stream, each.info.title):
            groups.setdefault((each.info.stream, _number(each.info)), []).append(each)
    found = [
        DeadGroup(
            stream,
            number,
            some[0].info.operator,
            kind_of(some[0].info.reason),
            some[0].info.reason,
            len(some),
            some[0].died_ms,
            some[-1].died_ms,
        )
        for (stream, number), some in groups.items()
    ]
    return GroupList(tuple(sorted(found, key=lambda group: -group.count)), 1.0)


def _number(info: RecordInfo) -> int:
    """Return the number of a letter's group: the same whenever the files are read."""
    return zlib.crc32(f"{info.operator}\0{kind_of(info.reason)}".encode())
