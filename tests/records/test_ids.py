"""The id kernels against plain Python models, and the rules that ids have to keep."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.records import ids

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

u64 = st.integers(0, MASK)
record_id = st.integers(1, MASK)
small = st.integers(0, 2**32)
shard_counts = st.sampled_from([1, 2, 4, 16, 256, ids.MAX_SHARDS])


def array(values: list[int]) -> ids.U64Array:
    return np.array(values, np.uint64)


# ---------------------------------------------------------------- models


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def absorb(state: int, value: int) -> int:
    return mix((state + value * GOLDEN) & MASK)


def child(parent: int, operator: int, edge: int, ordinal: int, channel: int) -> int:
    state = int.from_bytes(b"child", "big")
    for part in (operator, edge, channel, ordinal):
        state = absorb(state, part)
    return mix(parent ^ state) or GOLDEN


def joined(left: int, right: int, side: int, operator: int, edge: int, ordinal: int, channel: int) -> int:
    state = int.from_bytes(b"join", "big")
    for part in (operator, edge, side, channel, ordinal):
        state = absorb(state, part)
    return absorb(mix(left ^ state), right) or GOLDEN


def permute(x: int, key0: int, key1: int, width: int) -> int:
    mask = (1 << width) - 1

    def round_(y: int) -> int:
        y = ((y ^ (y >> (width // 2 - 2))) * 0xBF58476D1CE4E5B9) & mask
        y = ((y ^ (y >> (width // 2 - 5))) * 0x94D049BB133111EB) & mask
        return y ^ (y >> (width // 2 - 1))

    def once(y: int) -> int:
        return round_(round_((y + key0) & mask) ^ (key1 & mask))

    return once(x) or once(0)


# ---------------------------------------------------------------- kernels against models


def test_mix64_reproduces_the_published_sequence() -> None:
    # SplitMix64 seeded with 1234567: the reference values that many implementations test against.
    states = array([(1234567 + GOLDEN * i) & MASK for i in range(1, 6)])
    assert ids.mix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.lists(st.tuples(u64, small, small), max_size=20), u64, small, st.booleans())
def test_child_ids_follow_the_model(
    rows: list[tuple[int, int, int]], operator: int, edge: int, one: bool
) -> None:
    parents, ordinals, channels = (array([row[i] for row in rows]) for i in range(3))
    channel: int | ids.U64Array = 3 if one else channels
    derived = ids.child_ids(parents, operator=operator, edge=edge, ordinals=ordinals, channel=channel)
    assert derived.tolist() == [child(p, operator, edge, o, 3 if one else c) for p, o, c in rows]


@given(st.lists(st.tuples(u64, u64, small, small), max_size=20), st.integers(0, 1), u64, small, st.booleans())
def test_join_ids_follow_the_model(
    rows: list[tuple[int, int, int, int]], side: int, operator: int, edge: int, one: bool
) -> None:
    left, right, ordinals, channels = (array([row[i] for row in rows]) for i in range(4))
    channel: int | ids.U64Array = 7 if one else channels
    derived = ids.join_ids(
        left, right, side=side, operator=operator, edge=edge, ordinals=ordinals, channel=channel
    )
    expected = [joined(a, b, side, operator, edge, o, 7 if one else c) for a, b, o, c in rows]
    assert derived.tolist() == expected


@given(
    st.binary(min_size=16, max_size=16), st.integers(0, 2**40), st.integers(0, 30), shard_counts, st.data()
)
def test_root_ids_follow_the_model(key: bytes, first: int, n: int, shards: int, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, shards - 1))
    width = 65 - shards.bit_length()
    key0, key1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    roots = ids.root_ids(key, first, n, shard=shard, shards=shards)
    expected = [shard << width | permute(first + i + 1, key0, key1, width) for i in range(n)]
    assert roots.tolist() == expected


roots_and_values = st.lists(st.tuples(st.integers(0, 12) | u64, u64), max_size=60)


@given(roots_and_values)
def test_fold_follows_a_dictionary(rows: list[tuple[int, int]]) -> None:
    model: dict[int, int] = {}
    for root, value in rows:
        model[root] = model.get(root, 0) ^ value
    unique, folded = ids.xor_fold_by_root(array([r for r, _ in rows]), array([v for _, v in rows]))
    assert unique.tolist() == list(model)
    assert folded.tolist() == list(model.values())


@given(roots_and_values)
def test_runs_of_sorted_roots_fold_like_any_others(rows: list[tuple[int, int]]) -> None:
    rows = sorted(rows)
    roots, values = array([r for r, _ in rows]), array([v for _, v in rows])
    for by_runs, by_root in zip(
        ids.xor_runs(roots, values), ids.xor_fold_by_root(roots, values), strict=True
    ):
        assert by_runs.tolist() == by_root.tolist()


def test_runs_do_not_merge_a_root_that_comes_back() -> None:
    unique, folded = ids.xor_runs(array([5, 5, 6, 5]), array([1, 2, 4, 8]))
    assert (unique.tolist(), folded.tolist()) == ([5, 6, 5], [3, 4, 8])


# ---------------------------------------------------------------- rules


@given(record_id, st.sets(st.tuples(*[st.integers(0, 3)] * 4), max_size=100))
def test_copies_of_one_parent_never_share_an_id(parent: int, sites: set[tuple[int, ...]]) -> None:
    """Core rule 4: operator, edge, ordinal and channel each tell copies apart."""
    derived = {
        int(ids.child_ids(array([parent]), operator=op, edge=edge, ordinals=array([o]), channel=c)[0])
        for op, edge, o, c in sites
    }
    assert len(derived | {parent}) == len(sites) + 1


@given(record_id, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_tree_of_copies_has_no_id_twice(root: int, depth: int, fan_out: int, channels: int) -> None:
    """Core rule 4 down a whole pipeline: flat maps over a broadcast edge, all copies alive at once."""
    alive = array([root])
    seen = [root]
    for level in range(depth):
        parents = np.repeat(alive, fan_out)
        ordinals = np.arange(len(parents), dtype=np.uint64)
        operator = ids.operator_key(f"operator-{level}")
        alive = np.concatenate(
            [
                ids.child_ids(parents, operator=operator, edge=0, ordinals=ordinals, channel=channel)
                for channel in range(channels)
            ]
        )
        seen += alive.tolist()
    assert len(set(seen)) == len(seen)


@given(record_id, record_id, u64)
def test_join_tells_sides_and_order_apart(left: int, right: int, operator: int) -> None:
    derived = [
        int(
            ids.join_ids(
                array([a]), array([b]), side=side, operator=operator, edge=0, ordinals=array([0]), channel=0
            )[0]
        )
        for side, (a, b) in product((0, 1), {(left, right), (right, left)})
    ]
    assert len(set(derived)) == len(derived)


@given(record_id, st.integers(1, 50), st.integers(1, 50), st.integers(0, 2**64 - 1))
def test_reexecution_repeats_the_ids_however_it_is_batched(
    parent: int, n: int, cut: int, operator: int
) -> None:
    """Core rule 4: the ordinal counts over the whole invocation, so the cut into batches must not matter."""
    parents, ordinals = np.full(n, parent, np.uint64), np.arange(n, dtype=np.uint64)

    def derive(part: slice) -> list[int]:
        return ids.child_ids(
            parents[part], operator=operator, edge=1, ordinals=ordinals[part], channel=2
        ).tolist()

    assert derive(slice(None)) == derive(slice(cut)) + derive(slice(cut, None))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3),
    st.data(),
)
def test_no_prefix_of_the_events_reaches_zero(edges: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Core rule 2, as far as ids go: with every copy registered, only the last event completes the root.

    Each edge is (broadcast?, channel of a plain edge, channels of a broadcast one).
    """
    root = ids.root_ids(b"k" * 16, data.draw(small), 1)
    events: list[list[int]] = []
    ack = 0
    for edge, (broadcast, channel, channels) in enumerate(edges):
        for receiver in range(channels) if broadcast else [channel]:
            copy = ids.child_ids(root, operator=1, edge=edge, ordinals=array([0]), channel=receiver)
            ack ^= int(copy[0])
            children = ids.child_ids(
                np.repeat(copy, 2), operator=2, edge=0, ordinals=array([0, 1]), channel=receiver
            ).tolist()
            events += [[int(copy[0]), *children], [children[0]], [children[1]]]
    order = data.draw(st.permutations(events))
    for i, event in enumerate(order):
        assert ack != 0, f"complete after {i} of {len(order)} events"
        for value in event:
            ack ^= value
    assert ack == 0


