"""Samples that processes leave, and the figures that are made of them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from bench.scale import in_slots
from bench.scale.curves.keyed import phases
from bench.scale.in_slots import Sample, Samples, read_samples
from bench.scale.jobs import cpu_between, figures_of


def write(folder: Path, name: str, process: int, *samples: Sample) -> None:
    rows = [in_slots.row_of(sample) for sample in samples]
    (folder / f"{name}-{process}").write_bytes(b"".join(rows))


@pytest.mark.parametrize("every_s", [0.0, 3_600.0])
def test_a_process_leaves_its_first_sample_and_its_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    monkeypatch.setattr(in_slots, "SAMPLE_S", every_s)
    samples = pickle.loads(pickle.dumps(Samples(str(tmp_path), "out")))
    for records in (0, 10, 20, 30):
        samples.take(records)
    found = read_samples(tmp_path, "out")[os.getpid()]
    assert [sample.records for sample in found] == ([0, 10, 20, 30] if not every_s else [0, 30])
    assert found == sorted(found, key=lambda sample: sample.at)
    assert found[0].cpu <= found[-1].cpu
    assert found[0].peak > 1 << 20


def test_a_process_that_has_left_nothing_yet_has_no_samples(tmp_path: Path) -> None:
    write(tmp_path, "in", 7)
    assert read_samples(tmp_path, "in") == {}
    assert read_samples(tmp_path, "out") == {}


def test_rate_and_cpu_are_from_the_first_source_to_the_last_sink(tmp_path: Path) -> None:
    write(tmp_path, "in", 1, Sample(100.0, 5.0, 0, 0))
    write(tmp_path, "in", 2, Sample(101.0, 7.0, 0, 0))
    write(tmp_path, "out", 1, Sample(100.5, 5.5, 1 << 20, 10), Sample(103.0, 6.0, 2 << 20, 60))
    write(tmp_path, "out", 2, Sample(102.0, 7.5, 3 << 20, 40), Sample(104.0, 10.0, 4 << 20, 140))
    assert figures_of(tmp_path, 200) == {"records_per_s": 50.0, "cpu_us": 20_000.0, "peak_mib": 4.0}


def test_a_process_without_a_source_has_no_beginning_and_is_not_counted() -> None:
    ended = {1: [Sample(1, 4, 0, 0)], 2: [Sample(1, 9, 0, 0)]}
    assert cpu_between({1: [Sample(0, 1, 0, 0)]}, ended) == 3


def test_filling_ends_for_each_process_when_it_has_had_its_share_of_the_keys() -> None:
    begun = {1: [Sample(0, 1.0, 0, 0)], 2: [Sample(0, 2.0, 0, 0)]}
    came = {
        1: [Sample(1, 1.5, 0, 20), Sample(2, 2.0, 0, 50), Sample(6, 4.0, 0, 150)],
        2: [Sample(1, 2.5, 0, 30), Sample(3, 3.0, 0, 60), Sample(7, 5.0, 0, 150)],
    }
    assert phases(begun, came, 100) == {
        "fill_us": 2.0 / 100 * 1e6,
        "update_us": pytest.approx(4.0 / 190 * 1e6),
        "updates_per_s": 190 / 5,
    }
