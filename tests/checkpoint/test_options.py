"""Options of checkpoints: what they mean in milliseconds, and what is refused when they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftlayer.checkpoint.options import CheckpointConfig, CheckpointingMode, CheckpointStorage, Retention
from ftlayer.common.checks import duration_ms
from ftlayer.errors import ConfigError


def test_durations() -> None:
    config = CheckpointConfig(
        interval="1s", timeout=0.25, min_pause="0s", interval_during_backlog="1m", debloat_target="500ms"
    )
    assert (config.interval_ms, config.timeout_ms, config.min_pause_ms) == (1_000, 250, 0)
    assert (config.interval_during_backlog_ms, config.debloat_target_ms) == (60_000, 500)
    assert config.aligned_timeout_ms == 0
    assert config.materialization_interval_ms == 600_000


def test_no_interval_and_no_checkpoint_during_a_backlog_are_two_things() -> None:
    assert CheckpointConfig(interval=None).interval_ms is None
    assert CheckpointConfig().interval_during_backlog_ms is None
    assert CheckpointConfig(interval_during_backlog=0).interval_during_backlog_ms == 0


@pytest.mark.parametrize("zero", [0, "0", "0ms", "0s", "0 s", "0m", " 0.0h "])
def test_zero(zero: str | int) -> None:
    assert duration_ms(zero, "min_pause", least=0) == 0
    with pytest.raises(ConfigError, match="timeout"):
        duration_ms(zero, "timeout")


def test_enums_by_their_names() -> None:
    config = CheckpointConfig(mode="at-least-once", retention="retain-on-cancellation", directory="/chk")  # type: ignore[arg-type]
    assert config.mode is CheckpointingMode.AT_LEAST_ONCE
    assert config.retention is Retention.RETAIN_ON_CANCELLATION


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(CheckpointConfig(key=b"secret" * 4))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interval": 0}, "interval"),
        (
            {"directory": "s33://bucket/chk"},
            "directory: s33://bucket/chk: fsspec knows no scheme 's33'; did you mean 's3'",
        ),
        ({"directory": "table:x"}, "directory: expected a path, or a URL like table://place, got 'table:x'"),
        ({"directory": "s3:/bucket", "storage": CheckpointStorage}, "directory: .* got 's3:/bucket'"),
        ({"savepoint_directory": "s3:k:hunter2@b"}, "savepoint_directory: .* like s3://place, got '…'"),
        (
            {"savepoint_directory": "simplecache::qqq://x"},
            "savepoint_directory: .* no scheme 'qqq'; write a path",
        ),
        (
            {"max_space_amplification": 0.5},
            r"max_space_amplification \(0: no bound\): expected a number from 1 .* got 0.5",
        ),
        ({"interval": "soon"}, "interval"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"min_pause": -1}, "min_pause: expected 0 or a duration of at least 1 ms, got -1"),
        ({"min_pause": False}, "min_pause"),
        ({"min_pause": "0 months"}, "min_pause"),
        ({"aligned_timeout": None}, "aligned_timeout"),
        ({"materialization_interval": 0}, "materialization_interval"),
        ({"debloat_target": "0s"}, "debloat_target"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"tolerable_failures": -1}, "tolerable_failures"),
        ({"retained": 0}, "retained"),
        ({"retained": True}, "retained"),
        ({"memory_threshold": (1 << 20) + 1}, "memory_threshold"),
        ({"max_memory_state": 0}, "max_memory_state"),
        ({"max_parallelism": 0}, "max_parallelism"),
        ({"max_parallelism": 32_769}, "max_parallelism"),
        ({"max_file_size": 100}, "max_file_size"),
        ({"max_space_amplification": 0.5}, "max_space_amplification"),
        ({"max_space_amplification": "2"}, "max_space_amplification"),
        ({"max_space_amplification": float("nan")}, "max_space_amplification"),
        ({"mode": "twice"}, "mode: expected one of exactly-once, at-least-once, got 'twice'"),
        ({"retention": "forever"}, "retention"),
        ({"backend": "rocksdb"}, "backend"),
        ({"key": b"short"}, "key"),
        ({"directory": ""}, "directory"),
        ({"savepoint_directory": Path("/save")}, "savepoint_directory"),
        ({"local_recovery": ""}, "local_recovery"),
        ({"unaligned": "false"}, "unaligned: expected True or False, got 'false'"),
        ({"incremental": 1}, "incremental"),
        ({"changelog": "no"}, "changelog"),
        ({"debloating": None}, "debloating"),
        ({"file_merging_across": "no"}, "file_merging_across"),
        ({"allow_unclaimed_state": "no"}, "allow_unclaimed_state"),
        ({"state_directory": ""}, "state_directory"),
    ],
)
def test_what_makes_no_sense_by_itself(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CheckpointConfig(**options)


@pytest.mark.parametrize(
    ("options", "both"),
    [
        ({"unaligned": True, "mode": CheckpointingMode.AT_LEAST_ONCE}, ("unaligned", "mode")),
        ({"unaligned": True, "max_concurrent": 2}, ("unaligned", "max_concurrent")),
        ({"min_pause": 1, "max_concurrent": 2}, ("min_pause", "max_concurrent")),
        ({"aligned_timeout": "1s"}, ("aligned_timeout", "unaligned")),
        ({"interruptible_timers": True}, ("interruptible_timers", "unaligned")),
        ({"interval": None, "interval_during_backlog": "1m"}, ("interval_during_backlog", "interval")),
        ({"interval": "1m", "interval_during_backlog": "59s"}, ("interval_during_backlog", "interval")),
        ({"retention": Retention.RETAIN_ON_CANCELLATION}, ("retention", "directory")),
        ({"changelog": True}, ("changelog", "directory")),
    ],
)
def test_what_makes_no_sense_together(options: dict[str, Any], both: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        CheckpointConfig(**options)
    assert str(refused.value).startswith(f"{both[0]}, {both[1]}: ")


@pytest.mark.parametrize(
    "options",
    [
        {"unaligned": True, "aligned_timeout": "1s"},
        {"unaligned": True, "interruptible_timers": True},
        {"max_concurrent": 4, "min_pause": 0},
        {"interval": "1m", "interval_during_backlog": "1m"},
        {"interval": "1m", "interval_during_backlog": 0},
        {"max_space_amplification": 0},
        {"memory_threshold": 0},
        {"max_parallelism": 32_768},
    ],
)
def test_what_does(options: dict[str, Any]) -> None:
    CheckpointConfig(**options)
