"""The probes of a vertex over HTTP: ``/livez`` and ``/readyz``, beside its metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol

from ftlayer.vertex.rules.probes import Phase, ProbeResult, ShardPulse, liveness, readiness

LIVEZ, READYZ = "/livez", "/readyz"


class Pulsing(Protocol):
    """What has shards that show how they are: a vertex."""

    def pulses(self) -> Sequence[ShardPulse]:
        """Return one of each shard, without waiting for any."""


class Probes:
    """The life of a vertex as its process tells it, for probes. Any thread may ask.

    Asking takes no lock that a writer holds: a writer that hangs cannot keep a probe from saying so.
    """

    def __init__(self, mono_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000) -> None:
        """Begin with a vertex that opens its stores; ``mono_ms`` is the clock of the shards."""
        self._mono_ms = mono_ms
        self._vertex: Pulsing | None = None
        self._phase = Phase.OPENING

    @property
    def phase(self) -> Phase:
        return self._phase

    def opened(self, vertex: Pulsing) -> None:
        """Tell that the stores are open; nothing listens yet."""
        self._vertex = vertex

    def serving(self) -> None:
        """Tell that clients are served from now on."""
        self._phase = Phase.SERVING

    def stopping(self) -> None:
        self._phase = Phase.STOPPING

    def liveness(self) -> ProbeResult:
        return liveness(self._phase, self._pulses(), self._mono_ms())

    def readiness(self) -> ProbeResult:
        return readiness(self._phase, self._pulses(), self._mono_ms())

    def answer(self, path: str) -> tuple[HTTPStatus, bytes] | None:
        """Return the status and the JSON that a probe gets; None if ``path`` is no probe's."""
        if path == LIVEZ:
            result = self.liveness()
        elif path == READYZ:
            result = self.readiness()
        else:
            return None
        return (HTTPStatus.OK if result.passes else HTTPStatus.SERVICE_UNAVAILABLE), self._body(result)

    def _pulses(self) -> Sequence[ShardPulse]:
        return () if self._vertex is None else self._vertex.pulses()

    def _body(self, result: ProbeResult) -> bytes:
        now_ms = self._mono_ms()
        shards = [
            {
                "shard": index,
                "seconds_since_turn": max(now_ms - pulse.turned_ms, 0) / 1_000,
                "store_used_ratio": round(pulse.used_share, 4),
            }
            for index, pulse in enumerate(self._pulses())
        ]
        return json.dumps(result.facts() | {"shards": shards}).encode() + b"\n"
