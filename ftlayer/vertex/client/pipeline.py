"""Many calls in flight: a stream for each kind of call and stream of records, answers as they come."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from ftlayer.checks import MOST_BYTES, check_int
from ftlayer.errors import UnsupportedError, VertexUnavailableError
from ftlayer.vertex.calls import Reply, Xor
from ftlayer.vertex.client.connection import Connection, monotonic_ms
from ftlayer.vertex.client.lane import BulkCall, Lane

# The vertex keeps the replies to the latest 256 calls of a client: what is sent again has to be among them.
MAX_WINDOW = 128
_WATCH_S = 0.2


class Pipeline:
    """Sends Persist, Ingest, Xor and Register without waiting for the answers. Any thread may use it.

    Calls of one kind and stream go to the vertex in the order of their submission; others may
    overtake them. Not guaranteed: that the answers come in order.
    """

    def __init__(
        self, connection: Connection, client: str, deadline_ms: int, window: int, window_bytes: int
    ) -> None:
        """Made by `VertexClient.pipeline`. `ConfigError` for a window out of range."""
        check_int(window, "window", least=1, most=MAX_WINDOW)
        check_int(window_bytes, "window_bytes", least=1, most=MOST_BYTES)
        self._connection = connection
        self._client = client
        self._deadline_ms = deadline_ms
        self._window, self._window_bytes = window, window_bytes
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._closed = threading.Event()
        self._watchdog: threading.Thread | None = None

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise UnsupportedError(
            "a pipeline cannot be pickled: pickle its client, and make a pipeline from that"
        )

    def submit(self, call: BulkCall) -> Future[Reply]:
        """Send ``call`` and return the future of its reply; waits while the window is full.

        The future raises what the vertex raised, or `VertexUnavailableError` after the client's deadline.
        Its callbacks run on the thread that reads answers: they may submit to this pipeline only calls
        of another kind, and must not wait for anything.

        Raises:
            MalformedRequestError: the call cannot be written; nothing was sent.
            VertexUnavailableError: the window stayed full until the deadline.
            UnsupportedError: this process was forked after the pipeline had been used.
        """
        return self._lane(call).submit(call, monotonic_ms() + self._deadline_ms)

    def flush(self) -> None:
        """Wait until every call so far has its answer or has failed. Raises nothing: see the futures."""
        for lane in self._all_lanes():
            lane.wait_until_idle()

    def close(self) -> None:
        """Flush and end the streams. Submitting after it raises `VertexUnavailableError`."""
        self.flush()
        self._closed.set()
        for lane in self._all_lanes():
            lane.close()
        if self._watchdog is not None:
            self._watchdog.join()

    def _all_lanes(self) -> list[Lane]:
        with self._lock:
            return list(self._lanes.values())

    def _lane(self, call: BulkCall) -> Lane:
        # Before the lock, which a fork may have copied while it was held.
        self._connection.check_process()
        kind = type(call).__name__
        key = kind, "" if isinstance(call, Xor) else call.stream
        with self._lock:
            if self._closed.is_set():
                raise VertexUnavailableError("the pipeline is closed")
            lane = self._lanes.get(key)
            if lane is None:
                client = f"{self._client}/{len(self._lanes)}"
                lane = Lane(self._connection, kind, client, self._window, self._window_bytes)
                self._lanes[key] = lane
            if self._watchdog is None:
                self._watchdog = threading.Thread(target=self._watch, name="ftlayer-deadlines", daemon=True)
                self._watchdog.start()
            return lane

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            for lane in self._all_lanes():
                lane.fail_overdue(monotonic_ms())