@given(st.lists(st.tuples(small, st.integers(0, 3)), unique=True, max_size=6), shard_counts)
def test_roots_of_different_seeds_and_ordinals_differ(seeds: list[tuple[int, int]], shards: int) -> None:
    seen: list[int] = []
    for batch, partition in seeds:
        seed = ids.RootSeed("query", "run", "source", batch, partition)
        seen += ids.root_ids(seed, 0, 40, shards=shards).tolist()
    assert len(set(seen)) == len(seen)
    assert 0 not in seen


def test_every_field_of_a_seed_counts_and_none_can_run_into_the_next() -> None:
    seeds = [
        ids.RootSeed("ab", "c", "d", 1, 2),
        ids.RootSeed("a", "bc", "d", 1, 2),
        ids.RootSeed("ab", "cd", "", 1, 2),
        ids.RootSeed("ab", "c", "d", 2, 2),
        ids.RootSeed("ab", "c", "d", 1, 1),
        ids.RootSeed("ab", "c", "d", 2, 1),
    ]
    assert len({seed.key for seed in seeds}) == len(seeds)
    assert seeds[0].key == ids.RootSeed("ab", "c", "d", 1, 2).key


def test_root_ids_do_not_depend_on_how_they_are_asked_for() -> None:
    whole = ids.root_ids(b"k" * 16, 0, 1000, shard=3, shards=4)
    parts = [ids.root_ids(b"k" * 16, first, 100, shard=3, shards=4) for first in range(0, 1000, 100)]
    assert np.array_equal(whole, np.concatenate(parts))


