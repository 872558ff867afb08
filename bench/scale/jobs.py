"""Topologies of the curves: run to their end, and what they took."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.scale.in_slots import Sample, read_samples
from bench.scale.lab import MIB, Lab, footprint
from bench.scale.vertices import pid_of, warm

Mode = Literal["untracked", "tracked", "barriers"]
MODES: tuple[Mode, ...] = ("untracked", "tracked", "barriers")
CHECKPOINT_INTERVAL = "1s"

Build = Callable[[Any, Path], None]
"""Adds a job to an environment; its sources and sinks leave samples in the folder."""


@dataclass(frozen=True)
class Setting:
    """How a topology runs. ``checkpointing`` are options of a `CheckpointConfig`, in barrier mode."""

    mode: Mode = "untracked"
    slots: int = 2
    options: dict[str, int] = field(default_factory=dict)
    checkpointing: dict[str, Any] = field(default_factory=dict)


def environment(lab: Lab, layer: Any, folder: Path, setting: Setting, name: str) -> Any:
    """Return an environment for one topology; ``layer`` None: in barrier mode."""
    from ftlayer import CheckpointConfig, StreamEnvironment, TopologyOptions

    options = TopologyOptions(**setting.options)
    if layer is not None:
        return StreamEnvironment(lab.spark, layer, name=name, parallelism=setting.slots, options=options)
    given = {
        "interval": CHECKPOINT_INTERVAL,
        "directory": str(folder / "checkpoints"),
        **setting.checkpointing,
    }
    return StreamEnvironment(
        lab.spark,
        name=name,
        parallelism=setting.slots,
        options=options,
        checkpointing=CheckpointConfig(**given),
    )


def run_to_end(lab: Lab, setting: Setting, build: Build, records: int) -> dict[str, float]:
    """Run a topology whose source has so many records; return its figures."""
    from ftlayer import FTLayer, FTStatus

    with lab.folder() as folder:
        driver = footprint(os.getpid()).cpu_s
        vertex_s = 0.0
        if setting.mode == "barriers":
            env = environment(lab, None, folder, setting, lab.job_name)
            build(env, folder)
            env.execute()
        else:
            status = FTStatus.ON if setting.mode == "tracked" else FTStatus.OFF
            with FTLayer.embedded(folder / "ft", status=status) as layer:
                env = environment(lab, layer, folder, setting, lab.job_name)
                build(env, folder)
                began = 0.0
                if setting.mode == "tracked":
                    layer.address  # noqa: B018 - starts the vertex
                    with layer.vertex.client(client_id="warm") as client:
                        warm(client)
                    began = vertex_cpu_s(layer)
                env.execute()
                if setting.mode == "tracked":
                    vertex_s = vertex_cpu_s(layer) - began
        figures = figures_of(folder, records)
        figures["driver_ms"] = (footprint(os.getpid()).cpu_s - driver) * 1_000
        if setting.mode == "tracked":
            figures["vertex_us"] = vertex_s / records * 1e6
    return figures


def vertex_cpu_s(layer: Any) -> float:
    """Return the CPU seconds that a layer's embedded vertex has taken."""
    return footprint(pid_of(layer.vertex)).cpu_s


def figures_of(folder: Path, records: int) -> dict[str, float]:
    """Return rate, CPU time a record and peak memory of the slots whose samples are in a folder."""
    begun, ended = read_samples(folder, "in"), read_samples(folder, "out")
    first = min(samples[0].at for samples in begun.values())
    last = max(samples[-1].at for samples in ended.values())
    return {
        "records_per_s": records / (last - first),
        "cpu_us": cpu_between(begun, ended) / records * 1e6,
        "peak_mib": max(samples[-1].peak for samples in ended.values()) / MIB,
    }


def cpu_between(begun: dict[int, list[Sample]], ended: dict[int, list[Sample]]) -> float:
    """Return CPU seconds of processes from their first sample as a source to their last as a sink."""
    return sum(
        samples[-1].cpu - begun[process][0].cpu for process, samples in ended.items() if process in begun
    )
