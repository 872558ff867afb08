"""The reference of checkpointing against the code, and against what Flink has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from ftlayer.checkpoint.options import CheckpointConfig, CheckpointingMode, FailurePolicy, Retention

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "checkpointing.md").read_text("utf-8")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}

FLINK = """
    aligned-checkpoint-timeout checkpoints-after-tasks-finish cleaner.parallel-mode create-subdir data-inline-threshold
    dir externalized-checkpoint-retention file-merging.across-checkpoint-boundary file-merging.enabled
    file-merging.max-file-size file-merging.max-space-amplification file-merging.max-subtasks-per-file
    file-merging.pool-blocking incremental interval interval-during-backlog local-backup.dirs local-backup.enabled
    max-concurrent-checkpoints min-pause mode num-retained savepoint-dir storage timeout tolerable-failed-checkpoints
    unaligned.enabled unaligned.forced unaligned.interruptible-timers.enabled
    unaligned.max-subtasks-per-channel-state-file write-buffer-size
"""


def rows(first: str) -> dict[str, str]:
    """Return the second column of all tables whose first one is called so, by the first."""
    found = {}
    for head, body in re.findall(r"^\| ([^|]+) \|[^\n]*\n\|[- |]+\n((?:\|[^\n]*\n)+)", PAGE, re.MULTILINE):
        if head == first:
            found.update(re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", body, re.MULTILINE))
    return found


def value(text: str) -> Any:
    text = text.strip("`")
    number, _, unit = text.partition(" ")
    if unit in UNITS:
        return int(number) * UNITS[unit]
    return eval(text, {"CheckpointingMode": CheckpointingMode, "Retention": Retention})


def test_every_option_is_in_a_table_with_its_default() -> None:
    found = {name: value(default) for name, default in rows("field").items()}
    assert found == {field.name: field.default for field in dataclasses.fields(CheckpointConfig)}


def test_every_option_of_a_failure_policy_is_there_with_its_default() -> None:
    section = PAGE.partition("### Records that fail\n")[2].partition("\n## ")[0]
    found: dict[str, Any] = {}
    for names, default in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]*) \|", section, re.MULTILINE):
        found |= {name: value(default) for name in re.findall(r"`(\w+)`", names)}
    assert found.pop("failures") is None
    assert found == {field.name: field.default for field in dataclasses.fields(FailurePolicy)}


@pytest.mark.parametrize("key", FLINK.split())
def test_every_option_of_flink_has_a_row(key: str) -> None:
    assert re.search(rf"^\| `{re.escape(key)}` \|.*\w", PAGE, re.MULTILINE)


def test_what_is_said_of_flinks_options_names_ours() -> None:
    names = {field.name for field in dataclasses.fields(CheckpointConfig)}
    for key, here in re.findall(r"^\| `([a-z.-]+)` \| [^|]* \| `(\w+)`", PAGE, re.MULTILINE):
        assert here in names, key


@pytest.mark.parametrize("retention", Retention)
def test_what_is_left(retention: Retention) -> None:
    row = re.search(rf"^\| `Retention.{retention.name}` \|(.*)\|$", PAGE, re.MULTILINE)
    assert row is not None
    finished, cancelled, failed = (cell.strip() != "nothing" for cell in row[1].split("|"))
    assert not finished
    assert cancelled == (retention is Retention.RETAIN_ON_CANCELLATION)
    assert failed == (retention is not Retention.NO_EXTERNALIZED_CHECKPOINTS)
