"""What a slot tells its senders: which credit comes back, and how much it wants in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftlayer.runtime.protocol.credit_frames import encode_grants, encode_limits
from ftlayer.runtime.slot.credit import GrantBook
from ftlayer.runtime.slot.instructions import Grant
from ftlayer.topology.job_graph import Channel


class Crediting:
    """Gathers credit, and says what goes to which slot."""

    def __init__(self, senders: Mapping[Channel, int], channel_bytes: int) -> None:
        """``senders`` says which slot each channel comes from."""
        self._senders = senders
        self._grants: GrantBook[Channel] = GrantBook(channel_bytes)

    @property
    def due_ms(self) -> int | None:
        """When `send_all` is due; None while there is nothing to send."""
        return self._grants.due_ms

    def give_back(self, channel: Channel, size: int, now_ms: int) -> list[Grant]:
        """A task has taken ``size`` bytes of a channel from another slot."""
        if not self._grants.taken(channel, size, now_ms):
            return []
        return self._by_slot({channel: self._grants.take(channel)}, encode_grants)

    def forget(self, channel: Channel) -> None:
        """The channel's sender is gone, and what it has used with it."""
        self._grants.take(channel)

    def send_all(self) -> list[Grant]:
        return self._by_slot(self._grants.take_all(), encode_grants)

    def limit(self, limits: dict[Channel, int]) -> list[Grant]:
        """Let no more than so many bytes be in flight on channels from other slots."""
        return self._by_slot(limits, encode_limits)

    def _by_slot(
        self, numbers: dict[Channel, int], encode: Callable[[dict[Channel, int]], bytes]
    ) -> list[Grant]:
        by_slot: dict[int, dict[Channel, int]] = {}
        for channel, number in numbers.items():
            by_slot.setdefault(self._senders[channel], {})[channel] = number
        return [Grant(slot, encode(its)) for slot, its in by_slot.items()]
