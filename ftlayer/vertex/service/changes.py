"""Changing calls that are no intake: written in groups. They always go on, and change memory at once."""

from __future__ import annotations

import logging
from typing import cast

from ftlayer.errors import FTLayerError
from ftlayer.vertex.calls import MutatingCall
from ftlayer.vertex.rules.layer import CallOutcome
from ftlayer.vertex.service.rules import REFUSALS, Rules, Waiting, internal_fault, shard_closed

logger = logging.getLogger(__name__)


def write_changes(group: list[Waiting], rules: Rules) -> None:
    """Run the calls of ``group`` in one transaction, in order, and answer them.

    If it is lost, so is memory (`Rules.lost`). A fault in the rules is the answer to the call that met it; the
    others are for the rules that come next, and their clients send them again.
    """
    applied: list[tuple[Waiting, CallOutcome]] = []
    refused: list[tuple[Waiting, FTLayerError]] = []
    left = group.copy()
    try:
        with rules.store.write(intake=False) as txn, rules.staging(changes_memory=True) as layer:
            for waiting in group:
                call = cast(MutatingCall, waiting.call)
                try:
                    applied.append((waiting, layer.apply(txn, call, waiting.envelope, rules.now())))
                except REFUSALS as error:
                    refused.append((waiting, error))
                left.remove(waiting)
    except FTLayerError as error:
        rules.abandon()
        refused += [(waiting, error) for waiting in [*(waiting for waiting, _ in applied), *left]]
    except Exception as error:
        logger.exception("fault in the rules")
        rules.lose()
        refused += [
            (waiting, shard_closed()) for waiting in [*(waiting for waiting, _ in applied), *left[1:]]
        ]
        refused += [(waiting, internal_fault(error)) for waiting in left[:1]]
    else:
        rules.confirm(outcome for _, outcome in applied)
        for waiting, outcome in applied:
            waiting.answer(outcome.reply)
    for waiting, refusal in refused:
        waiting.answer(refusal)
