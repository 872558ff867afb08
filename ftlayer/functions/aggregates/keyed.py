from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from ftlayer.functions.aggregates.typed import AggregatePlan
from ftlayer.functions.retry_rules import NO_RULES, RetryRules


@dataclass(frozen=True)
class KeyedAggregate:
    """Built-in aggregates a key: emits for every record its key, and what they are then. ``schema`` is the plan's."""

    uid: str
    plan: AggregatePlan
    keys: tuple[str, ...]
    schema: pa.Schema
    volatile_state: bool = False
    rules: RetryRules = NO_RULES
