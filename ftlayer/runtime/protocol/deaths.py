"""What is known of processes that records have ended, as slots and the driver tell each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Death:
    """An instance of a slot whose process has ended itself: by a fatal signal that it got, or by an exit.

    Attributes:
        instance: its name; one death has one report that counts.
        slot: which one it ran.
        cause: in words.
        chain, digest: the record that it had in hand, as `Conviction`; both empty where that was not noted.
        stack: of the Python functions that ran, the innermost first; "" if unknown.
    """

    instance: str
    slot: int
    cause: str
    chain: str = ""
    digest: bytes = b""
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Conviction:
    """A record that has ended the processes that worked on it: its chain makes it a dead letter unseen.

    Attributes:
        chain: uid of the operator at the chain's head.
        digest: of the record's values (`row_digests` of `ChainSuspects`): equal records share it.
        reason, traceback, place: what becomes of the letter's last attempt.
    """

    chain: str
    digest: bytes
    reason: str
    traceback: str
    place: str
