"""Entries that consumers of others hold, who are gone: claimed for a consumer of this source's own."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from ftlayer.topology.queues import Member

logger = logging.getLogger(__name__)

PAGE = 1_000
"""Entries are claimed so many at a time."""


class Claims:
    """Looks, twice in ``idle_ms``, for entries that are pending for so long with consumers of others.

    They get a consumer of their own each time, called as one of a subtask that is there no more, whose entries are read
    from the first one. A name that was read before would not do: what is claimed may be older than what it has read.

    ``XAUTOCLAIM`` would claim what this source's own consumers wait to acknowledge, too: so each of the others is
    asked for.
    """

    def __init__(self, client: Any, stream: str, group: str, member: Member, idle_ms: int) -> None:
        self._client = client
        self._stream, self._group = stream, group
        self._member = member
        self._idle_ms = idle_ms
        self._due_s = time.monotonic()

    def claim(self) -> int | None:
        """Claim what there is now, if it is time to look.

        Returns the number of the subtask whose consumer has it; None if there was none. Raises what the client raises:
        what was claimed by then is found in the group by the next start.
        """
        if time.monotonic() < self._due_s:
            return None
        consumers = self._client.xinfo_consumers(self._stream, self._group)
        self._due_s = time.monotonic() + self._idle_ms / 2_000
        number = self._member.subtask + self._member.parallelism * (1 + secrets.randbits(31))
        mine = f"{self._member.owner}-{number}"
        found = sum(
            self._claim_of(one["name"], mine)
            for one in consumers
            if one["pending"] and not self._is_ours(one["name"])
        )
        if not found:
            return None
        logger.warning(
            "stream %r, group %r: claimed %d entries that consumers of others held for %d ms",
            self._stream,
            self._group,
            found,
            self._idle_ms,
        )
        return number

    def _is_ours(self, name: bytes) -> bool:
        prefix = f"{self._member.owner}-".encode()
        return name.startswith(prefix) and name.removeprefix(prefix).isdigit()

    def _claim_of(self, name: bytes, mine: str) -> int:
        found = 0
        while pending := self._client.xpending_range(
            self._stream, self._group, "-", "+", PAGE, name, idle=self._idle_ms
        ):
            ids = [entry[0] for entry in pending]
            self._client.xclaim(self._stream, self._group, mine, self._idle_ms, ids, justid=True)
            found += len(ids)
        return found
