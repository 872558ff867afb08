"""Plain values of what is known, as JSON has them: the same fields for pages, the API and ``--json``.

Times are ISO 8601 in UTC with milliseconds, null where there is none; durations are seconds; shares 0 to 1; roots and
origins 16 hexadecimal digits, keys hexadecimal. With ``mask`` nothing that a record says is in them
(`ftlayer.monitor.facts.masking`).
"""

from __future__ import annotations

from ftlayer.monitor.facts.common import Facts, hour_facts, iso, seconds
from ftlayer.monitor.facts.graph import operator_facts
from ftlayer.monitor.facts.jobs import job_facts, job_summary_facts, order_facts
from ftlayer.monitor.facts.latencies import latency_facts
from ftlayer.monitor.facts.records import (
    audit_facts,
    explained_facts,
    group_facts,
    letter_group_facts,
    payload_facts,
    record_facts,
    record_stream,
)
from ftlayer.monitor.facts.vertices import overview_facts, stream_facts, vertex_facts

__all__ = [
    "Facts",
    "audit_facts",
    "explained_facts",
    "group_facts",
    "hour_facts",
    "iso",
    "job_facts",
    "job_summary_facts",
    "latency_facts",
    "letter_group_facts",
    "operator_facts",
    "order_facts",
    "overview_facts",
    "payload_facts",
    "record_facts",
    "record_stream",
    "seconds",
    "stream_facts",
    "vertex_facts",
]
