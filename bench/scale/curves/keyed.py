"""A keyed job whose state is filled, updated at random, and then written as a checkpoint: what keys and values cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.scale.in_slots import Sample, filled_then_random, read_samples
from bench.scale.jobs import Setting, environment
from bench.scale.lab import MIB, Lab, wait_for

SLOTS = 2
MOST_S = 1_200.0
BACKENDS = ("heap", "lmdb")


def state_figures(
    lab: Lab, backend: str, keys: int, updates: int, add: Callable[[Any, Path], None]
) -> dict[str, float]:
    """Run a keyed job; return what filling and updating its state takes, its memory, and a checkpoint of it.

    ``add`` puts what is behind the keyed source onto it. Each slot makes half of ``updates``. ``fill_us`` and
    ``update_us`` are the slots' CPU time for a record.
    """
    from ftlayer import partitions

    config = {"interval": None, "backend": backend, "timeout": "20m"}
    setting = Setting("barriers", SLOTS, checkpointing=config)
    with lab.folder() as folder:
        env = environment(lab, None, folder, setting, lab.job_name)
        parts = [
            partial(filled_then_random, str(folder), first, keys, SLOTS, updates // SLOTS)
            for first in range(SLOTS)
        ]
        add(env.source(partitions(*parts), "id bigint").key_by("id"), folder)
        job = env.execute_async()
        records = keys + updates
        wait_for(lambda: _came(folder) >= records or job.status().state.is_final, f"{keys} keys", MOST_S)
        figures = phases(read_samples(folder, "in"), read_samples(folder, "out"), keys)
        job.checkpoint(timeout=MOST_S)
        taken = job.checkpoints()[0]
        (folder / "stop").touch()
        job.wait()
        figures["peak_mib"] = max(each[-1].peak for each in read_samples(folder, "out").values()) / MIB
    return figures | {"checkpoint_ms": taken.duration_ms, "checkpoint_mib": taken.total.written_bytes / MIB}


def phases(begun: dict[int, list[Sample]], came: dict[int, list[Sample]], keys: int) -> dict[str, float]:
    """Return CPU µs a record of both phases, and the rate of the second, from the samples of the slots.

    A slot's state is full when it has had its share of the keys; where exactly that is does not matter.
    """
    fill_s = update_s = updates = 0.0
    began, ended = [], []
    for process, samples in came.items():
        full = next(sample for sample in samples if sample.records >= keys / len(came))
        fill_s += full.cpu - begun[process][0].cpu
        update_s += samples[-1].cpu - full.cpu
        updates += samples[-1].records - full.records
        began.append(full.at)
        ended.append(samples[-1].at)
    return {
        "fill_us": fill_s / keys * 1e6,
        "update_us": update_s / updates * 1e6,
        "updates_per_s": updates / (max(ended) - min(began)),
    }


def _came(folder: Path) -> float:
    return sum(samples[-1].records for samples in read_samples(folder, "out").values())
