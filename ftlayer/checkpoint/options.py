"""Every option of checkpointing, with Flink's name, default and meaning where it has one there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal

from ftlayer.config import MIB, duration_ms
from ftlayer.errors import ConfigError

KIB = 1 << 10
MAX_MEMORY_THRESHOLD = MIB
MAX_PARALLELISM_LIMIT = 1 << 15

_NOTHING = re.compile(r"\s*0+(\.0+)?\s*(ms|s|min|m|h)?\s*")

Duration = str | int
"""``"30s"``, or milliseconds."""


class CheckpointingMode(StrEnum):
    """What a restored state reflects of each record."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"


class Retention(StrEnum):
    """What becomes of the last checkpoints when a job is over (`ExternalizedCheckpointRetention` in Flink).

    A job that came to its end well needs none: they are deleted in every case.
    """

    RETAIN_ON_CANCELLATION = "retain-on-cancellation"
    DELETE_ON_CANCELLATION = "delete-on-cancellation"
    NO_EXTERNALIZED_CHECKPOINTS = "no-externalized-checkpoints"


@dataclass(frozen=True)
class CheckpointConfig:
    """Switches barrier mode on: `StreamEnvironment(spark, checkpointing=CheckpointConfig(…))`.

    Durations are texts like ``"500ms"`` or milliseconds.

    Attributes:
        interval: a checkpoint begins this long after the one before began. None: none begins by itself.
        mode: `CheckpointingMode`.
        timeout: a checkpoint that takes longer is given up.
        min_pause: time between the end of one and the begin of the next; 0 for none.
        max_concurrent: checkpoints under way at a time.
        tolerable_failures: consecutive failed checkpoints after which the job still goes on. 0: the first one
            restarts the job.
        interval_during_backlog: in place of ``interval`` while a source works off a backlog; 0: none then.
        retained: completed checkpoints that are kept.
        retention: `Retention`.
        unaligned: barriers overtake records, which go into the checkpoint.
        aligned_timeout: with ``unaligned``: begin aligned and become unaligned after this time; 0: at once.
        force_iterations: take checkpoints of topologies with iterations, though records on their way back are in
            none: a restore loses those that were on a feedback edge when the barrier passed.
        force_unaligned: take unaligned ones of such topologies too; they hold no records on their way back either.
        directory: where checkpoints lie, a path or any URL that fsspec knows; None: in the driver's memory.
        savepoint_directory: where savepoints go if none is named for one.
        memory_threshold: snapshots up to this size are part of the metadata (`fs.memory-threshold`), bytes.
        max_memory_state: with ``directory`` None, the largest snapshot of one subtask, bytes.
        backend: ``"heap"`` or ``"lmdb"`` (state larger than memory).
        incremental: write what has changed since the last checkpoint only.
        changelog: write changes all the time, and the state itself every ``materialization_interval``.
        materialization_interval: see ``changelog``.
        max_parallelism: number of key groups, the highest parallelism a job can ever be restored with.
        file_merging_across: checkpoints may share a file (within one checkpoint a slot always writes one).
        max_file_size: of a shared file, bytes.
        max_space_amplification: bytes that files take up ÷ bytes that are of use, above which they are rewritten.
        local_recovery: directory for a second copy on the slot's own disk, None for none.
        allow_unclaimed_state: restore although there is state that no operator claims (it is dropped).
        key: secret behind the checksums of everything that is read back; None: one is made and kept with the
            checkpoints, which protects from damage, not from somebody who can write there.
        debloating: keep less in flight on a channel than ``TopologyOptions.channel_bytes`` where it is slow.
        debloat_target: time in which what is in flight is to be worked off.
        state_directory: where the LMDB backend keeps its files, on the slot's machine; None: a temporary one.
    """

    interval: Duration | None = "10s"
    mode: CheckpointingMode = CheckpointingMode.EXACTLY_ONCE
    timeout: Duration = "10m"
    min_pause: Duration = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    interval_during_backlog: Duration | None = None
    retained: int = 1
    retention: Retention = Retention.NO_EXTERNALIZED_CHECKPOINTS
    unaligned: bool = False
    aligned_timeout: Duration = 0
    force_iterations: bool = False
    force_unaligned: bool = False
    directory: str | None = None
    savepoint_directory: str | None = None
    memory_threshold: int = 20 * KIB
    max_memory_state: int = 5 * MIB
    backend: Literal["heap", "lmdb"] = "heap"
    incremental: bool = False
    changelog: bool = False
    materialization_interval: Duration = "10m"
    max_parallelism: int = 128
    file_merging_across: bool = False
    max_file_size: int = 32 * MIB
    max_space_amplification: float = 2.0
    local_recovery: str | None = None
    allow_unclaimed_state: bool = False
    key: bytes | None = field(default=None, repr=False)
    debloating: bool = False
    debloat_target: Duration = "1s"
    state_directory: str | None = None

    def __post_init__(self) -> None:
        for name in ("interval", "interval_during_backlog"):
            if getattr(self, name) is not None:
                span_ms(getattr(self, name), name, zero=name == "interval_during_backlog")
        for name in ("timeout", "materialization_interval", "debloat_target"):
            span_ms(getattr(self, name), name)
        for name in ("min_pause", "aligned_timeout"):
            span_ms(getattr(self, name), name, zero=True)
        _between("max_concurrent", self.max_concurrent, 1)
        _between("tolerable_failures", self.tolerable_failures, 0)
        _between("retained", self.retained, 1)
        _between("memory_threshold", self.memory_threshold, 0, MAX_MEMORY_THRESHOLD)
        _between("max_memory_state", self.max_memory_state, 1)
        _between("max_parallelism", self.max_parallelism, 1, MAX_PARALLELISM_LIMIT)
        _between("max_file_size", self.max_file_size, 4 * KIB)
        _bound("max_space_amplification", self.max_space_amplification)
        for option in fields(self):
            # A text from a file of options, "false" say, would switch it on.
            if option.type == "bool" and not isinstance(getattr(self, option.name), bool):
                raise ConfigError(
                    f"{option.name}: expected True or False, got {getattr(self, option.name)!r}"
                )
        for name in ("directory", "savepoint_directory", "local_recovery", "state_directory"):
            _directory(name, getattr(self, name))
        self._check_enums()
        self._check_combinations()

    def _check_enums(self) -> None:
        for name, kind in (("mode", CheckpointingMode), ("retention", Retention)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                raise ConfigError(
                    f"{name}: expected one of {', '.join(kind)}, got {getattr(self, name)!r}"
                ) from None
        if self.backend not in ("heap", "lmdb"):
            raise ConfigError(f"backend: expected 'heap' or 'lmdb', got {self.backend!r}")
        if self.key is not None and not (isinstance(self.key, bytes) and len(self.key) >= 16):
            raise ConfigError("key: expected at least 16 random bytes")

    def _check_combinations(self) -> None:
        if self.unaligned and self.mode is CheckpointingMode.AT_LEAST_ONCE:
            raise ConfigError(
                "unaligned, mode: at-least-once never holds a channel up, so there is nothing to overtake; "
                "choose one of the two"
            )
        if self.unaligned and self.max_concurrent > 1:
            raise ConfigError(
                "unaligned, max_concurrent: only one unaligned checkpoint can be under way at a time; "
                "set max_concurrent=1"
            )
        if self.min_pause_ms and self.max_concurrent > 1:
            raise ConfigError(
                "min_pause, max_concurrent: a pause between checkpoints means that one is under way at a time; "
                "set max_concurrent=1 or leave min_pause out"
            )
        if self.aligned_timeout_ms and not self.unaligned:
            raise ConfigError(
                "aligned_timeout, unaligned: the timeout turns a checkpoint unaligned; set both"
            )
        backlog, interval = self.interval_during_backlog_ms, self.interval_ms
        if backlog is not None and interval is None:
            raise ConfigError(
                "interval_during_backlog, interval: without an interval there is nothing to replace"
            )
        if backlog and interval is not None and backlog < interval:
            raise ConfigError("interval_during_backlog, interval: expected 0 or at least the interval")
        if self.directory is None and self.retention is not Retention.NO_EXTERNALIZED_CHECKPOINTS:
            raise ConfigError(
                "retention, directory: what lies in the driver's memory is gone with it; give a directory"
            )
        if self.changelog and self.directory is None:
            raise ConfigError("changelog, directory: a log that is written all the time needs a directory")

    @property
    def interval_ms(self) -> int | None:
        """``interval`` in ms."""
        return None if self.interval is None else span_ms(self.interval, "interval")

    @property
    def interval_during_backlog_ms(self) -> int | None:
        """``interval_during_backlog`` in ms; None: as ``interval``."""
        value = self.interval_during_backlog
        return None if value is None else span_ms(value, "interval_during_backlog", zero=True)

    @property
    def timeout_ms(self) -> int:
        """``timeout`` in ms."""
        return span_ms(self.timeout, "timeout")

    @property
    def min_pause_ms(self) -> int:
        """``min_pause`` in ms."""
        return span_ms(self.min_pause, "min_pause", zero=True)

    @property
    def aligned_timeout_ms(self) -> int:
        """``aligned_timeout`` in ms."""
        return span_ms(self.aligned_timeout, "aligned_timeout", zero=True)

    @property
    def materialization_interval_ms(self) -> int:
        """``materialization_interval`` in ms."""
        return span_ms(self.materialization_interval, "materialization_interval")

    @property
    def debloat_target_ms(self) -> int:
        """``debloat_target`` in ms."""
        return span_ms(self.debloat_target, "debloat_target")


def span_ms(value: Duration, option: str, *, zero: bool = False) -> int:
    """Return a duration in ms; `ConfigError` naming ``option`` if it is none, or 0 where ``zero`` is False."""
    if not zero:
        return duration_ms(value, option)
    if type(value) is int and value < 0:
        raise ConfigError(f"{option}: expected 0 or a duration of at least 1 ms, got {value}")
    nothing = (
        _NOTHING.fullmatch(value) is not None if isinstance(value, str) else type(value) is int and not value
    )
    return 0 if nothing else duration_ms(value, option)


def _between(option: str, value: int, least: int, most: int | None = None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not good or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise ConfigError(f"{option}: expected an integer of at least {least}{upper}, got {value!r}")


def _bound(option: str, value: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and (value >= 1 or value == 0)
    if not good:
        raise ConfigError(f"{option}: expected a number of at least 1, or 0 for no bound, got {value!r}")


def _directory(option: str, value: str | None) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError(f"{option}: expected a path or URL as text, or None, got {value!r}")
