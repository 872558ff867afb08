"""What may be run, and what may happen to it: as a test says, or as a seed makes it up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from barrier_topologies import CASES

from ftlayer.checkpoint.options import Retention

MODES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "at-least-once": {"mode": "at-least-once"},
    "unaligned": {"unaligned": True, "interruptible_timers": True},
    "turning": {"unaligned": True, "aligned_timeout": "10ms"},
}

ARMED = (
    "function",
    "process",
    "write",
    "snapshot",
    "sync",
    "publish",
    "publish-after",
    "unpublish",
    "commit-before",
    "commit-middle",
    "commit-after",
    "die-in-function",
    "die-in-write",
    "die-in-commit",
    "die-before-publish",
    "die-after-publish",
    "others-die",
    "log",
    "plan",
    "forget",
)
"""Faults that happen where the code comes to them next."""

ACTS = (
    "kill",
    "kill-two",
    "kill-all",
    "freeze",
    "cancel-slot",
    "cut-link",
    "cut-control",
    "driver",
    "savepoint",
    "checkpoint",
    "stop",
    "damage-copies",
    "drain",
    "cancel",
    "fail",
)
"""Faults, and wishes of users, that happen at once."""

DRIVER_DIES = {"driver", "die-in-commit", "die-before-publish", "die-after-publish"}
"""Behind these a job whose checkpoints are in the driver's memory begins afresh, and its sinks see all rows again."""


@dataclass(frozen=True)
class Plan:
    """What is run, and what happens to it: (at which move, what)."""

    name: str
    seed: int
    parallelism: int = 2
    events: tuple[tuple[int, str], ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    count: int = 60
    parts: int = 2
    deadly: frozenset[tuple[str, int, int]] = frozenset()
    vertex: bool = False


def drawn(seed: int, *, names: Iterable[str] = CASES, faults: int | None = None) -> Plan:
    """Return a plan that a seed makes up."""
    random = Random(seed)
    mode = random.choice(list(MODES))
    config = dict(MODES[mode])
    if not config.get("unaligned"):
        config["max_concurrent"] = random.choice((1, 1, 3))
    config |= {
        "backend": random.choice(("heap", "lmdb")),
        "incremental": random.random() < 0.5,
        "retained": random.choice((1, 1, 2)),
        "interval": random.choice(("5ms", "10ms", "30ms")),
        "timeout": random.choice(("80ms", "2s")),
        "file_merging_across": random.random() < 0.3,
        "memory_threshold": random.choice((0, 64, 1 << 14)),
        "debloating": random.random() < 0.3,
        "debloat_target": "5ms",
        "changelog": random.random() < 0.3,
        "materialization_interval": random.choice(("10ms", "40ms", "10m")),
        "local_recovery": random.random() < 0.3,
        "retention": random.choice(list(Retention)),
    }
    # Of its own: what else a seed draws stays as it is.
    config["max_subtasks_per_channel_state_file"] = Random(f"files of {seed}").choice((1, 2, 5))
    in_memory = random.random() < 0.1
    if in_memory:
        config |= {"directory": None, "changelog": False, "retention": Retention.NO_EXTERNALIZED_CHECKPOINTS}
    options = {"batch_rows": random.choice((2, 4, 16)), "channel_bytes": random.choice((1 << 10, 1 << 14))}
    number = random.choice((0, 1, 1, 2, 3, 5)) if faults is None else faults
    events = []
    for _ in range(number):
        what = random.choice(ACTS) if random.random() < 0.5 else random.choice(ARMED)
        if not in_memory or what not in DRIVER_DIES:
            events.append((random.randrange(1_500), what))
    return Plan(
        name=random.choice(list(names)),
        seed=seed,
        parallelism=random.randint(1, 3),
        events=tuple(sorted(events)),
        config=config,
        options=options,
        count=random.choice((30, 60, 120)),
        parts=random.choice((2, 3)),
    )
