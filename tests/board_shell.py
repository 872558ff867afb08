"""A board over a store in memory, under a clock that tests move: what a shell does, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlayer.common.clock import Now
from ftlayer.vertex.calls import (
    Announced,
    AnnouncedJob,
    AnnounceJob,
    AskJob,
    GetJob,
    JobDetails,
    JobOrder,
    OrderAnswer,
    OrderRecord,
)
from ftlayer.vertex.rules.board import Board
from ftlayer.vertex.store import MemoryStore


class BoardShell:
    """A board, its store and its clock."""

    def __init__(self, store: Any = None) -> None:
        self.store = MemoryStore() if store is None else store
        self.now = Now(1_000, 1_700_000_000_000)
        self.restart()

    def restart(self) -> None:
        """Lose memory."""
        with self.store.read() as txn:
            self.board = Board(self.store, txn, self.now)

    def away(self, ms: int) -> None:
        """Be down for so long, on a machine that was started again meanwhile."""
        self.now = Now(0, self.now.wall_ms + ms)
        self.restart()

    def advance(self, ms: int) -> None:
        """Let time pass, and the board do what is due then."""
        self.now = Now(self.now.mono_ms + ms, self.now.wall_ms + ms)
        if self.board.next_tick_ms(self.now) <= self.now.mono_ms:
            self._write(self.board.tick)

    def announce(self, job: JobDetails, *answers: OrderAnswer, owner_run: str = "") -> Announced:
        return self._write(
            lambda txn, now: self.board.announce(txn, AnnounceJob(job, answers), owner_run, now)
        )

    def ask(self, order: JobOrder) -> OrderRecord:
        return self._write(lambda txn, now: self.board.ask(txn, AskJob(order), now))

    def get(self, owner: str, since_ms: int = 0) -> AnnouncedJob:
        with self.store.read() as txn:
            return self.board.job(txn, GetJob(owner, since_ms), self.now)

    def _write(self, do: Callable[[Any, Now], Any]) -> Any:
        with self.store.write(intake=False) as txn:
            return do(txn, self.now)
