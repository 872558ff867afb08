"""Reading the changes of a table from a replication slot."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ftlayer.clients.postgres import connect, is_away, psycopg_library, reason
from ftlayer.clients.reconnecting import Reconnecting
from ftlayer.errors import ConfigError, SourceError
from ftlayer.sources.postgres.catalog import TableDescription, TableName, describe
from ftlayer.sources.postgres.change_positions import ChangePlace, CopyPlace, pack_place, unpack_place
from ftlayer.sources.postgres.change_rows import change_batch
from ftlayer.sources.postgres.initial_copy import InitialCopy
from ftlayer.sources.postgres.pgoutput import PgOutputError, parse
from ftlayer.sources.postgres.slots import (
    SlotState,
    check_place,
    copy_slot,
    drop_slot,
    find_slot,
    identify,
    lsn_text,
    make_slot,
    prepare_publication,
)
from ftlayer.sources.postgres.stream import REPORT_S, ReplicationStream
from ftlayer.sources.postgres.transactions import ChangedRow, LogPlace, Transactions
from ftlayer.topology.queues import Fetched

logger = logging.getLogger(__name__)

MOST_COUNTED = 10_000
"""Changes that wait are counted up to here."""

COUNT_FIRST_S, COUNT_S = 10.0, 0.2
"""How long the server may take to send all that there is: when it has just been connected to, and later."""

LINGER_S = 0.05
"""A fetch waits this long for more changes behind the first."""

_ASK_S = 0.05

_TIMEOUT = "SELECT setting::int FROM pg_settings WHERE name = 'wal_sender_timeout'"
_END = """
    SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END)
        - '0/0'::pg_lsn
