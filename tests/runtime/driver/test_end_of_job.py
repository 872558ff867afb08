"""The end of a job that goes wrong itself: all callers that wait hear of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from ftlayer.config import TopologyOptions
from ftlayer.errors import JobError
from ftlayer.restart import NoRestart
from ftlayer.runtime.driver.job import Job, JobParts
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import IterableSource, Source
from ftlayer.vertex.calls import StreamStatus

WAIT_S = 600


def parts(**changes: Any) -> Any:
    source = Source("numbers", IterableSource((range(3).__iter__,)), pa.schema([("id", pa.int64())]))
    graph = JobGraph("ending", (JobVertex("numbers", (source,), 1),), (), False)
    made = {"server": Mock(), "submitter": Mock(), "vertex": Mock(), "planners": Mock(), "on_over": Mock()}
    return JobParts(graph, TopologyOptions(), NoRestart(), **made | changes)


@pytest.mark.parametrize("part", ["planners", "server", "vertex"])
def test_a_part_that_cannot_be_closed_leaves_no_one_waiting_and_nothing_open(part: str) -> None:
    broken = Mock()
    broken.close.side_effect = OSError("the disk is gone")
    # What ends the job: its planners do not come up.
    broken.start.side_effect = ValueError("no")
    broken.client.call.return_value = StreamStatus(0, 0, 0, 0, -1)
    planners = broken if part == "planners" else Mock(start=broken.start)
    vertex = Mock(client=broken.client)
    made = parts(**{"planners": planners, "vertex": vertex, part: broken})
    job = Job("ending-1")
    job.start(made)
    assert job.over(WAIT_S)
    with pytest.raises(JobError, match=r"at the job's end.*the disk is gone"):
        job.wait(WAIT_S)
    for each in (made.planners, made.server, made.vertex):
        each.close.assert_called_once_with()
    made.on_over.assert_called_once_with()
