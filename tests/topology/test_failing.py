"""Which policy each chain of barrier mode has for records that fail, and where one is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer import FailurePolicy
from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA
from ftlayer.common.rules.circuit import Limit
from ftlayer.errors import ConfigError, InvalidTopologyError, UnsupportedError
from ftlayer.functions.retry_rules import RetryRules, rules_of
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.explain import explain
from ftlayer.topology.job_graph import LETTERS, JobGraph, rules_of_operator
from ftlayer.topology.job_graph_generator import job_graph

OF_JOB = FailurePolicy(max_attempts=2, backoff="1s")
OWN = FailurePolicy(max_attempts=9)


def one(value: Any) -> Any:
    return value


def graph_of(builder: GraphBuilder, failures: FailurePolicy | None = OF_JOB) -> JobGraph:
    return job_graph(builder.build(), max_parallelism=8, failures=failures)


def chains(graph: JobGraph) -> dict[tuple[str, ...], FailurePolicy | None]:
    return {tuple(op.uid for op in vertex.operators): vertex.failures for vertex in graph.vertices}


def rules_at(graph: JobGraph, uid: str) -> RetryRules:
    return next(
        rules_of_operator(op) for vertex in graph.vertices for op in vertex.operators if op.uid == uid
    )


def a_line(off: GraphBuilder) -> Any:
    return off.source([], "n int", uid="source")


def test_without_a_policy_a_sink_is_chained_and_a_failure_fails_the_job(off: GraphBuilder) -> None:
    a_line(off).map(one, uid="parse").map(one, uid="score").sink(print, uid="out")
    assert chains(graph_of(off, None)) == {("source",): None, ("parse", "score", "out"): None}


def test_with_a_policy_of_the_job_a_sink_is_a_chain_of_its_own(off: GraphBuilder) -> None:
    a_line(off).map(one, uid="parse").map(one, uid="score").sink(print, uid="out")
    assert chains(graph_of(off)) == {("source",): OF_JOB, ("parse", "score"): OF_JOB, ("out",): OF_JOB}


def test_an_operators_own_word_comes_before_the_jobs_and_cuts_the_chain(off: GraphBuilder) -> None:
    parsed = a_line(off).map(one, uid="parse").on_failure(OWN)
    scored = parsed.map(one, uid="score").map(one, uid="round").on_failure("fail")
    scored.map(one, uid="show").on_failure("fail").sink(print, uid="out", on_failure="fail")
    assert chains(graph_of(off)) == {
        ("source",): OF_JOB,
        ("parse",): OWN,
        ("score",): OF_JOB,
        ("round", "show", "out"): None,
    }


def test_equal_policies_are_one(off: GraphBuilder) -> None:
    parsed = a_line(off).map(one, uid="parse").on_failure(FailurePolicy(backoff=["1s"]))
    parsed.map(one, uid="score").on_failure(FailurePolicy(backoff="1s")).sink(
        print, uid="out", on_failure="fail"
    )
    assert ("parse", "score") in chains(graph_of(off, None))


def test_a_policy_may_be_an_option_of_its_operator(off: GraphBuilder) -> None:
    a_line(off).map(one, uid="parse", on_failure=OWN).sink(print, uid="out", on_failure=OF_JOB)
    assert chains(graph_of(off, None)) == {("source",): None, ("parse",): OWN, ("out",): OF_JOB}


@pytest.mark.parametrize("wrong", ["ignore", FailurePolicy, 3, None])
def test_what_is_no_policy_is_refused_by_the_operators_name(off: GraphBuilder, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"'parse': on_failure: expected FailurePolicy"):
        a_line(off).map(one, uid="parse").on_failure(wrong)
    if wrong is not None:
        with pytest.raises(ConfigError, match=r"'out': on_failure: expected FailurePolicy"):
            a_line_of_another(wrong)


def a_line_of_another(wrong: Any) -> None:
    builder = GraphBuilder("other", status="off")
    builder.source([], "n int").sink(print, uid="out", on_failure=wrong)


def test_it_belongs_right_behind_its_operator(off: GraphBuilder) -> None:
    with pytest.raises(InvalidTopologyError, match=r"on_failure\(…\) belongs to an operator"):
        a_line(off).map(one).rebalance().on_failure("fail")


def test_behind_a_broadcast_edge_the_jobs_policy_does_not_hold(off: GraphBuilder) -> None:
    a_line(off).broadcast().map(one, uid="rules", parallelism=2).map(one, uid="next", parallelism=2).sink(
        print, uid="out"
    )
    found = chains(graph_of(off))
    assert found[("rules",)] is None
    assert found[("next",)] == OF_JOB


def test_behind_a_broadcast_edge_a_policy_of_its_own_is_refused_with_the_way_out(off: GraphBuilder) -> None:
    a_line(off).broadcast().map(one, uid="rules", parallelism=2).on_failure(OWN).sink(print, uid="out")
    with pytest.raises(InvalidTopologyError, match=r"'rules': on_failure: .*'source' broadcasts.*\('fail'\)"):
        graph_of(off)


@pytest.mark.parametrize(
    ("own", "sends", "keeps", "policy"),
    [
        (None, False, True, OF_JOB),
        (None, False, False, None),
        (None, True, False, OF_JOB),
        (OWN, False, False, OWN),
        ("fail", False, True, None),
    ],
)
def test_a_source_has_a_policy_for_rows_that_do_not_fit_where_their_letters_have_a_place(
    own: Any, sends: bool, keeps: bool, policy: Any
) -> None:
    builder = GraphBuilder("shop", status="off")
    line = a_line(builder)
    if own is not None:
        line.on_failure(own)
    line.map(one, uid="parse").sink(print, uid="out")
    if sends:
        line.dead_letters().sink(print, uid="dead")
    graph = job_graph(builder.build(), max_parallelism=8, failures=OF_JOB, keeps_letters=keeps)
    assert graph.vertex("source").failures == policy
    assert graph.vertex("parse").failures == OF_JOB


def test_an_iterations_tail_stays_in_its_chain(off: GraphBuilder) -> None:
    looped = a_line(off).iterate(uid="loop").on_failure(OWN)
    body = looped.map(one, uid="body").on_failure(OWN)
    looped.close_with(body.filter(one, uid="back").on_failure(OWN))
    body.sink(print, uid="out")
    assert list(chains(graph_of(off))) == [("source",), ("loop", "body"), ("back", "loop.tail"), ("out",)]


@pytest.mark.parametrize("policy", [OWN, "fail"])
def test_without_checkpoints_it_is_refused(env: GraphBuilder, policy: Any) -> None:
    env.source([], "n int").map(one, uid="parse").on_failure(policy).sink(print)
    with pytest.raises(UnsupportedError, match=r"'parse': on_failure is an option of barrier mode"):
        job_graph(env.build())


def test_an_operators_rules_are_asked_before_its_sources_and_the_policys(off: GraphBuilder) -> None:
    source = off.source([], "n int", uid="source", dead_on=KeyError)
    policy = FailurePolicy(dead_on=ValueError, max_failing="5%")
    source.map(one, uid="own", retry_on=OSError, max_failing=7).map(one, uid="plain").sink(print, uid="out")
    graph = graph_of(off, policy)
    behind = rules_of(None, KeyError, "").levels + policy.rules.levels
    assert rules_at(graph, "own").levels == rules_of(OSError, None, "").levels + behind
    assert rules_at(graph, "own").limit == Limit(count=7)
    assert rules_at(graph, "plain").levels == rules_at(graph, "out").levels == behind
    assert rules_at(graph, "plain").limit is None


@pytest.mark.parametrize("options", [{"dead_on": KeyError}, {"retry_on": OSError}, {"max_failing": 3}])
def test_rules_need_a_policy_where_they_are(off: GraphBuilder, options: dict[str, Any]) -> None:
    a_line(off).map(one, uid="parse", **options).on_failure("fail").sink(print)
    with pytest.raises(UnsupportedError, match=r"'parse': .*failures=FailurePolicy"):
        graph_of(off)


def test_a_sources_rules_need_a_policy_behind_it(off: GraphBuilder) -> None:
    off.source([], "n int", uid="source", dead_on=KeyError).sink(print, uid="out")
    graph_of(off)
    with pytest.raises(UnsupportedError, match=r"'source': retry_on and dead_on .*failures=FailurePolicy"):
        graph_of(off, None)


def test_a_source_has_no_limit_of_failures(off: GraphBuilder) -> None:
    off.source([], "n int", uid="source", max_failing=3).sink(print, uid="out")
    with pytest.raises(UnsupportedError, match=r"'source': max_failing of a source"):
        graph_of(off)


# ---------------------------------------------------------------- streams of dead letters


def test_dead_letters_are_an_output_of_the_chain_that_ends_with_the_operator(off: GraphBuilder) -> None:
    scored = a_line(off).map(one, uid="parse").map(one, uid="score")
    scored.dead_letters().map(lambda row: row[0], "key string", uid="keys").sink(print, uid="letters")
    scored.map(one, uid="show").sink(print, uid="out")
    graph = graph_of(off)
    assert set(chains(graph)) == {
        ("source",),
        ("parse", "score"),
        ("keys",),
        ("letters",),
        ("show",),
        ("out",),
    }
    (edge,) = [edge for edge in graph.edges if edge.tag == LETTERS]
    assert (edge.source, edge.target, edge.schema) == ("parse", "keys", LETTER_SCHEMA)
    assert graph.sends_letters("parse")
    assert not graph.sends_letters("show")
    assert "dead letters" in explain(graph)


def test_dead_letters_of_an_operator_without_a_policy_are_refused(off: GraphBuilder) -> None:
    parsed = a_line(off).map(one, uid="parse").on_failure("fail")
    parsed.sink(print)
    parsed.dead_letters().sink(print)
    with pytest.raises(InvalidTopologyError, match=r"'parse': dead_letters: .*failures=FailurePolicy"):
        graph_of(off)


def test_a_stream_of_dead_letters_comes_right_behind_its_operator_and_has_no_uid(off: GraphBuilder) -> None:
    parsed = a_line(off).map(one, uid="parse")
    with pytest.raises(ConfigError, match=r"dead_letters behind 'parse': uid"):
        parsed.dead_letters(uid="letters")
    with pytest.raises(InvalidTopologyError, match=r"dead_letters\(…\) belongs to an operator"):
        parsed.rebalance().dead_letters()
    with pytest.raises(InvalidTopologyError, match=r"dead_letters\(…\) belongs to an operator"):
        parsed.dead_letters().dead_letters()


# ---------------------------------------------------------------- in words


def test_the_topology_in_words_has_the_policy_of_each_chain(off: GraphBuilder) -> None:
    parsed = a_line(off).map(one, uid="parse", max_failing="3%")
    parsed.dead_letters().sink(print, uid="letters", on_failure="fail")
    own = FailurePolicy(
        max_attempts=None, backoff=["1s", 2.5], max_failing=100, hold_watermark=True, jitter=0
    )
    looked = parsed.map(one, uid="look").on_failure(own)
    looked.broadcast().map(one, uid="copied").sink(print, uid="out", on_failure=FailurePolicy(max_attempts=1))
    text = explain(graph_of(off, FailurePolicy(max_attempts=2, backoff="1s")))
    assert "fault tolerance by checkpoints" in text
    assert text.split("\n\n")[-1] == (
        "records that fail\n"
        "  parse    2 attempts, 1s between them, then a dead letter, a record of dead_letters(); "
        "pauses while more than 3% of parse fail\n"
        "  letters  fails the job\n"
        "  look     any number of attempts, 1s, 2.5s between them; pauses while more than 100/min fail; "
        "holds the watermark\n"
        "  copied   fails the job, since its input is broadcast\n"
        "  out      1 attempt, then a dead letter"
    )


def test_without_any_policy_nothing_is_said_of_them(off: GraphBuilder) -> None:
    a_line(off).map(one, uid="parse").sink(print, uid="out")
    assert "fail" not in explain(graph_of(off, None))
