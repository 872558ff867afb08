"""What each value of a vertex is, in a line and with its unit, for those who look at its metrics."""

from __future__ import annotations

_SINCE = "since the start of the vertex"

TEXTS = {
    "cancelled_replays": f"Records that timed out and came to be done before their replay went out, {_SINCE}.",
    "completed": f"Records in flight that came to be done, {_SINCE}.",
    "dead": f"Records that became dead letters, {_SINCE}.",
    "dead_letters": "Dead letters held now, in records.",
    "deduplicated_calls": f"Calls of clients that came again and had their effect once, {_SINCE}.",
    "delivered_done": f"Records delivered to micro-batches that a commit finished, {_SINCE}.",
    "duplicate_roots": f"Records registered under an id that another record had, {_SINCE}.",
    "failed_explicit": f"Attempts that ended because a task or query reported a failure, {_SINCE}.",
    "failed_sealed": f"Attempts that ended because a micro-batch sealed its failures, {_SINCE}.",
    "in_delivery": "Accepted or due records that no micro-batch has committed, now.",
    "incarnation": "How often the store was opened, the sum over its shards.",
    "ingested": f"Records that ingests accepted, {_SINCE}.",
    "late_ignored": f"Events about records that were not followed any more, {_SINCE}.",
    "live_segments": "Segments of the store that hold records in flight, now.",
    "orphans": "Records of which events came, and which are not registered yet, now.",
    "orphans_dropped": f"Records of which events came, and which were never registered, {_SINCE}.",
    "pending": "Records in flight, now.",
    "persisted": f"Records in flight that were stored, {_SINCE}.",
    "purged": f"Dead letters that were removed, {_SINCE}.",
    "recalled": f"Records in flight that became due at once because their task was lost, {_SINCE}.",
    "recovered": "Records that were in flight when the vertex started.",
    "registered": f"Records that other queries or tasks registered to be followed, {_SINCE}.",
    "replayed": f"Records given out again for another attempt, {_SINCE}.",
    "requeued": f"Dead letters that were given another round of attempts, {_SINCE}.",
    "streams": "Streams of records that the vertex knows, now.",
    "timed_out": f"Attempts that ended because they took longer than the timeout, {_SINCE}.",
    "tracked_roots": "Records in flight that the acker follows, now.",
    "used_bytes": "Bytes of the store's map that are in use, of all shards, now.",
    "used_share": "Share of the store's map that is in use, from 0 to 1, of the fullest shard, now.",
    "waiting": "Failed records that wait for their pause or are due, now.",
}
"""By the name in `StatsReply.values`."""
