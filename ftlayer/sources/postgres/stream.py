"""A replication stream: a thread receives, reports what is confirmed, and answers the server at any time."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from ftlayer.clients.postgres import psycopg_library
from ftlayer.sources.postgres.pgoutput import EPOCH_US
from ftlayer.sources.postgres.slots import lsn_text

MOST_BUFFERED = 4 << 20
"""Bytes that are received ahead; more stay with the server."""

REPORT_S = 10.0
"""The server is told at least so often how far this is; it ends connections that say nothing (wal_sender_timeout)."""

FULL_S = 60.0
"""A connection whose messages are not taken for this long is given up: a server that shuts down would wait for it."""

SILENCE_S = 60.0
"""A server that does not answer for this long is taken for away."""

_MOST_PINGS = 20
_PINGS_S = 1.0

_DATA = struct.Struct(">cQQq")
_KEEPALIVE = struct.Struct(">cQqB")
_STATUS = struct.Struct(">cQQQqB")


class Received(NamedTuple):
    """A message of the output plugin, or without ``data``: the server has sent all that is before ``lsn``."""

    lsn: int
    data: bytes | None


class ReplicationStream:
    """A connection that streams a slot's changes. `take` and `confirm` are for one thread, beside the stream's own."""

    def __init__(
        self,
        connection: Any,
        slot: str,
        publication: str,
        start: int,
        confirmed: int,
        report_s: float = REPORT_S,
    ) -> None:
        """Begin to stream; the connection is the stream's from here on. Raises psycopg's errors.

        ``start``: transactions that were committed before this are not wanted; ``confirmed``: what the server may
        forget; ``report_s``: the pause between reports.
        """
        self._connection = connection
        self._pg = connection.pgconn
        self._confirmed = confirmed
        self._report_s = report_s
        self._reported = 0
        self._received = 0
        self._is_asked = False
        self._pings: deque[float] = deque(maxlen=_MOST_PINGS)
        sql = psycopg_library().sql
        command = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {})"
        ).format(
            sql.Identifier(slot),
            sql.SQL(lsn_text(start)),
            sql.Literal(sql.Identifier(publication).as_string(None)),
        )
        result = self._pg.exec_(command.as_string(connection).encode())
        if result.status != psycopg_library().pq.ExecStatus.COPY_BOTH:
            raise psycopg_library().errors.error_from_result(result, encoding="utf-8")
        self._pg.nonblocking = 1
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        # Guards what follows.
        self._changed = threading.Condition()
        self._ready: deque[Received] = deque()
        self._bytes = 0
        self._failure: BaseException | None = None
        self._is_open = True
        self._is_woken = False
        self._closes = False
        self._asks = False
        self._thread = threading.Thread(target=self._run, name=f"ftlayer-slot-{slot}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ any thread

    @property
    def is_over(self) -> bool:
        """Whether it was given up as what came was not taken; what was not taken comes again."""
        with self._changed:
            return not self._is_open and self._failure is None

    def take(self, wait_s: float) -> list[Received]:
        """Return what was received; waits for it. Raises what has ended the stream, once all before that was taken."""
        with self._changed:
            if not self._ready and self._failure is None and not self._is_woken:
                self._changed.wait(wait_s)
            self._is_woken = False
            if self._ready:
                taken, was_full = list(self._ready), self._bytes >= MOST_BUFFERED
                self._ready.clear()
                self._bytes = 0
                if was_full:
                    self._wake()
                return taken
            if self._failure is not None:
                raise self._failure
            return []

    def confirm(self, lsn: int) -> None:
        """What is before this is durable: the server may forget it."""
        with self._changed:
            if lsn > self._confirmed:
                self._confirmed = lsn
                self._wake()

    def ask(self) -> None:
        """Have the server say how far it has come."""
        with self._changed:
            self._asks = True
            self._wake()

    def wake_up(self) -> None:
        """A `take` that waits returns."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def close(self) -> None:
        """Report for the last time, and disconnect."""
        with self._changed:
            self._closes = True
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        if not self._is_open:
            return
        # It may be full of calls that were not heard yet.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    # ------------------------------------------------------------ the stream's thread

    def _run(self) -> None:
        try:
            self._stream()
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify()
        finally:
            self._connection.close()
            with self._changed:
                self._is_open = False
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _stream(self) -> None:
        last_report = last_heard = last_room = time.monotonic()
        while True:
            with self._changed:
                closes, has_room = self._closes, self._bytes < MOST_BUFFERED
                asks, self._asks = self._asks, False
                confirmed = self._confirmed
            now = time.monotonic()
            is_due = now - last_report >= self._report_s
            if closes or asks or self._is_asked or confirmed > self._reported or is_due:
                self._report(confirmed, asks=asks or is_due)
                last_report = now
            if closes:
                return
            if has_room and self._receive():
                last_heard = now
                continue
            if has_room:
                last_room = now
            elif now - last_room > FULL_S:
                return
            else:
                last_heard = now
            if now - last_heard > SILENCE_S:
                raise psycopg_library().OperationalError(f"the server has said nothing for {SILENCE_S:g} s")
            self._wait(has_room, max(0.0, last_report + self._report_s - now))

    def _wait(self, has_room: bool, wait_s: float) -> None:
        # A report that was not sent whole is sent on when there is room.
        wanted = (select.POLLIN if has_room else 0) | (select.POLLOUT if self._pg.flush() else 0)
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if wanted:
            poll.register(self._pg.socket, wanted)
        found = {file for file, _ in poll.poll(wait_s * 1_000)}
        if self._wake_read in found:
            os.read(self._wake_read, 1 << 12)
        if self._pg.socket in found:
            self._pg.consume_input()

    def _receive(self) -> bool:
        """Take what has come; return whether that was something."""
        came: list[Received] = []
        size = 0
        while size < MOST_BUFFERED:
            length, data = self._pg.get_copy_data(1)
            if length == 0:
                break
            if length < 0:
                raise self._end()
            size += length
            came.append(self._heard(bytes(data)))
        if came:
            with self._changed:
                self._ready.extend(came)
                self._bytes += size
                self._changed.notify()
        return bool(came)

    def _heard(self, data: bytes) -> Received:
        if data[0] == ord("w"):
            _, start, _end, _time = _DATA.unpack_from(data)
            return Received(start, data[_DATA.size :])
        _, end, _time, asked = _KEEPALIVE.unpack(data)
        if asked:
            self._is_asked = True
            self._check_pings()
        self._received = max(self._received, end)
        return Received(end, None)

    def _check_pings(self) -> None:
        """Leave a server that shuts down.

        It waits for its readers to confirm all that there is, and asks them again and again meanwhile. Here that is
        durable when it is, which may take long: it is read when the server is back.
        """
        now = time.monotonic()
        self._pings.append(now)
        if len(self._pings) == _MOST_PINGS and now - self._pings[0] < _PINGS_S:
            raise psycopg_library().OperationalError("the server shuts down")

    def _report(self, confirmed: int, *, asks: bool) -> None:
        now_us = int(time.time() * 1_000_000) - EPOCH_US
        received = max(self._received, confirmed)
        self._pg.put_copy_data(_STATUS.pack(b"r", received, confirmed, confirmed, now_us, asks))
        self._reported, self._is_asked = confirmed, False

    def _end(self) -> Exception:
        """Return why the server has ended the stream."""
        result = self._pg.get_result()
        if result is not None and result.error_message:
            found: Exception = psycopg_library().errors.error_from_result(result, encoding="utf-8")
            return found
        return psycopg_library().OperationalError("the server has ended the stream")  # type: ignore[no-any-return]
