"""Requeued letters on their way from the vertex back into the job, each exactly once.

The vertex offers what was requeued, page by page, until the driver says that checkpoints hold it. A letter that no
checkpoint holds is sent to the subtask that is to have it; the subtask's next checkpoint names it. What is lost with a
subtask before that is offered again, and sent again. The vertex hears of a letter once *every* checkpoint holds it
that the job may be restored from, so that going back to an older one loses none. Until then checkpoints go on naming
it (`to_publish`), though the subtask has forgotten the name.

No I/O, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.snapshots import Checkpoint

ASK_EVERY_MS = 2_000
MOST_PAUSE_MS = 60_000

# ---------------------------------------------------------------- what is to be done


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
    """Send letters to the subtask that is to have them."""

    slot: int
    uid: str
    subtask: int
    letters: tuple[ChainLetter, ...]


ReadmissionWork: TypeAlias = AskRequeued | ConfirmLetters | ReturnToDead

# ---------------------------------------------------------------- what it is told


@dataclass(frozen=True, slots=True)
class Target:
    """Where a letter goes: a subtask, and its slot."""

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
    """See the module. What it returns of `work` is to be answered, one after the other."""

    def __init__(self, slots: Iterable[int]) -> None:
        """``slots`` are all of the job's; none of them runs its tasks yet."""
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

    # ------------------------------------------------------------ checkpoints and tasks

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
        """Tasks in these slots were told to start."""
        self._down.difference_update(slots)

    def ending(self) -> None:
        """The job comes to its end: nothing is sent any more. What checkpoints hold is still confirmed."""
        self._ended = True
        self._ask_at_ms = 0

    # ------------------------------------------------------------ the vertex

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
            self._forget(self._unseen)
            if not (self._to_confirm or self._to_return):
                self._ask_at_ms = now_ms + ASK_EVERY_MS
        return [
            SendLetters(target.slot, target.uid, target.subtask, tuple(some))
            for target, some in groups.items()
        ]

    def done(self) -> None:
        """What was asked for is done, `AskRequeued` aside."""
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
        self._ask_at_ms = now_ms + min(MOST_PAUSE_MS, ASK_EVERY_MS << min(self._failures, 10))
        self._failures += 1

    # ------------------------------------------------------------ views

    @property
    def on_their_way(self) -> int:
        """Letters that were sent, and that no checkpoint holds."""
        return len(self._sent)

    def _forget(self, letters: Collection[bytes]) -> None:
        """The vertex has these no more, so checkpoints need not name them."""
        if letters:
            self._held = {number: held - frozenset(letters) for number, held in self._held.items()}


def _named_by(checkpoint: Checkpoint) -> frozenset[bytes]:
    own = (letter for part in checkpoint.subtasks for letter in part.readmitted)
    return frozenset((*own, *checkpoint.readmitted))
