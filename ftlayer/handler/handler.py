"""The handler of a task: its persister, its anchors and its XORs, or nothing of them."""

from __future__ import annotations

from typing import Protocol

from ftlayer.handler.anchor import AnchorHandler, FTAnchorHandler, NonFTAnchorHandler
from ftlayer.handler.exact_ids import IdBook
from ftlayer.handler.persister import FTPersister, NonFTPersister, Persister
from ftlayer.handler.xor import FTXorHandler, NonFTXorHandler, XorHandler


class Handler(Protocol):
    """The fault tolerance of one task. Its parts know of each other; no two tasks share a handler.

    Attributes:
        persister: gives source records their roots and puts them into the form the vertex takes.
        anchor: derives the ids of what comes out from the ids of what went in.
        xor: collects what is to be acknowledged, and what failed.
    """

    @property
    def persister(self) -> Persister:
        """See the class."""

    @property
    def anchor(self) -> AnchorHandler:
        """See the class."""

    @property
    def xor(self) -> XorHandler:
        """See the class."""


class FTHandler:
    """Fault tolerance is on."""

    def __init__(
        self, uid: str, *, job: str, run: str, shard: int = 0, shards: int = 1, exact: bool = False
    ) -> None:
        """Make the handler of one subtask of the chain ``uid``.

        Args:
            uid: unique in the graph; goes into the ids of everything the chain emits.
            job: stable name of the job (or query); goes into root ids.
            run: names this process's part in a run of the job; goes into root ids. A task that is started again
                counts its records from 0 again, so that two starts under one name would give one id twice.
            shard, shards: which shard of the vertex keeps the job's streams; the top bits of root ids.
            exact: the vertex keeps single ids, so make `EventIds` (slow).
        """
        book = IdBook() if exact else None
        self.persister: Persister = FTPersister(job, run, shard, shards)
        self.anchor: AnchorHandler = FTAnchorHandler(uid, book)
        self.xor: XorHandler = FTXorHandler(book)


class NonFTHandler:
    """Records are not tracked: nothing is persisted, nothing has RecordIds, a failure fails the task.

    ``remedy`` is said with the failure.
    """

    def __init__(self, remedy: str = "") -> None:
        self.persister: Persister = NonFTPersister()
        self.anchor: AnchorHandler = NonFTAnchorHandler()
        self.xor: XorHandler = NonFTXorHandler(remedy)
