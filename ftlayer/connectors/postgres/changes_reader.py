"""`PostgresChangesSource`: the changes of a table, from a replication slot."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgpack
import pyarrow as pa

from ftlayer.common.checks import Duration, check_int, check_text, duration_ms, known_options, shown
from ftlayer.common.printable import hides_secrets, secrets_of
from ftlayer.connectors.connections import ServerReader
from ftlayer.connectors.postgres import catalog, transactions
from ftlayer.connectors.queue_stream import pack_position, unpack_position
from ftlayer.errors import ConfigError, SourceChangedError, SourceError
from ftlayer.topology.operators import Fetched, Member, Queue

logger = logging.getLogger(__name__)


_KIND = "postgres-changes"


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """So many rows of an initial copy were read; ``is_over``: all of them. Each copy has a ``token`` of its own.

    ``lsn``: what comes behind the copy is behind this place of the log.
    """

    token: bytes
    rows: int
    lsn: int
    is_over: bool


ChangePlace = transactions.LogPlace | CopyPlace


def pack_place(slot: str, system: str, place: ChangePlace, oid: int) -> bytes:
    if isinstance(place, transactions.LogPlace):
        state: list[object] = [system, *place]
    else:
        state = [system, place.token, place.rows, place.lsn, place.is_over]
    return pack_position((_KIND, slot), msgpack.packb([*state, oid]))


def unpack_place(slot: str, position: bytes, of: str) -> tuple[str, ChangePlace, int]:
    """Return what `pack_place` was given; `ConfigError` for the position of another source. ``of`` names this one."""
    (packed,) = unpack_position(position, (_KIND, slot), of)
    system, *state, oid = msgpack.unpackb(packed)
    return (
        system,
        transactions.LogPlace(*state)
        if len(state) == len(transactions.LogPlace._fields)
        else CopyPlace(*state),
        oid,
    )


READ_ROWS = 10_000
"""The cursor is read so many rows at a time."""

OPERATION = "read"


class InitialCopy:
    """Reads a table once, as it was when the slot was made. It holds two connections until it is closed."""

    def __init__(
        self, dsn: str, replication: Any, slot: str, table: catalog.TableName, columns: Sequence[str]
    ) -> None:
        """Make the slot. ``replication`` is used for nothing else until this is closed."""
        self.made = catalog.make_slot(replication, slot, exports=True)
        self.token = secrets.token_bytes(8)
        self.rows = 0
        self._connection = catalog.connect(dsn)
        self._ahead: list[tuple[str | None, ...]] = []
        self.is_over = False
        try:
            self._open(table, columns)
        except BaseException:
            self.close()
            raise

    def _open(self, table: catalog.TableName, columns: Sequence[str]) -> None:
        sql = catalog.psycopg_library().sql
        texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in columns)
        self._connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        self._connection.execute(
            sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self.made.snapshot))
        )
        statement = sql.SQL("SELECT {} FROM {}").format(texts, sql.SQL(table.quoted))
        self._cursor = self._connection.cursor("ftlayer")
        self._cursor.execute(statement)
        self._read(1)

    def take(self, max_rows: int) -> list[transactions.ChangedRow]:
        self._read(max_rows + 1)
        taken, self._ahead = self._ahead[:max_rows], self._ahead[max_rows:]
        first = self.rows + 1
        self.rows += len(taken)
        self.is_over = not self._ahead
        return [
            transactions.ChangedRow(OPERATION, self.made.lsn, place, None, None, columns)
            for place, columns in enumerate(taken, first)
        ]

    def close(self) -> None:
        self._connection.close()

    def _read(self, rows: int) -> None:
        while len(self._ahead) < rows and (more := self._cursor.fetchmany(max(rows, READ_ROWS))):
            self._ahead += more
        self.is_over = not self._ahead


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
        sql = catalog.psycopg_library().sql
        command = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {})"
        ).format(
            sql.Identifier(slot),
            sql.SQL(catalog.lsn_text(start)),
            sql.Literal(sql.Identifier(publication).as_string(None)),
        )
        result = self._pg.exec_(command.as_string(connection).encode())
        if result.status != catalog.psycopg_library().pq.ExecStatus.COPY_BOTH:
            raise catalog.psycopg_library().errors.error_from_result(result, encoding="utf-8")
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
        with self._changed:
            self._asks = True
            self._wake()

    def wake_up(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def close(self) -> None:
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
                raise catalog.psycopg_library().OperationalError(
                    f"the server has said nothing for {SILENCE_S:g} s"
                )
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
            raise catalog.psycopg_library().OperationalError("the server shuts down")

    def _report(self, confirmed: int, *, asks: bool) -> None:
        now_us = int(time.time() * 1_000_000) - transactions.EPOCH_US
        received = max(self._received, confirmed)
        self._pg.put_copy_data(_STATUS.pack(b"r", received, confirmed, confirmed, now_us, asks))
        self._reported, self._is_asked = confirmed, False

    def _end(self) -> Exception:
        result = self._pg.get_result()
        if result is not None and result.error_message:
            found: Exception = catalog.psycopg_library().errors.error_from_result(result, encoding="utf-8")
            return found
        return catalog.psycopg_library().OperationalError("the server has ended the stream")  # type: ignore[no-any-return]


MOST_COUNTED = 10_000
"""Changes that wait are counted up to here."""

COUNT_FIRST_S, COUNT_S = 10.0, 0.2
"""How long the server may take to send all that there is: when it has just been connected to, and later."""

LINGER_S = 0.05
"""A fetch waits this long for more changes behind the first."""

_ASK_S = 0.05

LOOK_S = 5.0
"""The catalog is asked so often what has become of the table."""

_ALL_KINDS = "insert, update, delete, truncate"

_TIMEOUT = "SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout'"
_END = """
    SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)
        - '0/0'::pg_lsn
