"""Kinds of reasons, and the index of dead letters against the letters themselves."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ftlayer.errors import StoreFullError
from ftlayer.vertex import calls
from ftlayer.vertex.rules import grouping
from ftlayer.vertex.rules.grouping import MAX_KIND, kind_of
from ftlayer.vertex.store import dead_index
from ftlayer.vertex.store import dead_index as failed
from ftlayer.vertex.store.dead_index import IndexState


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("", ""),
        (
            "ValueError: could not convert string to float: '12,5'",
            "ValueError: could not convert string to float: …",
        ),
        ('KeyError: "it\'s"', "KeyError: …"),
        ("it doesn't fit, and can't", "it doesn't fit, and can't"),
        ("HTTP 503 after 2.5 s (attempt 3/5)", "HTTP … after … s (attempt …)"),
        ("no order 3f2a9c10-77aa-4b1e-beef-00d0c0ffee12", "no order …"),
        ("no order 00ab34cd90ef", "no order …"),
        ("worker-17 lost row42 at 2026-11-23T04:58:03.123Z", "worker-… lost row… at …"),
        ("0x7f3a00ff is no int64", "… is no int…"),
        ("10.0.0.7:8080 refused", "… refused"),
        ("two\n  lines\tand more", "two lines and more"),
        ("größer als 5 €", "größer als … €"),
        ("an 'open quote", "an 'open quote"),
        ("x" * 500, "x" * MAX_KIND),
    ],
)
def test_a_kind_is_a_reason_without_what_differs(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind


@pytest.mark.parametrize(
    "reason", ["'" * 1_024, "\"'`" * 341, "a'" * 512, "1-" * 512, "a1" * 512, "\\'" * 512]
)
def test_no_reason_takes_long(reason: str) -> None:
    kind_of.cache_clear()
    before = time.thread_time()
    kind_of(reason)
    assert time.thread_time() - before < 0.1  # quadratic ones take seconds for 1,024 characters


REASONS = ["ValueError: 'a'", "ValueError: 'b'", "timeout after 3 s", "busy", ""]
STREAMS = ["orders/lines", "orders/returns"]


def machine(kit: Any) -> type[RuleBasedStateMachine]:
    class Index(RuleBasedStateMachine):
        """Letters die, are requeued and purged, while the index is built, and crashes come in between."""

        @initialize(max_groups=st.sampled_from([2, 100]))
        def begins(self, max_groups: int) -> None:
            self.patch = pytest.MonkeyPatch()
            self.patch.setattr(grouping, "MAX_GROUPS", max_groups)
            self.patch.setattr(grouping, "BUILD_AT_ONCE", 2)
            self.vertex = kit.Vertex()
            self.next_root = 1
            for stream in STREAMS:
                self.vertex.open(stream, max_attempts=1)

        def teardown(self) -> None:
            if hasattr(self, "patch"):
                self.patch.undo()

        @rule(
            stream=st.sampled_from(STREAMS),
            failures=st.lists(
                st.tuples(st.sampled_from(REASONS), st.sampled_from(["parse", ""])), min_size=1, max_size=4
            ),
            goes_back=st.booleans(),
        )
        def some_die(self, stream: str, failures: list[tuple[str, str]], goes_back: bool) -> None:
            roots = list(range(self.next_root, self.next_root + len(failures)))
            self.next_root += len(failures)
            self.vertex.persist(roots, stream=stream)
            if goes_back:
                self.vertex.wall -= 500
            told = tuple(calls.Failure(root, *failure) for root, failure in zip(roots, failures, strict=True))
            self.vertex.call(calls.Fail(told, self.vertex.layer.incarnation))

        @rule(data=st.data(), kind=st.sampled_from([calls.Requeue, calls.Purge]))
        def some_go(self, data: st.DataObject, kind: Any) -> None:
            keys = [letter.key for letter in self.vertex.list("dead")]
            if keys:
                self.vertex.call(kind(tuple(data.draw(st.lists(st.sampled_from(keys), max_size=3)))))

        @rule()
        def those_that_wait_die_again(self) -> None:
            for stream in STREAMS:
                for part in self.vertex.call(calls.TakeReplays(stream, 3)).batches:
                    told = tuple(calls.Failure(int(root), "again 7", "parse") for root in part.roots)
                    self.vertex.call(calls.Fail(told, self.vertex.layer.incarnation))

        @rule(ms=st.sampled_from([10, 100, 1_000]))
        def time_passes(self, ms: int) -> None:
            self.vertex.advance(ms)

        @rule()
        def a_crash(self) -> None:
            self.vertex.restart()

        @rule()
        def a_crash_that_loses_a_transaction(self) -> None:
            keys = tuple(letter.key for letter in self.vertex.list("dead")[:2])
            self.vertex.store.fail_next_commit = True
            with pytest.raises(StoreFullError):
                self.vertex.call(calls.Purge(keys))
            self.vertex.restart()

        @rule()
        def the_store_is_an_old_one(self) -> None:
            with self.vertex.store.write(intake=False) as txn:
                while not dead_index.clear(txn, 100):
                    pass
                txn.delete("meta", b"index/dead")
            self.vertex.restart()

        @rule()
        def the_index_was_made_by_other_rules(self) -> None:
            with self.vertex.store.write(intake=False) as txn:
                state = dead_index.get_state(txn)
                if state is not None:
                    dead_index.put_state(txn, IndexState(0, state.next_group, state.built))
            self.vertex.restart()

        @invariant()
        def the_index_is_what_the_letters_say(self) -> None:
            if not hasattr(self, "vertex"):
                return
            with self.vertex.store.read() as txn:
                state = dead_index.get_state(txn)
                if state is not None and state.rules != grouping.RULES:
                    return
                letters = {bytes(key): failed.decode(value) for key, value in txn.scan("dead")}
                built = b"" if state is None else state.built
                covered = {key: record for key, record in letters.items() if built is None or key <= built}
                found: list[bytes] = []
                for group in dead_index.all_groups(txn):
                    keys = list(dead_index.letters_of_group(txn, group.stream, group.number))
                    times = [failed.time_of(key) for key in keys]
                    assert (group.count, group.first_ms, group.last_ms) == (len(keys), times[0], times[-1])
                    for key in keys:
                        reason, operator = covered[key].history[-1].reason, covered[key].history[-1].operator
                        assert group.number == 0 or (group.operator, group.kind) == (
                            operator,
                            kind_of(reason),
                        )
                        assert failed.stream_of(key) == group.stream
                    found += keys
                assert sorted(found) == sorted(covered)
                roots = {bytes(key) for key, _ in txn.scan("by_root")}
            assert roots == {
                root.to_bytes(8, "big") + key
                for key, record in covered.items()
                for root in (record.root, record.origin)
            }
            shown = self.vertex.call(calls.DeadGroups())
            assert sum(group.count for group in shown.groups) == len(covered)
            if shown.indexed == 1.0:
                assert len(covered) == len(letters)

    return Index


def test_the_index_follows_the_letters_in_any_order_of_events(kit: Any) -> None:
    run_state_machine_as_test(
        machine(kit),
        settings=settings(
            max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_an_index_that_is_missing_is_built_in_steps_beside_the_work(vertex: Any) -> None:
    letters = 2 * grouping.BUILD_AT_ONCE
    vertex.open(max_attempts=1)
    vertex.persist(list(range(1, letters + 1)))
    failures = tuple(calls.Failure(root, f"no row {root}", "parse") for root in range(1, letters + 1))
    vertex.call(calls.Fail(failures, vertex.layer.incarnation))
    with vertex.store.write(intake=False) as txn:
        while not dead_index.clear(txn, 1_000):
            pass
        txn.delete("meta", b"index/dead")
    vertex.restart()
    shown = []
    for _ in range(4):
        shown.append(vertex.call(calls.DeadGroups()).indexed)
        vertex.advance(grouping.BUILD_EVERY_MS)
    assert shown == [0.0, 0.5, 1.0, 1.0]
    (group,) = vertex.call(calls.DeadGroups()).groups
    assert (group.stream, group.operator, group.kind) == ("s", "parse", "no row …")
    assert (group.example, group.count) == ("no row 1", letters)


def test_a_full_store_is_not_filled_by_its_index(vertex: Any) -> None:
    vertex.open(max_attempts=1)
    vertex.persist([1])
    vertex.fail(1)
    with vertex.store.write(intake=False) as txn:
        dead_index.clear(txn, 1_000)
        txn.delete("meta", b"index/dead")
    vertex.restart()
    vertex.store.share = 0.93
    vertex.advance(1_000, ticks=5)
    assert vertex.call(calls.DeadGroups()).indexed == 0.0
    vertex.store.share = 0.5
    vertex.advance(1_000, ticks=5)
    assert vertex.call(calls.DeadGroups()).indexed == 1.0


def test_groups_are_of_a_stream_or_an_owner_and_the_largest_come_first(vertex: Any) -> None:
    for number, stream in enumerate(("orders/lines", "orders/returns", "shop/lines")):
        vertex.open(stream, max_attempts=1)
        roots = list(range(10 * number + 1, 10 * number + number + 2))
        vertex.persist(roots, stream=stream)
        vertex.fail(*roots)
    shown = vertex.call(calls.DeadGroups()).groups
    assert [(group.stream, group.count) for group in shown] == [
        ("shop/lines", 3),
        ("orders/returns", 2),
        ("orders/lines", 1),
    ]
    assert [group.stream for group in vertex.call(calls.DeadGroups("orders")).groups] == [
        "orders/returns",
        "orders/lines",
    ]
    assert [group.count for group in vertex.call(calls.DeadGroups("shop/lines")).groups] == [3]
    assert vertex.call(calls.DeadGroups("nothing")).groups == ()


def test_the_example_of_a_group_is_of_a_letter_that_is_there(vertex: Any) -> None:
    vertex.open(max_attempts=1)
    vertex.persist([1, 2, 3])
    failures = tuple(calls.Failure(root, f"no row {root}", "parse") for root in (1, 2, 3))
    vertex.call(calls.Fail(failures, vertex.layer.incarnation))
    first, second, third = (letter.key for letter in vertex.list("dead"))

    def example() -> str:
        (group,) = vertex.call(calls.DeadGroups()).groups
        text: str = group.example
        return text

    assert example() == "no row 1"
    vertex.call(calls.Purge((second,)))
    assert example() == "no row 1"
    vertex.call(calls.Purge((first,)))
    assert example() == "no row 3"
    # One that dies in the transaction in which the last of them goes begins a group of its own.
    vertex.call(calls.Requeue((third,)))
    assert vertex.call(calls.DeadGroups()).groups == ()
