"""Every option of checkpointing, with Flink's name, default and meaning where it has one there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from ftlayer.checkpoint.custom_storage import CheckpointStorage, fsspec_schemes, installed, serve, served
from ftlayer.common import checks
from ftlayer.common.checks import Duration
from ftlayer.common.printable import shown_url
from ftlayer.common.rules.restart import BACKOFF, check_pauses, pauses_of
from ftlayer.config import MIB
from ftlayer.errors import ConfigError
from ftlayer.functions.retry_rules import Errors, RetryRules, rules_of

FAIL = "fail"
"""In place of a policy: a record that fails fails the job."""


@checks.known_options
@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of records that fail: `CheckpointConfig` has one for all operators, ``on_failure`` one for one.

    A chain of operators takes a record whole or not at all: where it fails, all that it changed and put out in the
    chain is taken back, it waits in the chain's state, and it enters the chain again. A record that has no attempt left
    is a dead letter.

    Durations are texts like ``"500ms"`` or milliseconds. Raises `ConfigError` naming the option.

    Attributes:
        max_attempts: runs of a record in a chain, the first included; None: it is tried again without end.
        backoff: the pause before attempt 2, 3, …, one or a list; the last one serves all later ones.
        jitter: the share of a pause, 0 to 1, that is drawn.
        retry_on, dead_on: which errors are worth another attempt; an operator's own rules are asked first.
        max_waiting: bytes of waiting records in a subtask of a chain; beyond it, the chain takes no new input,
            and tries again ten times a second.
        hold_watermark: the chain keeps its output's watermark back while anything waits in it.
        max_failing: a share (``"5%"``) or a number a minute (``100``, ``"100/min"``) of the records of a subtask of a
            chain; while more fail, it pauses. Operators with a ``max_failing`` of their own are not counted.
    """

    max_attempts: int | None = 5
    backoff: Duration | Sequence[Duration] = BACKOFF
    jitter: float = 0.1
    retry_on: Errors | None = None
    dead_on: Errors | None = None
    max_waiting: int = 64 * MIB
    hold_watermark: bool = False
    max_failing: str | int | None = None

    def __post_init__(self) -> None:
        if self.max_attempts is not None:
            checks.check_int(self.max_attempts, "FailurePolicy: max_attempts", least=1)
        pauses_of(self.backoff, "FailurePolicy: backoff")
        if isinstance(self.backoff, Duration):
            object.__setattr__(self, "backoff", (self.backoff,))
        for name in ("backoff", "retry_on", "dead_on"):
            # As tuples: operators of equal policies are chained, and a list could change.
            given = getattr(self, name)
            if isinstance(given, list | set | frozenset):
                object.__setattr__(self, name, tuple(given))
        checks.check_number(self.jitter, "FailurePolicy: jitter", least=0, most=1)
        check_pauses(self, "FailurePolicy")
        checks.check_int(self.max_waiting, "FailurePolicy: max_waiting", least=1, most=checks.MOST_BYTES)
        checks.check_bool(self.hold_watermark, "FailurePolicy: hold_watermark")
        rules_of(self.retry_on, self.dead_on, "FailurePolicy", self.max_failing)

    @property
    def pauses(self) -> Sequence[Duration]:
        """``backoff`` as a list."""
        return (self.backoff,) if isinstance(self.backoff, Duration) else self.backoff

    @property
    def backoff_ms(self) -> tuple[int, ...]:
        """``backoff`` in ms."""
        return pauses_of(self.backoff)

    @property
    def rules(self) -> RetryRules:
        """Which failures are worth a retry, and how many open the circuit breaker."""
        return rules_of(self.retry_on, self.dead_on, "FailurePolicy", self.max_failing)


OnFailure: TypeAlias = FailurePolicy | Literal["fail"]
"""What an operator's ``on_failure`` takes."""


def check_on_failure(given: object, option: str) -> None:
    if given != FAIL:
        words = 'expected FailurePolicy(…), or "fail" where a record that fails is to fail the job'
        expected = f"{option}: {words}"
        if isinstance(given, type):
            raise ConfigError(f"{expected}, got the class; write {given.__name__}(…)")
        if not isinstance(given, FailurePolicy):
            raise ConfigError(f"{expected}, got {checks.shown(given)}")


FIRST_VERSION = 1
"""Of a state that no `StateMigration` speaks of."""


def _unchanged(value: Any, version: int) -> Any:
    return value