"""


@dataclass(frozen=True)
class ChangesOptions:
    """What a reader has to know of its source. ``aside``: the slot of an initial copy that is not durable yet."""

    dsn: str = field(repr=False)
    place: str
    table: TableName
    slot: str
    aside: str
    publication: str
    copies: bool
    whole_rows: int
    patience_ms: int


@dataclass(frozen=True, slots=True)
class ChangesReceipt:
    """Of a fetch. ``end``: the server may forget what is before this; None: no more than before."""

    turn: int
    end: int | None


class PostgresChangesReader:
    """`QueueReader` of a slot.

    An initial copy is made by a slot beside (``aside``), whose changes are read behind it. When the copy is durable,
    that slot is copied to the real name: a slot of that name says that there is nothing to be copied any more.
    """

    def __init__(
        self,
        options: ChangesOptions,
        schema: pa.Schema,
        subtask: int,
        positions: Mapping[int, bytes],
        *,
        stored: bool,
    ) -> None:
        self._options = options
        self._schema = schema
        self._columns = schema.names[5:-2]
        self._subtask = subtask
        self._away = Reconnecting(options.place, options.patience_ms)
        self._system: str | None = None
        self._place: ChangePlace | None = None
        if (position := positions.get(subtask)) is not None:
            self._system, self._place = unpack_place(options.slot, position, options.place)
        # Whether what the reader before this one has fetched is not durable, for all that is known.
        self._is_held = self._place is not None and not stored
        self._confirmed = self._place.lsn if stored and isinstance(self._place, LogPlace) else 0
        self._turn = self._durable = 0
        self._copied_turn = 0
        self._replication: Any = None
        self._control: Any = None
        self._copy: InitialCopy | None = None
        self._stream: ReplicationStream | None = None
        self._is_aside = False
        self._transactions = self._new_transactions(options.table)
        self._reached = 0
        self._is_all = False

    # ------------------------------------------------------------ what is called

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        """See `QueueReader.fetch`. Raises `SourceError` for what is no matter of the connection."""
        wait_s -= self._away.wait(wait_s)
        if self._away.is_early:
            return None
        try:
            self._begin()
            fetched = (
                self._fetch_changes(max_rows, wait_s) if self._copy is None else self._fetch_copied(max_rows)
            )
        except psycopg_library().Error as error:
            self._failed(error)
            return None
        self._away.works()
        return fetched

    def acknowledge(self, receipts: Sequence[ChangesReceipt]) -> None:
        for receipt in receipts:
            self._is_held = False
            self._durable = max(self._durable, receipt.turn)
            self._confirmed = max(self._confirmed, receipt.end or 0)
        self._confirm()
        if self._is_aside and self._is_copy_durable:
            # It is read on by its own name.
            self._disconnect()

    def waiting(self) -> int | None:
        """See `QueueReader.waiting`. Not known while the table is copied, and for more than 10,000 changes."""
        if self._away.is_early:
            return None
        try:
            self._begin()
            if self._copy is not None or not self._has_reached_end():
                return None
        except psycopg_library().Error as error:
            self._failed(error)
            return None
        return self._transactions.rows

    @property
    def is_away(self) -> bool:
        return self._away.is_away

    def wake_up(self) -> None:
        if (stream := self._stream) is not None:
            stream.wake_up()

    def close(self) -> None:
        self._disconnect()

    # ------------------------------------------------------------ connecting

    def _begin(self) -> None:
        """Connect, unless that is done: to stream, or to copy the table first."""
        if self._stream is not None and self._stream.is_over:
            self._disconnect()
        if self._copy is not None or self._stream is not None:
            return
        options = self._options
        self._replication = connect(options.dsn, replication=True)
        system, end = identify(self._replication)
        if self._place is not None and self._system is not None:
            check_place(options.slot, system, self._system, self._place.lsn, end)
        self._system = system
        with connect(options.dsn) as connection:
            (timeout_ms,) = connection.execute(_TIMEOUT).fetchone()
            table = describe(connection, options.table)
            prepare_publication(connection, options.publication, table)
            slot = self._slot_to_stream(connection, table)
        if slot is not None:
            # Three times before the server ends a connection that says nothing; 0: it does not.
            self._start(slot, table.name, min(REPORT_S, timeout_ms / 3_000 or REPORT_S))

    def _slot_to_stream(self, connection: Any, table: TableDescription) -> SlotState | None:
        """Return the slot to read; None: the table is copied first."""
        options, place = self._options, self._place
        there, aside = (find_slot(connection, name) for name in (options.slot, options.aside))
        if place is None or (isinstance(place, CopyPlace) and not place.is_over):
            if there is not None and place is None:
                return there
            if there is not None or not options.copies:
                if place is not None:
                    raise ConfigError(
                        f"{options.place}: the initial copy was not completed: read on with initial='copy', and "
                        f"without a slot {options.slot!r}"
                    )
                made = make_slot(self._replication, options.slot, exports=False)
                return SlotState(made.name, made.lsn)
            if aside is not None:
                drop_slot(connection, options.aside)
            self._copy = InitialCopy(options.dsn, self._replication, options.aside, table.name, self._columns)
            return None
        if there is None and aside is None:
            raise SourceError(
                f"{options.place}: the slot is not there any more: changes behind {lsn_text(place.lsn)} are lost. To "
                "begin anew give the source a uid of its own, with initial='copy' if the table is to be read again"
            )
        if there is None:
            if not self._is_copy_durable:
                return aside
            copy_slot(connection, options.aside, options.slot)
            there = find_slot(connection, options.slot)
        if aside is not None:
            drop_slot(connection, options.aside)
        return there

    def _start(self, slot: SlotState, table: TableName, report_s: float) -> None:
        place = self._place
        start = slot.confirmed if place is None else place.lsn
        self._is_aside = slot.name == self._options.aside
        self._transactions = self._new_transactions(table)
        self._reached = 0
        self._confirmed = max(self._confirmed, slot.confirmed)
        self._stream = ReplicationStream(
            self._replication, slot.name, self._options.publication, start, self._confirmed, report_s
        )

    def _new_transactions(self, table: TableName) -> Transactions:
        start = self._place if isinstance(self._place, LogPlace) else None
        return Transactions(table.schema, table.table, self._columns, start, self._options.whole_rows)

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

    def _failed(self, error: Exception) -> None:
        """Connect again later, or raise."""
        self._disconnect()
        if not is_away(error):
            raise SourceError(f"{self._options.place}: {reason(error)}") from error
        self._away.failed(error)

    # ------------------------------------------------------------ the initial copy

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
            logger.info("%s: %d rows were copied", self._options.place, copy.rows)
            self._disconnect()
        return fetched

    # ------------------------------------------------------------ changes

    def _fetch_changes(self, max_rows: int, wait_s: float) -> Fetched | None:
        until = time.monotonic() + wait_s
        if self._transactions.rows < max_rows:
            self._receive(0.0)
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

    def _fetched(self, rows: list[ChangedRow], end: int | None) -> Fetched:
        assert self._system is not None
        assert self._place is not None
        self._turn += 1
        return Fetched(
            change_batch(rows, self._schema),
            self._subtask,
            pack_place(self._options.slot, self._system, self._place),
            ChangesReceipt(self._turn, end),
        )

    def _receive(self, wait_s: float) -> bool:
        """Take what was received; return whether there was something."""
        assert self._stream is not None
        received = self._stream.take(wait_s)
        for lsn, data in received:
            if data is None:
                self._transactions.reached(lsn)
                self._reached, self._is_all = lsn, True
                continue
            self._is_all = False
            try:
                self._transactions.feed(parse(data), len(data))
            except PgOutputError as error:
                raise SourceError(f"{self._options.place}: the server sent {error}") from error
        if received:
            self._confirm()
        return bool(received)

    def _confirm(self) -> None:
        """Tell the server what is durable; what it has sent without a change of the table, too."""
        if self._stream is None:
            return
        if not self._is_held and self._durable == self._turn:
            self._confirmed = max(self._confirmed, self._transactions.passed)
        self._stream.confirm(self._confirmed)

    def _has_reached_end(self) -> bool:
        """Receive until the server has sent all that there is now; False: that is too much, or takes too long."""
        if self._control is None:
            self._control = connect(self._options.dsn)
        (end,) = self._control.execute(_END).fetchone()
        give_up = time.monotonic() + (COUNT_S if self._reached else COUNT_FIRST_S)
        while self._reached < end:
            if self._transactions.rows >= MOST_COUNTED or time.monotonic() > give_up:
                return False
            assert self._stream is not None
            self._stream.ask()
            self._receive(_ASK_S)
        return True
