"""Which thread of gRPC reads what comes: the one that waits for it."""

from __future__ import annotations

import os

_EXPERIMENTS = "GRPC_EXPERIMENTS"
_NO_EVENT_ENGINE = "-event_engine_listener,-event_engine_client"


def poll_in_place() -> None:
    """Let a thread that waits for a message read it from the socket itself.

    By default gRPC reads in threads of its own (its event engine) and hands over, which takes two more changes of
    threads at each end: as much time as a small call and its answer take without them.

    To be called before the process uses gRPC; later it has no effect. A value of `GRPC_EXPERIMENTS` that is there
    already stays.
    """
    os.environ.setdefault(_EXPERIMENTS, _NO_EVENT_ENGINE)
