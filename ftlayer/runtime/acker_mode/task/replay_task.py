"""The vertex as an input of the topology: its replays go where the originals went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.errors import InvalidTopologyError
from ftlayer.records.ids import U64Array, pack_tries
from ftlayer.runtime.connectors.lane import misfit_schema
from ftlayer.runtime.handler import Handler, RecordIds
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.messages import EndOfStream
from ftlayer.runtime.task import actions as task_actions
from ftlayer.runtime.task.emitter import Emitter, columns_of, reports
from ftlayer.runtime.task.pipeline import unharmed
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Replay
from ftlayer.vertex.calls import Failure, Records


@dataclass(slots=True)
class _ReplayGroup:
    """Replays that may be taken while nothing else may."""

    number: int
    limit: int
    rows: int = 0


class StreamReplayTask:
    """`ftlayer.runtime.task.contract.ReplayTask`.

    The vertex registers a replay with its root as its one copy's id. This task is that copy's receiver: it
    emits copies of its own by all edges and acknowledges the root XOR their ids.
    """

    def __init__(
        self, graph: JobGraph, uid: str, subtask: int, handler: Handler, options: TopologyOptions
    ) -> None:
        replay = graph.vertex(uid).operators[0]
        if not isinstance(replay, Replay):
            raise InvalidTopologyError(f"{uid!r} is not a replay, but {type(replay).__name__}")
        self.uid = uid
        self.subtask = subtask
        self._replay = replay
        self._handler = handler
        self._emitter = Emitter(graph, uid, subtask, handler)
        routings = [edge.routing for edge in graph.edges_from(uid) if edge.routing is not None]
        self._routed = max(routings, default=-1) + 1
        self._options = options
        self._asked = False
        self._poll_again = False
        self._ending = False
        self._on_hold = False
        self._paused = False
        self._group: _ReplayGroup | None = None
        self._kept: tuple[Records, ...] = ()
        self._held = False

    def handle(self, event: task_actions.TaskEvent, now: Now) -> list[task_actions.Action]:
        match event:
            case task_actions.TaskStart() | task_actions.TimeCame() | messages.ReplayNow():
                return self._poll()
            case task_actions.Replayed(records, held):
                return self._answered(records, held, now)
            case task_actions.PeersAway():
                self._on_hold = True
                return []
            case task_actions.PeersThere():
                self._on_hold = False
                return self._poll()
            case messages.PauseIntake():
                self._paused, self._group, self._kept, self._held = True, None, (), False
                return []
            case messages.ResumeIntake():
                self._paused, self._group, self._kept, self._held = False, None, (), False
                return self._poll()
            case messages.AllowReplays(_, group, limit):
                self._group = _ReplayGroup(group, limit)
                return self._ask_for(self._group)
            case messages.LetOut(_, group):
                return self._let_out(group)
            case messages.EndReplays():
                # Behind the answer that is under way.
                self._ending = True
                return [] if self._asked else self._ended()
            case task_actions.RowsPersisted():
                return []
            case _:
                raise task_actions.refused(self.uid, event)

    def held_roots(self) -> U64Array:
        """Return the root of a replay that is kept; others are sent as they come."""
        return np.concatenate([np.zeros(0, np.uint64), *(batch.roots for batch in self._kept)])

    @property
    def is_asking(self) -> bool:
        return self._asked

    def _poll(self) -> list[task_actions.Action]:
        """Ask, now or when the answer that is under way has come (it may be older than what is due now)."""
        if self._group is not None and self._held and not self._on_hold:
            return self._ask_for(self._group)
        if self._ending or self._paused or self._on_hold:
            return []
        if self._asked:
            self._poll_again = True
            return []
        return self._ask()

    def _answered(self, records: tuple[Records, ...], held: bool, now: Now) -> list[task_actions.Action]:
        """Send the records, fail those that do not fit the program, and ask for more if there may be more.

        ``held``: a circuit breaker holds what there may be beyond.
        """
        self._asked = False
        rows = sum(batch.payload.num_rows for batch in records)
        if self._paused:
            return self._of_group(records, rows, held, now)
        return self._sent(records) + self._go_on(rows >= self._options.batch_rows, now)

    def _let_out(self, group: int) -> list[task_actions.Action]:
        if self._group is None or self._group.number != group:
            return []
        kept, self._kept = self._kept, ()
        return self._sent(kept)

    def _of_group(
        self, records: tuple[Records, ...], rows: int, held: bool, now: Now
    ) -> list[task_actions.Action]:
        group = self._group
        if group is None:
            return []  # asked for before the pause: they stay pending, and are recalled
        if held and not rows:
            # There are more: that the group has come to its end would be said too early.
            self._held = True
            return [task_actions.WakeAt(now.mono_ms + self._options.replay_poll_ms)]
        group.rows += rows
        if group.limit == 1 and rows:
            self._kept = records
            (only,) = records
            return [
                task_actions.ReplaysOut(self.uid, group.number, 1, int(only.roots[0]), int(only.origins[0]))
            ]
        actions = self._sent(records)
        if rows and group.rows < group.limit and not self._on_hold:
            return actions + self._ask_for(group)
        return [*actions, task_actions.ReplaysOut(self.uid, group.number, group.rows)]

    def _ask_for(self, group: _ReplayGroup) -> list[task_actions.Action]:
        self._asked, self._held = True, False
        return [
            task_actions.AskReplays(
                self._replay.stream, min(group.limit - group.rows, self._options.batch_rows)
            )
        ]

    def _sent(self, records: tuple[Records, ...]) -> list[task_actions.Action]:
        actions: list[task_actions.Action] = []
        failures: list[Failure] = []
        for batch in records:
            misfit = self._misfit(batch)
            if misfit:
                uid = self._replay.of
                failures += [Failure(root, misfit, uid, fatal=True) for root in batch.roots.tolist()]
                continue
            tries = pack_tries(batch.attempts, batch.first_failed_ms)
            lineage = RecordIds(batch.roots, batch.roots, None, batch.origins, tries)
            emission = self._emitter.replayed(batch.payload, lineage, batch.key_hashes, edited=batch.edited)
            actions.extend(emission.sends)
            if emission.failures:
                self._handler.xor.fail(lineage, emission.failures)
            self._handler.xor.settle(
                lineage, emission.owed, unharmed(batch.payload.num_rows, emission.failures)
            )
        actions.extend(reports(self._handler.xor))
        if failures:
            actions.append(task_actions.FailRoots(tuple(failures)))
        return actions

    def _go_on(self, full: bool, now: Now) -> list[task_actions.Action]:
        if self._ending:
            return self._ended()
        if self._on_hold:
            return []
        if full or self._poll_again:
            return self._ask()
        return [task_actions.WakeAt(now.mono_ms + self._options.replay_poll_ms)]

    def _ask(self) -> list[task_actions.Action]:
        self._asked, self._poll_again = True, False
        return [task_actions.AskReplays(self._replay.stream, self._options.batch_rows)]

    def _ended(self) -> list[task_actions.Action]:
        return [*self._emitter.mark(EndOfStream()), task_actions.TaskEnded()]

    def _misfit(self, batch: Records) -> str:
        """Say why stored records cannot be sent by the edges there are now; "" if they can."""
        stored, declared = batch.payload.schema, self._replay.schema
        advice = "the program was changed since they were stored: run them with the one that stored them"
        if stored.equals(misfit_schema(declared)):
            return (
                f"this is what a row looked like that did not fit the schema of source {self._replay.of!r} then "
                f"({_text(declared)} now): it cannot be sent again. Mend the source, or its schema, and let it "
                "give the row anew"
            )
        if not stored.equals(declared):
            return (
                f"stored with the schema {_text(stored)}, and {self._replay.of!r} now has {_text(declared)}; "
                f"{advice}"
            )
        hashes = batch.key_hashes
        routed = 0 if hashes is None else columns_of(hashes)
        if routed != self._routed:
            return (
                f"stored with {routed} routing values, and the edges of {self._replay.of!r} now need "
                f"{self._routed}; {advice}"
            )
        return ""


def _text(schema: pa.Schema) -> str:
    return "(" + ", ".join(str(field) for field in schema) + ")"
