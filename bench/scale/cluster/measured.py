"""The costs of `bench.scale.cluster.model`, measured here."""

from __future__ import annotations

from functools import partial

from bench.scale.cluster.messages import BATCH_ROWS, heartbeat_us, message_us, part_us, record_bytes
from bench.scale.cluster.model import Costs
from bench.scale.curves import chain, slots
from bench.scale.jobs import MODES, Setting, run_to_end
from bench.scale.lab import Lab

SMALL_ROWS = 1_024
SLOTS = 2
PEERS = 400


def costs(lab: Lab, quick: bool) -> Costs:
    """Measure them; the job of `bench.topology` runs in two slots."""
    records = 2_000_000 if quick else 8_000_000
    rounds = 200 if quick else 2_000
    for mode in MODES:  # kernels are compiled, files are read
        run_to_end(lab, Setting(mode, SLOTS), partial(slots.build, 100_000, SLOTS), 100_000)
    keyed = {
        mode: run_to_end(lab, Setting(mode, SLOTS), partial(slots.build, records, SLOTS), records)
        for mode in MODES
    }
    few = run_to_end(lab, Setting("tracked", SLOTS), partial(slots.build, records // 4, SLOTS), records // 4)
    small = Setting("untracked", SLOTS, {"batch_rows": SMALL_ROWS})
    keyed_small = run_to_end(lab, small, partial(slots.build, records, SLOTS), records)
    forward = run_to_end(lab, Setting(), partial(chain.build, records, 1), records)
    forward_small = run_to_end(lab, small, partial(chain.build, records, 1), records)
    message = message_us(rounds * 100)
    part = part_us(rounds)
    with_exchange = a_batch(keyed["untracked"]["cpu_us"], keyed_small["cpu_us"])
    frame = frame_of(with_exchange, a_batch(forward["cpu_us"], forward_small["cpu_us"]), message)
    alone = heartbeat_us(1, rounds)
    return Costs(
        record={mode: of_record(found["cpu_us"], frame, part) for mode, found in keyed.items()},
        vertex_record={"tracked": one_more(keyed["tracked"]["vertex_us"], few["vertex_us"])},
        frame=frame,
        part=part,
        message=message,
        heartbeat=alone,
        heartbeat_peer=max(0.0, heartbeat_us(PEERS, rounds) - alone) / (PEERS - 1),
        record_bytes=record_bytes(),
    )


def a_batch(large_us: float, small_us: float) -> float:
    """Return what a batch costs, whatever is in it, from a record's cost with large and with small ones."""
    return (small_us - large_us) / (1 / SMALL_ROWS - 1 / BATCH_ROWS)


def one_more(many_us: float, few_us: float) -> float:
    """Return what a record more costs, from a record's cost in a run and in one a quarter as long, without a start."""
    return max(0.0, (4 * many_us - few_us) / 3)


def frame_of(with_exchange: float, without: float, message: float) -> float:
    """Return the cost of a frame: of two slots, each sends one for two of its source's batches.

    It is no less than that of a message; runs that differ by less than they vary say nothing.
    """
    return max(message, SLOTS * (with_exchange - without))


def of_record(taken_us: float, frame: float, part: float) -> float:
    """Return what is a record's of its cost in two slots, without its part of frames and parts."""
    return taken_us - ((SLOTS - 1) / SLOTS * frame + SLOTS * part) / BATCH_ROWS