"""


@dataclass(frozen=True, slots=True)
class ChangesReceipt:
    """Of a fetch. ``end``: the server may forget what is before this; None: no more than before."""

    turn: int
    end: int | None


@hides_secrets(lambda reader: reader._secrets)
class PostgresChangesReader(ServerReader):
    """Of a slot.

    An initial copy is made by a slot beside (``aside``), whose changes are read behind it. When the copy is durable,
    that slot is copied to the real name: a slot of that name says that there is nothing to be copied any more.
    """

    def __init__(
        self,
        source: PostgresChangesSource,
        schema: pa.Schema,
        subtask: int,
        positions: Mapping[int, bytes],
        *,
        stored: bool,
    ) -> None:
        errors, hidden = (catalog.psycopg_library().Error,), secrets_of(source.dsn)
        super().__init__(source.place, source.patience_ms, hidden, errors, catalog.is_away)
        self._source = source
        self._schema = schema
        self._columns = schema.names[5:-2]
        self._subtask = subtask
        self._system: str | None = None
        self._place: ChangePlace | None = None
        # What is read is known by its oid: names are given to other tables.
        self._oid = 0
        if (position := positions.get(subtask)) is not None:
            self._system, self._place, self._oid = unpack_place(source.slot, position, source.place)
        # Whether what the reader before this one has fetched is not durable, for all that is known.
        self._is_held = self._place is not None and not stored
        self._confirmed = self._place.lsn if stored and isinstance(self._place, transactions.LogPlace) else 0
        self._turn = self._durable = 0
        self._copied_turn = 0
        self._replication: Any = None
        self._control: Any = None
        self._copy: InitialCopy | None = None
        self._stream: ReplicationStream | None = None
        self._is_aside = False
        self._transactions = self._new_transactions()
        self._reached = 0
        self._is_all = False
        self._look_at_s = 0.0
        self._look_again_at = 0
        self._told: dict[str, object] = {}

    def acknowledge(self, receipts: Sequence[ChangesReceipt]) -> None:
        super().acknowledge(receipts)
        if self._is_aside and self._is_copy_durable:
            # It is read on by its own name.
            self._disconnect()

    def wake_up(self) -> None:
        if (stream := self._stream) is not None:
            stream.wake_up()

    def _connect(self) -> None:
        """Connect, unless that is done: to stream, or to copy the table first."""
        if self._stream is not None and self._stream.is_over:
            self._disconnect()
        if self._copy is not None or self._stream is not None:
            return
        source = self._source
        self._replication = catalog.connect(source.dsn, replication=True)
        system, end = catalog.identify(self._replication)
        if self._place is not None and self._system is not None:
            catalog.check_place(source.slot, system, self._system, self._place.lsn, end)
        self._system = system
        with catalog.connect(source.dsn) as connection:
            (timeout_ms,) = connection.execute(_TIMEOUT).fetchone()
            table = catalog.describe(connection, source.table)
            if self._oid in (0, table.oid) or self._is_copied_anew:
                self._oid = table.oid
                catalog.prepare_publication(connection, source.publication, table)
            slot = self._slot_to_stream(connection, table)
        if slot is not None:
            # Three times before the server ends a connection that says nothing; 0: it does not.
            self._start(slot, min(REPORT_S, timeout_ms / 3_000 or REPORT_S))

    @property
    def _is_copied_anew(self) -> bool:
        return self._place is None or (isinstance(self._place, CopyPlace) and not self._place.is_over)

    def _slot_to_stream(self, connection: Any, table: catalog.TableDescription) -> catalog.Slot | None:
        """Return the slot to read; None: the table is copied first."""
        source, place = self._source, self._place
        there, aside = (catalog.find_slot(connection, name) for name in (source.slot, source.aside))
        if self._is_copied_anew:
            if there is not None and place is None:
                return there
            if there is not None or not source.copies:
                if place is not None:
                    raise ConfigError(
                        f"{source.place}: the initial copy was not completed: read on with initial='copy', and "
                        f"without a slot {source.slot!r}"
                    )
                return catalog.make_slot(self._replication, source.slot, exports=False)
            if aside is not None:
                catalog.drop_slot(connection, source.aside)
            self._copy = InitialCopy(source.dsn, self._replication, source.aside, table.name, self._columns)
            return None
        assert place is not None
        if there is None and aside is None:
            raise SourceError(
                f"{source.place}: the slot is not there any more: changes behind {catalog.lsn_text(place.lsn)} are "
                "lost. To begin anew give the source a uid of its own, with initial='copy' if the table is to be read "
                "again"
            )
        if there is None:
            if not self._is_copy_durable:
                return aside
            catalog.copy_slot(connection, source.aside, source.slot)
            there = catalog.find_slot(connection, source.slot)
        if aside is not None:
            catalog.drop_slot(connection, source.aside)
        return there

    def _start(self, slot: catalog.Slot, report_s: float) -> None:
        place = self._place
        start = slot.lsn if place is None else place.lsn
        self._is_aside = slot.name == self._source.aside
        self._transactions = self._new_transactions()
        self._reached = 0
        self._look_at_s = self._look_again_at = 0
        self._confirmed = max(self._confirmed, slot.lsn)
        self._stream = ReplicationStream(
            self._replication, slot.name, self._source.publication, start, self._confirmed, report_s
        )

    def _new_transactions(self) -> transactions.Transactions:
        start = self._place if isinstance(self._place, transactions.LogPlace) else None
        return transactions.Transactions(self._oid, self._columns, start, self._source.whole_rows)

    def _disconnect(self) -> None:
        copy, self._copy = self._copy, None
        stream, self._stream = self._stream, None
        replication, self._replication = self._replication, None
        control, self._control = self._control, None
        if copy is not None:
            copy.close()
        if stream is not None:
            stream.close()
        for connection in (replication, control):
            if connection is not None:
                connection.close()

    def _refusal(self, error: Exception) -> SourceError:
        if isinstance(error, catalog.psycopg_library().errors.UndefinedObject):
            return SourceChangedError(
                f"{self._source.place}: publication {self._source.publication!r} was dropped: what was changed while "
                f"there is none cannot be had from this slot ({catalog.reason(error)}); {catalog.ANEW}"
            )
        return SourceError(f"{self._source.place}: {catalog.reason(error)}")

    @property
    def _is_copy_durable(self) -> bool:
        return not self._is_held and self._durable >= self._copied_turn

    def _fetch_copied(self, max_rows: int) -> Fetched | None:
        copy = self._copy
        assert copy is not None
        rows = copy.take(max_rows)
        is_over = copy.is_over
        self._place = CopyPlace(copy.token, copy.rows, copy.made.lsn, is_over)
        fetched = self._fetched(rows, None) if rows else None
        self._copied_turn = self._turn
        if is_over:
            logger.info("%s: %d rows were copied", self._source.place, copy.rows)
            self._disconnect()
        return fetched

    def _count(self) -> int | None:
        """See `waiting`. Not known while the table is copied, and for more than 10,000 changes."""
        if self._copy is not None or not self._has_reached_end():
            return None
        return self._transactions.rows

    def _fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        return self._fetch_changes(max_rows, wait_s) if self._copy is None else self._fetch_copied(max_rows)

    def _fetch_changes(self, max_rows: int, wait_s: float) -> Fetched | None:
        until = time.monotonic() + wait_s
        if self._transactions.rows < max_rows:
            self._receive(0.0)
        self._look_at_table()
        while not self._transactions.rows:
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._receive(left_s):
                return None
        # Others follow, unless the server has said that there are none.
        until = time.monotonic() + min(wait_s, LINGER_S)
        while self._transactions.rows < max_rows and not self._is_all:
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._receive(left_s):
                break
        unit = self._transactions.take(max_rows)
        assert unit is not None
        self._place = unit.behind
        return self._fetched(unit.rows, unit.end)

    def _look_at_table(self) -> None:
        """Look whether the table is still the one whose changes are sent: the server does not say when it is not.

        Raises `SourceChangedError`, once all that was changed before is taken.
        """
        if self._look_again_at and (self._reached < self._look_again_at or self._transactions.rows):
            assert self._stream is not None
            self._stream.ask()
            return
        if not self._look_again_at and time.monotonic() < self._look_at_s:
            return
        source = self._source
        if self._control is None:
            self._control = catalog.connect(source.dsn)
        (end,) = self._control.execute(_END).fetchone()
        state = catalog.state_of(self._control, self._oid, source.table, source.publication)
        self._look_at_s = time.monotonic() + LOOK_S
        lost = catalog.lost_table(state, self._oid, source.table, source.publication)
        if lost and self._look_again_at:
            raise SourceChangedError(f"{source.place}: {lost}")
        self._look_again_at = end if lost else 0
        if state.name is None or lost:
            return
        self._tell_once(
            "name",
            None if state.is_named else state.name,
            f"the table is called {state.name.quoted} now; it is read on, and has to be given by this name at the next "
            "start",
        )
        self._tell_once(
            "publishes",
            None if state.publishes == _ALL_KINDS else state.publishes,
            f"publication {source.publication!r} publishes of it just: {state.publishes}; nothing else comes",
        )

    def _tell_once(self, kind: str, what: object, text: str) -> None:
        """Warn of what is other than it was when this was told last; None: all is well."""
        if what is not None and what != self._told.get(kind):
            logger.warning("%s: %s", self._source.place, text)
        self._told[kind] = what

    def _fetched(self, rows: list[transactions.ChangedRow], end: int | None) -> Fetched:
        assert self._system is not None
        assert self._place is not None
        self._turn += 1
        return Fetched(
            catalog.change_batch(rows, self._schema),
            self._subtask,
            pack_place(self._source.slot, self._system, self._place, self._oid),
            ChangesReceipt(self._turn, end),
        )

    def _receive(self, wait_s: float) -> bool:
        assert self._stream is not None
        received = self._stream.take(wait_s)
        for lsn, data in received:
            if data is None:
                self._transactions.reached(lsn)
                self._reached, self._is_all = lsn, True
                continue
            self._is_all = False
            try:
                self._transactions.feed(transactions.parse(data), len(data))
            except transactions.PgOutputError as error:
                raise SourceError(f"{self._source.place}: the server sent {error}") from error
        if received:
            self._send_acknowledgements()
            missing = self._transactions.missing
            self._tell_once(
                "missing",
                missing or None,
                f"columns {', '.join(missing)} are not there any more (dropped, renamed, or left out of what the "
                "publication publishes): they are null from here on",
            )
        return bool(received)

    def _note_durable(self, receipts: Sequence[ChangesReceipt]) -> None:
        for receipt in receipts:
            self._is_held = False
            self._durable = max(self._durable, receipt.turn)
            self._confirmed = max(self._confirmed, receipt.end or 0)

    def _send_acknowledgements(self) -> None:
        """Tell the server what is durable; what it has sent without a change of the table, too."""
        if self._stream is None:
            return
        if not self._is_held and self._durable == self._turn:
            self._confirmed = max(self._confirmed, self._transactions.passed)
        self._stream.confirm(self._confirmed)

    def _has_reached_end(self) -> bool:
        """Receive until the server has sent all that there is now; False: that is too much, or takes too long."""
        if self._control is None:
            self._control = catalog.connect(self._source.dsn)
        (end,) = self._control.execute(_END).fetchone()
        give_up = time.monotonic() + (COUNT_S if self._reached else COUNT_FIRST_S)
        while self._reached < end:
            if self._transactions.rows >= MOST_COUNTED or time.monotonic() > give_up:
                return False
            assert self._stream is not None
            self._stream.ask()
            self._receive(_ASK_S)
        return True


INITIAL = ("none", "copy")
WHOLE_ROWS = 10_000

_SLOT = re.compile(r"[a-z0-9_]{1,55}")
_ASIDE = "_initial"


@known_options
@hides_secrets(lambda source: secrets_of(source.dsn))
class PostgresChangesSource(Queue):
    """Reads the changes of a table, in the order of their transactions, from a replication slot (``pgoutput``).

    The slot is confirmed behind what is durable: stored in the vertex, in a completed checkpoint, or in the spool.
    Until then the server keeps the log, and sends it again after a failure; what was stored already is left out by its
    place in the log. So each change enters a topology once. A transaction comes in one piece, unless it has more than
    ``max_transaction_rows`` changes of the table, or 16 MiB of them.

    A row has ``_operation`` (insert, update, delete, truncate; read: of the initial copy), ``_lsn`` of the commit and
    ``_sequence``, which change of its transaction it is: together they are unique, and grow; ``_transaction``,
    ``_commit_time``; then the table's columns as they are afterwards, or, of a row that is gone, as they were;
    ``_before``, a struct of the columns as they were, as far as the replica identity tells (others are null), null for
    none; ``_unchanged``, names of columns whose large value was not sent, as the update left it alone: they are null.

    One subtask reads.
    """

    most_subtasks = 1

    def __init__(
        self,
        dsn: str,
        table: str,
        slot: str,
        *,
        publication: str = "",
        columns: Sequence[str] = (),
        as_text: Sequence[str] = (),
        initial: str = "none",
        max_transaction_rows: int = WHOLE_ROWS,
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read, or asked for its `schema`.

        Args:
            dsn: connection string or URL, as libpq takes it; the role needs ``REPLICATION``. Driver and slots connect.
            table: ``"table"`` or ``"schema.table"``.
            slot: name of the replication slot; made if it is missing, and never removed. No one else may read it.
            publication: has the table; made for it if it is missing. "": it is called as the slot is.
            columns: of the table; none: all that there are when the source is given to a topology or a query.
            as_text: columns that are texts, as PostgreSQL writes them, whatever their type is.
            initial: what comes first when the slot is made: ``"none"``: changes from then on; ``"copy"``: the rows
                that the table has then, and the changes from then on.
            max_transaction_rows: a transaction with more changes of the table comes in pieces; no more than the
                topology's ``max_pending``.
            reconnect_timeout: the source fails when the server was away, or another had the slot, for this long.

        Raises `ConfigError` if psycopg is missing, and for an option that will not do.
        """
        catalog.check_dsn(dsn)
        if not isinstance(slot, str) or not _SLOT.fullmatch(slot):
            raise ConfigError(f"slot: expected up to 55 of a-z, 0-9 and _, got {shown(slot)}")
        if publication != "":
            check_text(publication, "publication", "the name of a publication")
        if initial not in INITIAL:
            raise ConfigError(f"initial: expected 'none' or 'copy', got {shown(initial)}")
        check_int(max_transaction_rows, "max_transaction_rows", least=1)
        self.dsn = dsn
        self.table = catalog.named(table)
        self.slot = slot
        self.aside = slot + _ASIDE
        """The slot of an initial copy that is not durable yet."""
        self.publication = publication or slot
        self._wanted = catalog.check_names(columns, "columns")
        self._as_text = catalog.check_names(as_text, "as_text")
        self.copies = initial == "copy"
        self.whole_rows = max_transaction_rows
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of changes; the server is asked for the table's columns.

        Raises `ConfigError` for a table or column that is not there, `SourceError` if the server cannot be reached.
        """
        try:
            with catalog.connect(self.dsn) as connection:
                table = catalog.describe(connection, self.table)
        except catalog.psycopg_library().Error as error:
            raise SourceError(
                f"{self.place}: its columns cannot be asked for: {catalog.reason(error)}"
            ) from error
        wanted = self._wanted or [column.name for column in table.columns if not column.is_generated]
        return catalog.schema_of_changes(table.fields(wanted, self._as_text))

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> PostgresChangesReader:
        if member.parallelism > 1:
            raise ConfigError(
                f"parallelism: {self.place} is read by one subtask, and there are {member.parallelism}: a slot has one "
                "reader"
            )
        return PostgresChangesReader(self, self.schema, member.subtask, positions, stored=stored)

    @property
    def place(self) -> str:
        return f"slot {self.slot!r}, table {self.table.quoted} of {catalog.database_of(self.dsn)}"
