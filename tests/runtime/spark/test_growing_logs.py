"""Lines of files that grow while the topology runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import JobState

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("replay", ["store", pytest.param("source", marks=pytest.mark.campaign)])
def test_words_of_files_that_grow(
    environment: Any, connect: Any, logs_kit: ModuleType, real_lines: list[str], tmp_path: Path, replay: str
) -> None:
    layer = connect()
    logs = logs_kit.GrowingLogs(tmp_path, real_lines)
    logs.grow(500)
    env = environment(layer, f"growing-{replay}")
    logs_kit.build(env, tmp_path, replay=replay)
    job = env.execute_async()
    ledger = logs_kit.Ledger(tmp_path, layer, f"growing-{replay}")
    for _ in range(20):
        before = len(ledger.sink())
        logs.grow(100)
        logs_kit.until(job, lambda before=before: len(ledger.sink()) > before)
    logs_kit.until(job, ledger.all_there)
    assert job.drain(600)
    assert job.state is JobState.ENDED
    ledger.check(exact=True)

    # Every byte was read once, and the source was told of all of them.
    reads = sorted(tuple(row) for row in logs_kit.Notes(tmp_path, "reads").rows())
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.log")}
    for name, size in sizes.items():
        edges = [(begin, end) for file, begin, end in reads if file == name]
        assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == size
    commits = logs_kit.Notes(tmp_path, "commits").rows()
    assert commits[-1] == sizes
    assert max(Counter(str(end) for end in commits).values()) == 1
