"""Which instances of the other slots count. Network threads ask it, the loop decides."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

from ftlayer.errors import CodecError, PeerRefusedError
from ftlayer.runtime.protocol.messages import Peer
from ftlayer.transport.frames import unpack


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """What a sender says when it opens its stream: of which job, from which instance, to which, and when.

    ``epoch`` is the latest that the sender has heard of.
    """

    job: str
    sender: int
    instance: str
    receiver: str
    epoch: int

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.job, self.sender, self.instance, self.receiver, self.epoch])
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> StreamHeader:
        try:
            fields = unpack(data)
        except ValueError as error:
            raise CodecError(f"a stream's header is not readable ({error})") from None
        kinds = (str, int, str, str, int)
        if not isinstance(fields, list) or tuple(map(type, fields)) != kinds:
            raise CodecError("a stream's header has not the fields job, sender, instance, receiver, epoch")
        return cls(*fields)


class Roster:
    def __init__(self, job: str, instance: str) -> None:
        """Know of no instance; ``instance`` is this one's name."""
        self._job, self._instance = job, instance
        self._changed = threading.Condition()  # guards what follows
        self._deployed_in: int | None = None
        self._current: dict[int, str] = {}
        self._dropped: set[str] = set()
        self._closed = False
        self.epoch = 0

    def deploy(self, epoch: int, peers: Iterable[Peer]) -> None:
        with self._changed:
            self._deployed_in = epoch
        self.up(epoch, peers)

    def up(self, epoch: int, peers: Iterable[Peer]) -> None:
        with self._changed:
            self.epoch = max(self.epoch, epoch)
            for peer in peers:
                self._drop(peer.slot, unless=peer.instance)
                self._current[peer.slot] = peer.instance
            self._changed.notify_all()

    def drop(self, epoch: int, slots: Iterable[int]) -> None:
        """Take nothing any more of the instances that these slots have now."""
        with self._changed:
            self.epoch = max(self.epoch, epoch)
            for slot in slots:
                self._drop(slot)
            self._changed.notify_all()

    def is_current(self, slot: int, instance: str) -> bool:
        return self._current.get(slot) == instance

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def admit(self, header: StreamHeader, timeout_s: float) -> None:
        """Return when the sender counts; waits for one of whom the coordinator has told only the others yet.

        Raises:
            PeerRefusedError: another job, another receiver, an instance that was dropped or that is older than
                this one, or it was not announced in time.
        """
        if (header.job, header.receiver) != (self._job, self._instance):
            raise PeerRefusedError("the stream is for another job, or for an earlier instance of this slot")
        with self._changed:
            self._changed.wait_for(lambda: self.verdict(header) is not None, timeout_s)
            if not self.verdict(header):
                raise PeerRefusedError(
                    f"instance {header.instance} of slot {header.sender} does not count: it was replaced, or "
                    "the coordinator has not told of it"
                )

    def verdict(self, header: StreamHeader) -> bool | None:
        """Whether a sender counts; None while that is not known."""
        if self._closed or header.instance in self._dropped:
            return False
        if self._current.get(header.sender) == header.instance:
            return True
        # An instance that was lost before this one was deployed opened its stream in an earlier epoch.
        if self._deployed_in is not None and header.epoch < self._deployed_in:
            return False
        return None

    def _drop(self, slot: int, unless: str = "") -> None:
        instance = self._current.get(slot)
        if instance is not None and instance != unless:
            del self._current[slot]
            self._dropped.add(instance)
