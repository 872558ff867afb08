"""Why a handler gives a checkpoint up: the texts of `GiveUp.reason`."""

from __future__ import annotations

SUBSUMED = "a later checkpoint came before this one's barriers did"
"""A channel has gone on to a later checkpoint, or that one is unaligned and could not wait."""

GIVEN_UP_BEFORE = "a task before this one gave it up"
"""A cancel marker has come."""

TOO_MANY = "too many checkpoints under way"
"""`TrackingHandler` has let the earliest one go."""
