"""A replay's task: asks, sends what it gets to where it went before, and acknowledges it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.steps import Map
from ftlayer.records.ids import random_root_ids, xor_fold_by_root
from ftlayer.records.partitioning import Broadcast, Custom, HashByKey
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.acker_mode.task.replay_task import StreamReplayTask
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import (
    AllowReplays,
    Batch,
    EndOfStream,
    EndReplays,
    LetOut,
    PauseIntake,
    ReplayNow,
    ResumeIntake,
)
from ftlayer.runtime.task.actions import (
    Acknowledge,
    Action,
    AskReplays,
    FailRoots,
    Replayed,
    ReplaysOut,
    RowsPersisted,
    Send,
    TaskEnded,
    TaskStart,
    TimeCame,
    WakeAt,
)
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.job_graph_generator import OpFTLayerBuilder, replay_uid
from ftlayer.topology.operators import IterableSource, Source
from ftlayer.vertex.calls import Records
from ftlayer.vertex.calls.common import check_event_ids

SCHEMA = pa.schema([("n", pa.int64())])
OPTIONS = TopologyOptions(batch_rows=4, replay_poll_ms=50)
ASK = AskReplays("job/s", 4)
KEY = KeySelector(("n",))


def now(mono_ms: int = 0) -> Now:
    return Now(mono_ms, 0)


def graph() -> JobGraph:
    def chain(uid: str) -> JobVertex:
        return JobVertex(uid, (Map(uid, lambda record: record, SCHEMA),), 2)

    source = JobVertex("s", (Source("s", IterableSource(()), SCHEMA),), 2)
    edges = (JobEdge(0, "s", "h", 0, HashByKey(KEY), SCHEMA), JobEdge(1, "s", "b", 0, Broadcast(), SCHEMA))
    return OpFTLayerBuilder().wire(
        JobGraph("job", (source, chain("h"), chain("b")), edges, tracked=False), {}
    )


def task(*, exact: bool = False) -> StreamReplayTask:
    uid = replay_uid("s")
    return StreamReplayTask(graph(), uid, 0, FTHandler(uid, job="job", run="run", exact=exact), OPTIONS)


def records(*numbers: int, schema: pa.Schema = SCHEMA, hashes: bool = True) -> Records:
    payload = pa.record_batch([pa.array(numbers, schema.field(0).type)], schema=schema)
    n = len(numbers)
    return Records(
        payload,
        random_root_ids(n),
        random_root_ids(n),
        np.full(n, 2, np.int32),
        KEY.hash(payload) if hashes else None,
    )


def batches(actions: list[Action]) -> list[Batch]:
    return [
        action.element for action in actions if isinstance(action, Send) and isinstance(action.element, Batch)
    ]


def test_replays_are_sent_and_then_acknowledged_root_xor_children() -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    first, second = records(1, 2), records(3)
    actions = replay.handle(Replayed((first, second)), now(10))
    out = batches(actions)
    assert sum(batch.num_rows for batch in out) == 3 * (1 + 2)
    kinds = [type(action) for action in actions]
    assert kinds == [Send] * len(out) + [Acknowledge, WakeAt]
    roots = np.concatenate([first.roots, second.roots])
    origins = dict(zip(roots.tolist(), [*first.origins.tolist(), *second.origins.tolist()], strict=True))
    ids = [
        np.concatenate([getattr(batch.lineage, name) for batch in out])
        for name in ("roots", "ids", "origins")
    ]
    assert all(origins[root] == origin for root, origin in zip(ids[0].tolist(), ids[2].tolist(), strict=True))
    event = actions[len(out)]
    assert isinstance(event, Acknowledge)
    expected = xor_fold_by_root(np.concatenate([roots, ids[0]]), np.concatenate([roots, ids[1]]))
    got = dict(zip(event.roots.tolist(), event.values.tolist(), strict=True))
    assert got == dict(zip(expected[0].tolist(), expected[1].tolist(), strict=True))
    assert len(set(ids[1].tolist())) == len(ids[1])


def test_the_exact_tracker_is_told_of_the_root_and_its_copies() -> None:
    replay = task(exact=True)
    replay.handle(TaskStart(), now())
    (event,) = (
        action for action in replay.handle(Replayed((records(1),)), now()) if isinstance(action, Acknowledge)
    )
    assert event.ids is not None
    check_event_ids(event.ids, event.values, "Xor")
    owners = [event.ids.operators[owner] if owner >= 0 else "" for owner in event.ids.owners.tolist()]
    assert sorted(owners) == ["", "b", "b", "h"]


def test_it_asks_from_the_start_and_again_after_a_while() -> None:
    replay = task()
    assert replay.handle(TaskStart(), now()) == [ASK]
    assert replay.handle(Replayed(()), now(100)) == [WakeAt(150)]
    assert replay.handle(TimeCame(), now(150)) == [ASK]
    assert replay.handle(TimeCame(), now(151)) == []


def test_a_full_answer_is_followed_by_the_next_question() -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    assert replay.handle(Replayed((records(1, 2), records(3, 4))), now())[-1] == ASK
    assert replay.handle(Replayed((records(1, 2, 3),)), now())[-1] == WakeAt(50)


def test_one_question_is_out_at_a_time_and_what_came_due_meanwhile_is_asked_for() -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    assert replay.handle(ReplayNow(), now()) == []
    assert replay.handle(ReplayNow(), now()) == []
    assert replay.handle(Replayed(()), now()) == [ASK]
    assert replay.handle(Replayed(()), now()) == [WakeAt(50)]
    assert replay.handle(ReplayNow(), now(1)) == [ASK]


def test_the_end_comes_behind_the_answer_that_is_under_way() -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    assert replay.handle(EndReplays(), now()) == []
    assert replay.handle(ReplayNow(), now()) == replay.handle(TimeCame(), now()) == []
    actions = replay.handle(Replayed((records(1, 2, 3, 4),)), now())
    assert len(batches(actions)) >= 3
    ends = actions[-5:]
    assert [action.element for action in ends[:-1] if isinstance(action, Send)] == [EndOfStream()] * 4
    assert ends[-1] == TaskEnded()


def test_it_ends_at_once_when_nothing_is_under_way() -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    replay.handle(Replayed(()), now())
    assert replay.handle(EndReplays(), now())[-1] == TaskEnded()
    assert replay.handle(TimeCame(), now(500)) == replay.handle(ReplayNow(), now(500)) == []
    assert replay.handle(RowsPersisted(1), now()) == []
    assert len(replay.held_roots()) == 0


def test_records_of_another_schema_are_dead_letters_that_say_so() -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    old, good = records(1, 2, schema=pa.schema([("n", pa.int32())])), records(3)
    actions = replay.handle(Replayed((old, good)), now())
    (failed,) = (action for action in actions if isinstance(action, FailRoots))
    assert [failure.root for failure in failed.failures] == old.roots.tolist()
    assert all(failure.fatal and failure.operator == "s" for failure in failed.failures)
    assert "n: int32" in failed.failures[0].reason
    assert "n: int64" in failed.failures[0].reason
    (event,) = (action for action in actions if isinstance(action, Acknowledge))
    assert event.roots.tolist() == good.roots.tolist()


@pytest.mark.parametrize("hashes", [None, np.zeros((1, 2), np.int32)])
def test_records_stored_for_other_edges_are_dead_letters_that_say_so(hashes: np.ndarray | None) -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    row = records(1)
    stored = Records(row.payload, row.roots, row.origins, row.attempts, hashes)
    actions = replay.handle(Replayed((stored,)), now())
    assert isinstance(actions[0], FailRoots)
    assert f"stored with {0 if hashes is None else 2} routing values" in actions[0].failures[0].reason
    assert actions[1:] == [WakeAt(50)]


def test_metadata_of_a_schema_does_not_matter() -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    row = records(1, schema=SCHEMA.with_metadata({"made by": "another version"}))
    assert not any(isinstance(action, FailRoots) for action in replay.handle(Replayed((row,)), now()))


def test_a_chain_that_is_no_replay_is_refused() -> None:
    with pytest.raises(InvalidTopologyError, match="'s' is not a replay, but Source"):
        StreamReplayTask(graph(), "s", 0, FTHandler("s", job="job", run="run"), OPTIONS)


def test_paused_it_takes_what_it_is_allowed_and_no_more() -> None:
    replay = task()
    replay.handle(PauseIntake(), now())
    assert replay.handle(TaskStart(), now()) == []
    assert replay.handle(ReplayNow(), now()) == []
    assert replay.handle(AllowReplays(replay.uid, 7, 6), now()) == [ASK]
    assert replay.is_asking
    actions = replay.handle(Replayed((records(1, 2, 3, 4),)), now())
    assert actions[-1] == AskReplays("job/s", 2)
    actions = replay.handle(Replayed((records(5, 6),)), now())
    assert len(batches(actions)) > 0
    assert actions[-1] == ReplaysOut(replay.uid, 7, 6)
    assert not replay.is_asking
    assert replay.handle(TimeCame(), now()) == []
    replay.handle(AllowReplays(replay.uid, 8, 6), now())
    assert replay.handle(Replayed(()), now()) == [ReplaysOut(replay.uid, 8, 0)]
    assert replay.handle(ResumeIntake(), now()) == [ASK]


def test_one_alone_is_reported_and_kept_until_it_is_let_out() -> None:
    replay = task()
    replay.handle(PauseIntake(), now())
    assert replay.handle(AllowReplays(replay.uid, 1, 1), now()) == [AskReplays("job/s", 1)]
    alone = records(5)
    root, origin = int(alone.roots[0]), int(alone.origins[0])
    assert replay.handle(Replayed((alone,)), now()) == [ReplaysOut(replay.uid, 1, 1, root, origin)]
    assert replay.held_roots().tolist() == [root]
    assert replay.handle(LetOut(replay.uid, 2), now()) == []
    actions = replay.handle(LetOut(replay.uid, 1), now())
    assert sum(batch.num_rows for batch in batches(actions)) == 1 + 2
    assert not any(isinstance(action, ReplaysOut) for action in actions)
    assert replay.handle(LetOut(replay.uid, 1), now()) == []
    assert replay.held_roots().tolist() == []


def test_a_group_that_a_circuit_breaker_holds_is_waited_for() -> None:
    """That there was nothing would be said of what is still to come."""
    replay = task()
    replay.handle(PauseIntake(), now())
    replay.handle(AllowReplays(replay.uid, 7, 6), now())
    assert replay.handle(Replayed((), held=True), now(100)) == [WakeAt(150)]
    assert replay.handle(TimeCame(), now(150)) == [ASK]
    assert replay.handle(Replayed((records(1, 2),), held=True), now(200))[-1] == AskReplays("job/s", 4)
    assert replay.handle(Replayed(()), now(300)) == [ReplaysOut(replay.uid, 7, 2)]
    assert replay.handle(TimeCame(), now(400)) == []


def test_an_answer_from_before_the_pause_goes_nowhere() -> None:
    replay = task()
    replay.handle(TaskStart(), now())
    replay.handle(PauseIntake(), now())
    assert replay.is_asking
    assert replay.handle(Replayed((records(1, 2),)), now()) == []
    assert not replay.is_asking


def test_edited_records_are_asked_of_the_partitioner_function_anew() -> None:
    """One goes to another channel than its stored one, and one that the function refuses fails."""

    def of(key: int, channels: int) -> int:
        if key == 7:
            raise ValueError("no channel for 7")
        return key % channels

    source = JobVertex("s", (Source("s", IterableSource(()), SCHEMA),), 1)
    sink = JobVertex("h", (Map("h", lambda record: record, SCHEMA),), 2)
    edges = (JobEdge(0, "s", "h", 0, Custom(KEY, of), SCHEMA),)
    wired = OpFTLayerBuilder().wire(JobGraph("job", (source, sink), edges, tracked=False), {})
    uid = replay_uid("s")
    replay = StreamReplayTask(wired, uid, 0, FTHandler(uid, job="job", run="run"), OPTIONS)
    replay.handle(TaskStart(), now())
    stored = dataclasses.replace(records(3, 7), key_hashes=np.zeros(2, np.int32))
    for edited, receiver in ((False, 0), (True, 1)):
        actions = replay.handle(Replayed((dataclasses.replace(stored, edited=edited),)), now())
        sent = {
            action.channel.receiver: action.element.payload.column(0).to_pylist()
            for action in actions
            if isinstance(action, Send) and isinstance(action.element, Batch)
        }
        failures = [
            failure for action in actions if isinstance(action, FailRoots) for failure in action.failures
        ]
        assert sent == {receiver: [3] if edited else [3, 7]}
        assert [(failure.root, failure.operator) for failure in failures] == (
            [(int(stored.roots[1]), "s")] if edited else []
        )
