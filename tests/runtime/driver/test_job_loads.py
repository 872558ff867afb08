"""What slots say of their subtasks, as a job's status has it."""

from __future__ import annotations

from typing import Any

from ftlayer.runtime.driver.job_status import edges_of, subtasks_of
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.protocol.messages import EdgeLoad, Heartbeat, SubtaskLoad
from ftlayer.vertex.calls.jobs import EdgeDetails, SubtaskDetails


def beat(subtask: int) -> Heartbeat:
    load = SubtaskLoad("work", subtask, 10, 9, 5.0, 4.5, 0.75, 0.5, 1_000, 1)
    return Heartbeat(0, 1, False, subtasks=(load,), edges=(EdgeLoad(0, 100, 10), EdgeLoad(1, 7, 1)))


def test_each_subtask_is_shown_as_its_slot_said_last_and_none_of_a_slot_that_is_gone() -> None:
    slots = [SlotRecord(0, heartbeat=beat(0)), SlotRecord(1), SlotRecord(2, heartbeat=beat(2))]
    assert list(subtasks_of(slots)) == [
        SubtaskDetails("work", slot, 10, 9, 5.0, 4.5, 0.75, 0.5, 1_000, 1) for slot in (0, 2)
    ]


def test_edges_between_the_same_chains_are_one(tools: Any) -> None:
    graph = tools.graph_of(2)
    found = list(edges_of([SlotRecord(0, heartbeat=beat(0)), SlotRecord(1, heartbeat=beat(1))], graph))
    assert found == [
        EdgeDetails(source, target, slot, size, rows)
        for slot in (0, 1)
        for source, target, size, rows in (("source", "work", 100, 10), ("work", "sink", 7, 1))
    ]
