"""Plain values of what is known, as JSON has them: the same fields for pages, the API and ``--json``.

Times are ISO 8601 in UTC with milliseconds, null where there is none; durations are seconds; shares 0 to 1; roots and
origins 16 hexadecimal digits, keys hexadecimal. With ``mask`` nothing that a record says is in them
(`ftlayer.monitor.rules.facts.common`).
"""

from __future__ import annotations

from ftlayer.monitor.rules.facts.common import Facts as Facts
from ftlayer.monitor.rules.facts.common import audit_facts as audit_facts
from ftlayer.monitor.rules.facts.common import came_from as came_from
from ftlayer.monitor.rules.facts.common import explained_facts as explained_facts
from ftlayer.monitor.rules.facts.common import final_of as final_of
from ftlayer.monitor.rules.facts.common import group_facts as group_facts
from ftlayer.monitor.rules.facts.common import hour_facts as hour_facts
from ftlayer.monitor.rules.facts.common import iso as iso
from ftlayer.monitor.rules.facts.common import latency_facts as latency_facts
from ftlayer.monitor.rules.facts.common import letter_group_facts as letter_group_facts
from ftlayer.monitor.rules.facts.common import record_facts as record_facts
from ftlayer.monitor.rules.facts.common import record_stream as record_stream
from ftlayer.monitor.rules.facts.common import seconds as seconds
from ftlayer.monitor.rules.facts.jobs import job_facts as job_facts
from ftlayer.monitor.rules.facts.jobs import job_summary_facts as job_summary_facts
from ftlayer.monitor.rules.facts.jobs import operator_facts as operator_facts
from ftlayer.monitor.rules.facts.jobs import order_facts as order_facts
from ftlayer.monitor.rules.facts.jobs import overview_facts as overview_facts
from ftlayer.monitor.rules.facts.jobs import stream_facts as stream_facts
from ftlayer.monitor.rules.facts.jobs import vertex_facts as vertex_facts
