"""Barrier mode: which policy each operator has for records that fail in it, and which rules of retries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ftlayer.checkpoint.failure_policy import FailurePolicy
from ftlayer.errors import InvalidTopologyError, UnsupportedError
from ftlayer.partitioning.partitioners import Broadcast
from ftlayer.topology.facts import LETTERS, rules_of_operator
from ftlayer.topology.graph import StreamGraph, StreamNode
from ftlayer.topology.operators import IterationTail, Source

Policies: TypeAlias = Mapping[str, FailurePolicy | None]
"""By operator's uid; None: a record that fails there fails the job."""

NO_POLICIES: Policies = {}


def policies_of(graph: StreamGraph, of_job: FailurePolicy | None) -> Policies:
    """Return each operator's policy: its own, else the job's.

    An operator whose input is broadcast has none of the job: where one of its subtasks took a record that another one
    could not take, they would no longer have the same state. Raises `InvalidTopologyError` if it has one of its own,
    and for a source that has one.
    """
    found = {node.uid: _policy_of(graph, node, of_job) for node in graph.nodes}
    for node in graph.nodes:
        if isinstance(node.operator, IterationTail):
            # It only passes on, and stays in the chain that it ends.
            found[node.uid] = found[graph.edges_into(node.uid)[0].source]
    return found


def _policy_of(graph: StreamGraph, node: StreamNode, of_job: FailurePolicy | None) -> FailurePolicy | None:
    own = node.on_failure if isinstance(node.on_failure, FailurePolicy) else None
    if isinstance(node.operator, Source):
        if own is not None:
            raise InvalidTopologyError(
                f"{node.uid!r}: on_failure is about records that a function fails for, and a source calls none with a "
                "record: give it to the operators behind, and say by restart=… what becomes of a source that raises"
            )
        return None
    copies = [
        edge.source
        for edge in graph.edges_into(node.uid)
        if isinstance(graph.partitioner_of(edge), Broadcast)
    ]
    if copies:
        if own is not None:
            raise InvalidTopologyError(
                f"{node.uid!r}: on_failure: every subtask gets what {copies[0]!r} broadcasts, and one that set a "
                "record aside would not have the others' state: say on_failure('fail'), or catch the error in its "
                "function"
            )
        return None
    return of_job if node.on_failure is None else own


def check_letters(graph: StreamGraph, policies: Policies) -> None:
    """Raise `InvalidTopologyError` where dead letters are to come from an operator that makes none."""
    for edge in graph.edges:
        if edge.tag == LETTERS and policies[edge.source] is None:
            raise InvalidTopologyError(
                f"{edge.source!r}: dead_letters: a record that fails there fails the job: give "
                "CheckpointConfig(failures=FailurePolicy(…)), or on_failure(FailurePolicy(…)); a source, and what is "
                "broadcast to, has none"
            )


def check_no_policies(graph: StreamGraph) -> None:
    """Raise `UnsupportedError` where an operator of a graph without checkpoints has a policy, or puts letters out."""
    for edge in graph.edges:
        if edge.tag == LETTERS:
            raise UnsupportedError(
                f"{edge.source!r}: dead_letters: there are some where records are tracked (layer=FTLayer…), and in "
                "barrier mode with a FailurePolicy (checkpointing=CheckpointConfig(…))"
            )
    for node in graph.nodes:
        if node.on_failure is not None:
            raise UnsupportedError(
                f"{node.uid!r}: on_failure is an option of barrier mode (checkpointing=CheckpointConfig(…)): leave it "
                "out; with layer=… records are tried again as FTLayer, retry=… of a source, retry_on and dead_on say"
            )


def check_rules(graph: StreamGraph, policies: Policies) -> None:
    """Raise `UnsupportedError` for rules on single records that fail where such a record fails the job."""
    for node in graph.nodes:
        rules = rules_of_operator(node.operator)
        if isinstance(node.operator, Source):
            if node.retry is not None or node.operator.replay != "store":
                option = "retry" if node.retry is not None else "replay"
                raise UnsupportedError(
                    f"{node.uid!r}: {option} of a source is for acker mode; with checkpointing=… rows are read again "
                    "from the last checkpoint, and FailurePolicy says how records are tried again: leave it out"
                )
            if rules.limit is not None:
                raise UnsupportedError(
                    f"{node.uid!r}: max_failing of a source is for acker mode; with checkpointing=… it is an option of "
                    "FailurePolicy, and of operators that have one"
                )
            if any(policies[uid] is not None for uid in graph.behind(node.uid)):
                continue
        elif policies[node.uid] is not None:
            continue
        option = (
            "max_failing is"
            if rules.limit is not None
            else "retry_on and dead_on are"
            if rules.levels
            else ""
        )
        if option:
            raise UnsupportedError(
                f"{node.uid!r}: {option} about single records that fail, and here one that fails fails the job: say "
                "what becomes of it by CheckpointConfig(failures=FailurePolicy(…)) or on_failure(FailurePolicy(…)), or "
                "leave the option out"
            )