@given(
    ordinal=st.integers(0, 2**47),
    n=st.integers(0, 1 << 20),
    shards=st.sampled_from([1, 2, ids.MAX_SHARDS]),
    data=st.data(),
)
def test_a_range_of_roots_begins_where_its_first_record_would_be(
    ordinal: int, n: int, shards: int, data: st.DataObject
) -> None:
    shard = data.draw(st.integers(0, shards - 1))
    found = ids.root_range(b"k" * 16, ordinal, n, shard=shard, shards=shards)
    assert len(found) == n
    if n:
        assert found.first == ids.root_ids(b"k" * 16, ordinal, 1, shard=shard, shards=shards)[0]
        ends = np.array([found.first, found.first + n - 1], np.uint64)
        assert ids.shard_of(ends, shards).tolist() == [shard, shard]


@pytest.mark.parametrize("shards", [1, 2, ids.MAX_SHARDS])
def test_a_range_of_roots_ends_within_its_shard(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    last = 2**64 // shards - 1  # of shard 0
    monkeypatch.setattr(ids, "root_ids", lambda *args, **kwargs: np.array([last - 2], np.uint64))
    assert ids.root_range(b"k" * 16, 0, 3, shards=shards) == ids.RootRange(last - 2, 3)
    assert ids.root_range(b"k" * 16, 0, 4, shards=shards) == ids.RootRange(last - 3, 4)
    assert ids.root_range(b"k" * 16, 0, 1_000, shards=shards).ids()[-1] == last


def test_a_million_consecutive_roots_and_their_children_are_distinct_and_balanced() -> None:
    n = 1 << 20
    roots = ids.root_ids(ids.RootSeed("q", "r", "s", 0, 0), 0, n, shard=1, shards=2)
    children = ids.child_ids(roots, operator=7, edge=0, ordinals=np.zeros(n, np.uint64), channel=0)
    everything = np.concatenate([roots, children])
    assert len(np.unique(everything)) == 2 * n
    for values in (roots, children):
        for bit in range(63):  # the top bit of a root is its shard
            share = float(np.mean((values >> np.uint64(bit)) & np.uint64(1)))
            assert 0.495 < share < 0.505, f"bit {bit} is set in {share:.3f} of the ids"


@given(st.integers(0, 50), shard_counts, st.data())
def test_the_shard_is_in_the_top_bits(n: int, shards: int, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, shards - 1))
    drawn = ids.random_root_ids(n, shard=shard, shards=shards)
    derived = ids.root_ids(b"k" * 16, 5, n, shard=shard, shards=shards)
    for roots in (drawn, derived):
        assert ids.shard_of(roots, shards).tolist() == [shard] * n
        assert roots.all()