@checks.known_options
@dataclass(frozen=True)
class StateMigration:
    """How a restore reads a keyed state that an earlier program has written: `CheckpointConfig(migrations=[…])`.

    Attributes:
        operator: uid of the operator.
        state: its name now, which `open` asks for or the checkpoint has; the state of ``reduce`` and ``aggregate`` is
            called ``"aggregate"``.
        version: of what the program writes now, 2 or more: greater each time the type of the values changes. A state
            without a migration has version 1.
        migrate: ``migrate(value, version)`` returns the value for one that was written with that earlier version; it
            is called for each value, each item of a list, and the value of each item of a map, with or without a
            time to live. Values of the present version do not come to it.
        renamed_from: the name that it had, if that was another one.
    """

    operator: str
    state: str
    version: int = FIRST_VERSION
    migrate: Callable[[Any, int], Any] = _unchanged
    renamed_from: str | None = None

    def __post_init__(self) -> None:
        checks.check_text(self.operator, "StateMigration: operator", "a name")
        checks.check_text(self.state, "StateMigration: state", "a name")
        checks.check_int(self.version, "StateMigration: version", least=FIRST_VERSION)
        checks.check_function(self.migrate, "StateMigration: migrate", takes=2)
        if self.renamed_from is not None:
            checks.check_text(self.renamed_from, "StateMigration: renamed_from", "a name, or None")
        if self.renamed_from == self.state:
            raise ConfigError(
                f"StateMigration: {self.operator}/{self.state}: renamed_from is the name that it has; leave it out"
            )
        if self.version > FIRST_VERSION and self.migrate is _unchanged:
            raise ConfigError(
                f"StateMigration: {self.operator}/{self.state}: version {self.version} needs a migrate function"
            )
        if self.version == FIRST_VERSION and self.renamed_from is None:
            raise ConfigError(
                f"StateMigration: {self.operator}/{self.state}: it changes nothing; give version=2 and migrate, or "
                "renamed_from"
            )


def may_leave(allowed: bool | tuple[str, ...], operator: str, name: str = "") -> bool:
    """Whether ``allow_unclaimed_state`` lets a restore leave behind what an operator had (of that name, if any)."""
    if isinstance(allowed, bool):
        return allowed
    return operator in allowed or f"{operator}/{name}" in allowed


KIB = 1 << 10
_NO_SLASHES = re.compile(r"(?!(?:file|local):/)([a-z][a-z0-9+.-]+):(?!//|:)")
MAX_MEMORY_THRESHOLD = MIB
MAX_WRITE_BUFFER_SIZE = 64 * MIB
MAX_PARALLELISM_LIMIT = 1 << 15
MIN_KEY_BYTES = 16
_BOUNDS = {
    "max_concurrent": (1, checks.MOST),
    "tolerable_failures": (0, checks.MOST),
    "retained": (1, checks.MOST),
    "memory_threshold": (0, MAX_MEMORY_THRESHOLD),
    "write_buffer_size": (1, MAX_WRITE_BUFFER_SIZE),
    "max_memory_state": (1, checks.MOST_BYTES),
    "max_subtasks_per_channel_state_file": (1, checks.MOST),
    "max_parallelism": (1, MAX_PARALLELISM_LIMIT),
    "max_file_size": (4 * KIB, checks.MOST_BYTES),
}


