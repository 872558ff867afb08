"""From the plan of a chain with a failure policy to what makes its records fail alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import cast

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.failure_policy import FailurePolicy
from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.snapshots import SubtaskRestore
from ftlayer.functions.keyed import MapTable
from ftlayer.functions.undo.log import UndoLog
from ftlayer.partitioning.key_groups import groups_of
from ftlayer.runtime.barrier_mode.task.contract import CommittingSinkBody
from ftlayer.runtime.barrier_mode.task.failing.alone import RecordsAlone, ToChannels
from ftlayer.runtime.barrier_mode.task.failing.attempts import RecordAttempts
from ftlayer.runtime.barrier_mode.task.failing.breakers import Breakers
from ftlayer.runtime.barrier_mode.task.failing.keys import DRAWN_KEY, DrawnKeys, HeadKeys
from ftlayer.runtime.barrier_mode.task.failing.sink import RowsToSink
from ftlayer.runtime.barrier_mode.task.failing.timers import TimersAlone
from ftlayer.runtime.barrier_mode.task.failing.waiting import WAITING_TABLE, WaitingRecords
from ftlayer.runtime.barrier_mode.task.letter_rows import letter_rows
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.chain_plan import ChainPlan, RowsAlone
from ftlayer.runtime.task.contract import SinkBody
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.outlet import ChannelOutlet
from ftlayer.runtime.task.pipeline import OperatorChain
from ftlayer.runtime.task.suspects import Suspects
from ftlayer.state.contract import CheckpointedBackend
from ftlayer.topology.facts import LETTERS, rules_of_operator
from ftlayer.topology.operators import WriterSink


@dataclass(frozen=True)
class FailingAlone:
    """The parts of one subtask of such a chain."""

    alone: RowsAlone
    outlet: ChannelOutlet | RowsToSink
    attempts: RecordAttempts


def entered_inside(plan: ChainPlan, restored: SubtaskRestore | None) -> list[str]:
    """Return the operators behind the chain's head at which restored records enter.

    They were heads of chains when those failed, and others have been put before them since.
    """
    tables = () if restored is None else (table for part in restored.keyed for table in part.tables)
    heads = {table.operator for table in tables if table.name == WAITING_TABLE}
    return [operator.uid for operator in plan.vertex.operators[1:] if operator.uid in heads]


def keys_with_waiting(plan: ChainPlan, keys: dict[str, pa.Schema]) -> dict[str, pa.Schema]:
    """Return the key columns of the chain's operators, with those of the records that wait at one of them."""
    return {**dict.fromkeys((operator.uid for operator in plan.vertex.operators), DRAWN_KEY), **keys}


def failing_alone(
    plan: ChainPlan,
    policy: FailurePolicy,
    backend: CheckpointedBackend,
    sink: SinkBody | None,
    suspects: Suspects,
    place: str,
    restored_inside: Iterable[str] = (),
) -> FailingAlone:
    """Make them. ``sink`` None: the chain has outputs. ``place`` says in words which process this is.

    ``restored_inside`` is what `entered_inside` gives.
    """
    own = {
        operator.uid: limit
        for operator in plan.vertex.operators
        if (limit := rules_of_operator(operator).limit) is not None
    }
    breakers = Breakers(plan.uid, policy.rules.limit, own)
    inside = {operator.uid: before.schema for before, operator in pairwise(plan.vertex.operators)}

    def table_of(enters: str) -> MapTable:
        return backend.state(enters or plan.uid).maps(WAITING_TABLE)

    attempts = RecordAttempts(
        (plan.uid, plan.subtask),
        policy,
        HeadKeys(plan.vertex.operators[0], plan.inputs, _drawn_keys(plan)),
        WaitingRecords(table_of, restored_inside),
        breakers,
        place,
        inside,
    )
    log = UndoLog()
    emitter = plan.emitter()
    outlet: ChannelOutlet | RowsToSink = ChannelOutlet(plan.handler, emitter)
    if plan.sink is not None and sink is not None:
        commits = isinstance(plan.sink.connector, WriterSink)
        committing = cast(CommittingSinkBody, sink) if commits else None
        outlet = RowsToSink(sink, attempts, emitter, committing)
    out = ToChannels(outlet, attempts) if isinstance(outlet, ChannelOutlet) else outlet

    def make(pipeline: OperatorChain) -> RecordsAlone:
        timers = None
        if isinstance(outlet, ChannelOutlet):
            timers = TimersAlone(pipeline, log, outlet, attempts, suspects)
        rows = RecordsAlone(
            plan.uid, policy, pipeline, log, attempts, breakers, out, timers, suspects, plan.inputs, inside
        )
        if plan.graph.sends_letters(plan.uid):
            rows.send_letters = partial(_sent, emitter, plan.graph.name)
        return rows

    return FailingAlone(RowsAlone(log, make), outlet, attempts)


def _drawn_keys(plan: ChainPlan) -> DrawnKeys:
    most = plan.graph.max_parallelism
    return DrawnKeys(groups_of(plan.subtask, plan.vertex.parallelism, most), most)


def _sent(emitter: Emitter, job: str, letters: Sequence[ChainLetter]) -> list[Action]:
    """Return what sends letters on as records."""
    rows = np.arange(len(letters), dtype=np.int64)
    return [*emitter.derived(LETTERS, letter_rows(letters, job), None, rows).sends]