def test_operator_keys_are_the_same_everywhere() -> None:
    assert ids.operator_key("parse") == 0x207884EB44DDC58E


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("shards", [0, -1, 3, 6, 2 * ids.MAX_SHARDS])
def test_impossible_shard_counts_are_refused(shards: int) -> None:
    with pytest.raises(ConfigError, match="shards"):
        ids.root_ids(b"k" * 16, 0, 1, shards=shards)


@pytest.mark.parametrize("shard", [-1, 4])
def test_a_shard_that_does_not_exist_is_refused(shard: int) -> None:
    for make in (
        lambda: ids.root_ids(b"k" * 16, 0, 1, shard=shard, shards=4),
        lambda: ids.random_root_ids(1, shard=shard, shards=4),
    ):
        with pytest.raises(ConfigError, match="shard must lie in"):
            make()


def test_wrong_arguments_are_named() -> None:
    one, two = array([1]), array([1, 2])
    with pytest.raises(TypeError, match="parent_ids must be one-dimensional uint64"):
        ids.child_ids(one.astype(np.int64), operator=1, edge=0, ordinals=one, channel=0)
    with pytest.raises(TypeError, match="ordinals must be one-dimensional uint64"):
        ids.child_ids(one, operator=1, edge=0, ordinals=one.astype(np.uint32), channel=0)
    with pytest.raises(ValueError, match="ordinals has 2 items, expected 1"):
        ids.child_ids(one, operator=1, edge=0, ordinals=two, channel=0)
    with pytest.raises(ValueError, match="channel has 1 items, expected 2"):
        ids.child_ids(two, operator=1, edge=0, ordinals=two, channel=one)
    with pytest.raises(OverflowError, match="operator must lie in"):
        ids.child_ids(one, operator=-1, edge=0, ordinals=one, channel=0)
    with pytest.raises(OverflowError, match="channel must lie in"):
        ids.child_ids(one, operator=1, edge=0, ordinals=one, channel=-1)
    with pytest.raises(ValueError, match="right has 2 items"):
        ids.join_ids(one, two, side=0, operator=1, edge=0, ordinals=one, channel=0)
    with pytest.raises(ValueError, match="values has 2 items"):
        ids.xor_fold_by_root(one, two)
    with pytest.raises(ValueError, match="16 bytes"):
        ids.root_ids(b"short", 0, 1)
    with pytest.raises(OverflowError, match="first_ordinal"):
        ids.root_ids(b"k" * 16, (1 << 64) - 1, 1)


def test_strided_views_are_taken() -> None:
    parents = np.arange(1, 11, dtype=np.uint64)
    derived = ids.child_ids(parents[::2], operator=1, edge=0, ordinals=parents[::2], channel=0)
    expected = ids.child_ids(parents, operator=1, edge=0, ordinals=parents, channel=0)[::2]
    assert np.array_equal(derived, expected)
