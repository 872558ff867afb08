"""Texts of the demo for each kind of run: its course, and the meaning of the ledger's counts."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.demo.choices import Kind, Victim
from ftlayer.demo.layout import MAX_ATTEMPTS
from ftlayer.demo.text import PreparedInput

_THROUGH = {
    Kind.QUERY: "an ordinary PySpark streaming query on two cores, in {batches} micro-batches: parse → enrich → key_by "
    "→ sink. ftlayer is wrapped around it.",
    Kind.TRACKED: "a continuous topology in two slots of Spark, as they come in: parse → enrich → key_by → sink. Its "
    "vertex stores and follows every record (acker mode).",
    Kind.CHECKPOINTED: "a continuous topology in two slots of Spark, as they come in: parse → enrich → key_by → count "
    "→ sink. Twice a second barriers take a snapshot of all state (barrier mode).",
}

_BAD_LINES = {
    Kind.QUERY: "Some lines cannot be parsed. Plain Spark would fail the task, then the query, and do so again after "
    f"each restart. Here such a line fails alone: it is tried {MAX_ATTEMPTS} times, then kept as a dead letter.",
    Kind.TRACKED: f"Some lines cannot be parsed. Such a line fails alone: it is tried {MAX_ATTEMPTS} times, then kept "
    "as a dead letter.",
    Kind.CHECKPOINTED: "Some lines cannot be parsed. Such a line fails alone, and all that it had changed is taken "
    f"back: it is tried {MAX_ATTEMPTS} times, then it is a dead letter, in a sink of its own.",
}

_SERVICE = "The enrichment service does not answer now and then. Just the line concerned is tried again."
_COUNTS = (
    "Each word gets a number: the how-manyth of its kind it is. What was lost or counted twice would show."
)

_PHRASES = {
    Victim.SLOT: "a slot (one of the two processes that all operators run in)",
    Victim.VERTEX: "the ftlayer vertex (the process that stores what failed)",
    Victim.DRIVER: "the driver with all of Spark",
}


def explanation(kind: Kind, prepared: PreparedInput, victims: Sequence[Victim]) -> str:
    through = _THROUGH[kind].format(batches=prepared.batches)
    lines = [
        f"{prepared.lines:,} lines of text ({prepared.title}, {prepared.sources} files) go through {through}",
        f"• {_BAD_LINES[kind]}",
        f"• {_SERVICE}",
    ]
    if kind is Kind.CHECKPOINTED:
        lines.append(f"• {_COUNTS}")
    if victims:
        names = ", then ".join(_PHRASES[victim] for victim in dict.fromkeys(victims))
        where = "In the middle of a batch" if kind is Kind.QUERY else "In the middle of it"
        first = "first " if ", then " in names else ""
        lines.append(f"• {where} {first}{names} is killed with SIGKILL. The run goes on by itself.")
    lines.append("At the end every line is looked up in the sink and held against a recount without Spark.")
    return "\n".join(lines)


ACCOUNTS: dict[Kind, dict[str, str]] = {
    Kind.QUERY: {
        "first_try": "done at the first try",
        "after_replay": "done after a replay: failed at first, passed later",
    },
    Kind.TRACKED: {
        "first_try": "done at the first try",
        "after_replay": "done after a replay: failed at first, passed later",
        "repeated": "done, and some rows written again: on their way at a kill (acker mode: at least once)",
    },
    Kind.CHECKPOINTED: {
        "first_try": "done at the first try",
        "after_replay": "done after a retry: failed at first, passed later",
    },
}
"""The ledger's counts of lines that are done."""

BY_HAND = {
    "mended": "done after somebody had edited their dead letters",
    "purged": "dead letters that somebody purged",
}
"""The ledger's counts of lines that people have decided about; shown where there are some."""

DEAD = f"dead letters, after {MAX_ATTEMPTS} attempts each:"

FAULTS = {
    "lost": "neither in the sink nor a dead letter",
    "duplicated": "there more than once",
    "altered": "other rows, or another reason, than the recount has",
    "misplaced": "in the sink instead of a dead letter, the other way round, or both",
    "unknown": "never in the input",
}
"""Counts that must be 0, and what others would mean."""

MISCOUNTED = "words whose occurrences are not numbered 1, 2, 3, … without gaps"

BALANCED = {
    Kind.QUERY: "every line is in the sink exactly once, or is a dead letter exactly once{purged}.",
    Kind.TRACKED: "every line is in the sink, or is a dead letter exactly once{purged}.",
    Kind.CHECKPOINTED: "every line is in the sink exactly once, or is a dead letter exactly once, and every count is "
    "exact.",
}


def faults(kind: Kind) -> dict[str, str]:
    """Return the faults that this kind of run can have, and what each would mean."""
    found = dict(FAULTS)
    if kind is Kind.TRACKED:
        found["duplicated"] = "there more than once, though nothing was replayed"
    if kind is Kind.CHECKPOINTED:
        found["miscounted"] = MISCOUNTED
    return found