class CheckpointingMode(StrEnum):
    """How often a restored state reflects each record."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"


class Retention(StrEnum):
    """Whether the last checkpoints stay when a job is over (`ExternalizedCheckpointRetention` in Flink).

    A job that came to its end well needs none: they are deleted in every case. An interrupt (Ctrl-C) deletes none, and
    a job that fails before its own first checkpoint leaves what it was restored from, whatever is set.
    """

    RETAIN_ON_CANCELLATION = "retain-on-cancellation"
    DELETE_ON_CANCELLATION = "delete-on-cancellation"
    NO_EXTERNALIZED_CHECKPOINTS = "no-externalized-checkpoints"


@checks.known_options
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
        retained: completed checkpoints that are kept. With 2 or more, those that share files (``incremental``,
            ``changelog``) have one more beside them which shares none with the latest, and every tenth is a full one.
        retention: `Retention`; None: with a ``directory`` RETAIN_ON_CANCELLATION, which is what Flink's default is not.
        unaligned: barriers overtake records, which go into the checkpoint.
        aligned_timeout: with ``unaligned``: begin aligned and become unaligned after this time; 0: at once.
        force_iterations: take checkpoints of topologies with iterations, though records on their way back are in
            none: a restore loses those that were on a feedback edge when the barrier passed.
        force_unaligned: take unaligned ones of such topologies too; they hold no records on their way back either.
        max_subtasks_per_channel_state_file: subtasks of a slot that share a file of what unaligned barriers overtook.
        interruptible_timers: with ``unaligned``, a barrier need not wait until all timers that are due have fired.
        directory: where checkpoints lie, a path or any URL that fsspec knows; None: in the driver's memory.
        savepoint_directory: where savepoints go if none is named for one.
        storage: a storage of one's own that keeps all URLs with the scheme of ``directory``: a class that derives
            from `CheckpointStorage`, or ``"package.module:Class"``; None: fsspec, or an installed package's.
        memory_threshold: snapshots up to this size are part of the metadata (`fs.memory-threshold`), bytes.
        write_buffer_size: so much is gathered before it goes to the file system, bytes; at least ``memory_threshold``.
        max_memory_state: with ``directory`` None, the largest snapshot of one subtask, bytes.
        backend: ``"heap"`` or ``"lmdb"`` (state larger than memory).
        incremental: write what has changed since the last checkpoint only.
        changelog: write changes all the time, and the state itself every ``materialization_interval``.
        materialization_interval: see ``changelog``.
        max_parallelism: number of key groups, the highest parallelism a job can ever be restored with.
        file_merging_across: checkpoints may share a file (within one checkpoint subtasks of a slot always do).
        max_file_size: of a shared file, bytes.
        max_space_amplification: bytes that files take up ÷ bytes that are of use, above which they are rewritten.
        local_recovery: directory for a second copy on the slot's own disk, None for none.
        allow_unclaimed_state: what a restore may leave behind, by name: ``"uid"``, all that an operator had which the
            program has no more; ``"uid/name"``, one state of an operator (``"uid/name (ttl)"`` with a time to
            live); ``"uid/partition-3"``, the position of a source's partition. True: all that belongs to operators
            and partitions that the program has no more.
        migrations: `StateMigration` for each keyed state whose type or name has changed.
        key: secret behind the checksums of everything that is read back; None: one is made and kept with the
            checkpoints, which protects from damage, not from writers of that directory.
        debloating: keep less in flight on a channel than ``TopologyOptions.channel_bytes`` where it is slow.
        debloat_target: time in which what is in flight is to be worked off.
        state_directory: where the LMDB backend keeps its files, on the slot's machine; None: a temporary one.
        failures: what becomes of records that fail; None: the first one fails the job. Operators may say otherwise by
            ``on_failure``. One whose input is broadcast fails the job all the same.
    """

    interval: checks.Duration | None = "10s"
    mode: CheckpointingMode = CheckpointingMode.EXACTLY_ONCE
    timeout: checks.Duration = "10m"
    min_pause: checks.Duration = 0
    max_concurrent: int = 1
    tolerable_failures: int = 0
    interval_during_backlog: checks.Duration | None = None
    retained: int = 1
    retention: Retention | None = None
    unaligned: bool = False
    aligned_timeout: checks.Duration = 0
    force_iterations: bool = False
    force_unaligned: bool = False
    max_subtasks_per_channel_state_file: int = 5
    interruptible_timers: bool = False
    directory: str | None = None
    savepoint_directory: str | None = None
    storage: str | type[CheckpointStorage] | None = None
    memory_threshold: int = 20 * KIB
    write_buffer_size: int = 4 * KIB
    max_memory_state: int = 5 * MIB
    backend: Literal["heap", "lmdb"] = "heap"
    incremental: bool = False
    changelog: bool = False
    materialization_interval: checks.Duration = "10m"
    max_parallelism: int = 128
    file_merging_across: bool = False
    max_file_size: int = 32 * MIB
    max_space_amplification: float = 2.0
    local_recovery: str | None = None
    allow_unclaimed_state: bool | tuple[str, ...] = False
    migrations: tuple[StateMigration, ...] = ()
    key: bytes | None = field(default=None, repr=False)
    debloating: bool = False
    debloat_target: checks.Duration = "1s"
    state_directory: str | None = None
    failures: FailurePolicy | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            if "Duration" in str(option.type):
                getattr(self, f"{option.name}_ms")
        for name, (least, most) in _BOUNDS.items():
            checks.check_int(getattr(self, name), name, least=least, most=most)
        ratio = self.max_space_amplification
        if type(ratio) is not int or ratio:
            # 0 is no bound.
            checks.check_number(ratio, "max_space_amplification (0: no bound)", least=1, most=1e6)
        for option in fields(self):
            if option.type == "bool":
                checks.check_bool(getattr(self, option.name), option.name)
        for name in ("directory", "savepoint_directory", "local_recovery", "state_directory"):
            checks.check_path(getattr(self, name), name)
        for name in ("directory", "savepoint_directory"):
            _check_slashes(getattr(self, name) or "", name)
        if self.storage is not None:
            serve(self.storage, self.directory)
        for name in ("directory", "savepoint_directory"):
            _check_scheme(getattr(self, name), name)
        object.__setattr__(self, "mode", checks.member(self.mode, "mode", CheckpointingMode))
        if self.retention is not None:
            object.__setattr__(self, "retention", checks.member(self.retention, "retention", Retention))
        checks.check_choice(self.backend, "backend", ("heap", "lmdb"))
        checks.check_bytes(self.key, "key", least=MIN_KEY_BYTES)
        if self.failures is not None:
            checks.check_instance(self.failures, "failures", FailurePolicy)
        self._check_names()
        self._check_combinations()

    def _check_names(self) -> None:
        allowed = self.allow_unclaimed_state
        if not isinstance(allowed, bool):
            if not isinstance(allowed, list | tuple | set) or not all(
                isinstance(one, str) for one in allowed
            ):
                raise ConfigError(
                    f"allow_unclaimed_state: expected True, False, or a list of names like 'uid/state', got {allowed!r}"
                )
            object.__setattr__(self, "allow_unclaimed_state", tuple(allowed))
        given = self.migrations
        if not isinstance(given, list | tuple) or not all(isinstance(one, StateMigration) for one in given):
            raise ConfigError(f"migrations: expected a list of StateMigration, got {given!r}")
        object.__setattr__(self, "migrations", tuple(given))
        names = [(one.operator, one.state) for one in given]
        for operator, state in names:
            if names.count((operator, state)) > 1:
                raise ConfigError(f"migrations: there are two for {operator}/{state}; one does all versions")

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
        if self.interruptible_timers and not self.unaligned:
            raise ConfigError(
                "interruptible_timers, unaligned: a barrier that overtakes nothing waits behind the watermark, and "
                "that for its timers; set both"
            )
        backlog, interval = self.interval_during_backlog_ms, self.interval_ms
        if backlog is not None and interval is None:
            raise ConfigError(
                "interval_during_backlog, interval: without an interval there is nothing to replace"
            )
        if backlog and interval is not None and backlog < interval:
            raise ConfigError("interval_during_backlog, interval: expected 0 or at least the interval")
        if self.directory is None and self.retention not in (None, Retention.NO_EXTERNALIZED_CHECKPOINTS):
            raise ConfigError(
                "retention, directory: what lies in the driver's memory is gone with it; give a directory"
            )
        if self.changelog and self.directory is None:
            raise ConfigError("changelog, directory: a log that is written all the time needs a directory")

    def _ms(self, name: str, least: int = 1) -> int:
        return checks.duration_ms(getattr(self, name), name, least=least)

    @property
    def effective_retention(self) -> Retention:
        """``retention``, or what it is if none is given: state that was asked to be on disk is not thrown away."""
        if self.retention is not None:
            return self.retention
        lasting = self.directory is not None
        return Retention.RETAIN_ON_CANCELLATION if lasting else Retention.NO_EXTERNALIZED_CHECKPOINTS

    @property
    def interval_ms(self) -> int | None:
        """``interval`` in ms."""
        return None if self.interval is None else self._ms("interval")

    @property
    def interval_during_backlog_ms(self) -> int | None:
        """``interval_during_backlog`` in ms; None: as ``interval``."""
        return None if self.interval_during_backlog is None else self._ms("interval_during_backlog", 0)

    @property
    def timeout_ms(self) -> int:
        """``timeout`` in ms."""
        return self._ms("timeout")

    @property
    def min_pause_ms(self) -> int:
        """``min_pause`` in ms."""
        return self._ms("min_pause", 0)

    @property
    def aligned_timeout_ms(self) -> int:
        """``aligned_timeout`` in ms."""
        return self._ms("aligned_timeout", 0)

    @property
    def materialization_interval_ms(self) -> int:
        """``materialization_interval`` in ms."""
        return self._ms("materialization_interval")

    @property
    def debloat_target_ms(self) -> int:
        """``debloat_target`` in ms."""
        return self._ms("debloat_target")


def _check_slashes(url: str, name: str) -> None:
    """Raise `ConfigError` for a URL without its slashes: as a path, its checkpoints would go with this machine."""
    found = _NO_SLASHES.match(url)
    if found is not None:
        got = shown_url(url) if set(url) & set("@?#=") else url
        raise ConfigError(
            f"{name}: expected a path, or a URL like {found[1]}://place, got {got!r} (with ./ before it, it is a path)"
        )


def _check_scheme(url: str | None, name: str) -> None:
    """Raise `ConfigError` for a scheme that nobody knows; a package of fsspec's need not be installed here."""
    scheme, is_url, _ = (url or "").partition("://")
    if not is_url or served(scheme.lower()):
        return
    known = fsspec_schemes()
    unknown = [part for part in scheme.lower().split("::") if part not in known]
    if unknown and installed(scheme.lower()) is None:
        near = get_close_matches(unknown[0], known, 1)
        raise ConfigError(
            f"{name}: {shown_url(str(url))}: fsspec knows no scheme {unknown[0]!r}"
            + (f"; did you mean {near[0]!r}?" if near else "; write a path, or a URL of one that it knows")
            + "; a storage of your own is told by storage="
        )
