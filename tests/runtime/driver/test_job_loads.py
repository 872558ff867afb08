"""What slots say of their subtasks, as a job's status has it."""

from __future__ import annotations

from dataclasses import replace

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.runtime.driver.rules.events import SlotRecord
from ftlayer.runtime.driver.rules.job_status import (
    ChainStatus,
    away_of,
    chain_status,
    circuits_of,
    lags_of,
    transports_of,
)
from ftlayer.runtime.protocol.messages import Heartbeat


def test_each_slot_says_what_carries_its_records_to_others() -> None:
    beat = Heartbeat(0, 1, False, transports={"1": "unix", "2": "flight", "driver": "flight"})
    slots = [SlotRecord(0, heartbeat=beat), SlotRecord(1)]
    assert transports_of(slots) == {0: {1: "unix", 2: "flight"}}


def test_a_circuit_is_where_the_worst_of_its_subtasks_is() -> None:
    def saying(**circuits: CircuitStatus) -> Heartbeat:
        return Heartbeat(0, 1, False, circuits=circuits)

    trying, opened = (
        CircuitStatus(CircuitState.HALF_OPEN, 2, 9, 8),
        CircuitStatus(CircuitState.OPEN, 1, 20, 3, 70),
    )
    slots = [
        SlotRecord(0, heartbeat=saying(work=trying, look=trying)),
        SlotRecord(1, heartbeat=saying(work=replace(opened, next_trial_in_ms=90), look=CircuitStatus())),
        SlotRecord(2, heartbeat=saying(work=opened)),
        SlotRecord(3),
        SlotRecord(4, heartbeat=saying(look=opened), ended=True),
    ]
    assert circuits_of(slots) == {
        "work": CircuitStatus(CircuitState.OPEN, 4, 49, 14, 70),
        "look": CircuitStatus(CircuitState.HALF_OPEN, 2, 9, 8),
    }


def test_what_waits_in_a_chain_is_what_its_slots_say_now() -> None:
    def saying(waiting: int) -> Heartbeat:
        return Heartbeat(0, 1, False, counters={"waiting/work": waiting, "dead/work": 1, "paused/work": 1})

    slots = [
        SlotRecord(0, heartbeat=saying(4)),
        SlotRecord(1),  # it is gone: what waited there is restored elsewhere
        SlotRecord(2, heartbeat=saying(3)),
        SlotRecord(3, heartbeat=saying(2), ended=True),
    ]
    totals = {"dead/work": 5, "retried/work": 9}
    assert chain_status("work", totals, {}, slots) == ChainStatus(
        "work", 0, 0, 0.0, 0.0, retried=9, waiting=7, dead=5, paused=2
    )


def test_the_lag_of_a_queue_is_what_one_of_its_readers_says_who_all_see_it_whole() -> None:
    def saying(**lags: int) -> Heartbeat:
        return Heartbeat(0, 1, False, counters={f"lag/{uid}": lag for uid, lag in lags.items()})

    slots = [
        SlotRecord(0, heartbeat=saying(clicks=40, orders=0)),
        SlotRecord(1, heartbeat=saying(clicks=42)),
        SlotRecord(2),
        SlotRecord(3, heartbeat=saying(clicks=90), ended=True),
    ]
    assert lags_of(slots) == {"clicks": 42, "orders": 0}


def test_a_system_is_away_for_as_long_as_the_slot_says_that_has_missed_it_longest() -> None:
    slots = [
        SlotRecord(
            number, heartbeat=Heartbeat(0, 1, False, counters={"away/clicks": away_ms, "lag/clicks": 99})
        )
        for number, away_ms in enumerate((0, 31_000, 7_000))
    ]
    assert away_of({}, slots) == {"clicks": 31_000}
    # The driver's reader of a log may be the one that waits, and the slots have nothing to read.
    assert away_of({"clicks": 40_000, "orders": 7}, slots) == {"clicks": 40_000, "orders": 7}
