"""What every store promises, asked of each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.errors import StoreError, StoreFullError
from ftlayer.vertex.store import TABLES, KeyValueStore

LARGE = bytes(range(256)) * 80  # more than one page of LMDB


class BrokenError(Exception):
    """What a caller raises in a transaction."""


def fill(store: KeyValueStore, table: str, entries: dict[bytes, bytes]) -> None:
    with store.write(intake=False) as transaction:
        for key, value in entries.items():
            transaction.put(table, key, value)


def content(store: KeyValueStore, table: str) -> dict[bytes, bytes]:
    with store.read() as transaction:
        return {key: bytes(value) for key, value in transaction.scan(table)}


def test_a_new_store_is_empty(store: KeyValueStore) -> None:
    with store.read() as transaction:
        assert [transaction.count(table) for table in TABLES] == [0] * len(TABLES)
        assert transaction.get("meta", b"x") is None
    assert store.incarnation == 1
    assert store.used_share < 0.05


@pytest.mark.parametrize("size", [0, 1, 2_000, 4_074, 4_075, 4_076, 4_080, 4_096, 65_536, 100_000])
def test_values_of_any_size_come_back(store: KeyValueStore, size: int) -> None:
    value = (LARGE * 6)[:size]
    with store.write(intake=True) as transaction:
        transaction.put("segments", b"k", value)
        assert transaction.get("segments", b"k") == value
    assert content(store, "segments") == {b"k": value}


def test_memoryviews_are_taken_as_values(store: KeyValueStore) -> None:
    with store.write(intake=True) as transaction:
        transaction.put("dead", b"a", memoryview(LARGE)[3:9])
        transaction.put("dead", b"b", memoryview(LARGE)[3:9_003])
    assert content(store, "dead") == {b"a": LARGE[3:9], b"b": LARGE[3:9_003]}


def test_a_value_replaces_another_of_any_size(store: KeyValueStore) -> None:
    for value in (b"small", LARGE, b"", LARGE[:9_000], LARGE, b"end"):
        fill(store, "waiting", {b"k": value})
        assert content(store, "waiting") == {b"k": value}


def test_many_keys_are_put_at_once(store: KeyValueStore) -> None:
    keys = [number.to_bytes(4, "big") for number in range(0, 3_000, 3)]
    with store.write(intake=False) as transaction:
        transaction.put_keys("by_group", keys)
        transaction.put_keys("by_group", [])
        transaction.put_keys("by_group", [keys[5], b"z", b"a"])
        assert transaction.count("by_group") == len(keys) + 2
        assert next(transaction.scan("by_group")) == (keys[0], b"")
    assert content(store, "by_group") == dict.fromkeys([*keys, b"a", b"z"], b"")
    with pytest.raises(ValueError, match="0 bytes"), store.write(intake=False) as transaction:
        transaction.put_keys("by_group", [b"y", b""])
    assert b"y" not in content(store, "by_group")
    many = [first.to_bytes(4, "big") + bytes(300) + key for first in range(300) for key in keys]
    with pytest.raises(StoreFullError), store.write(intake=False) as transaction:
        transaction.put_keys("by_root", many)
    assert content(store, "by_root") == {}


def test_tables_are_separate(store: KeyValueStore) -> None:
    for table in TABLES:
        fill(store, table, {b"k": table.encode()})
    assert [content(store, table) for table in TABLES] == [{b"k": table.encode()} for table in TABLES]


def test_delete_says_whether_the_key_was_there(store: KeyValueStore) -> None:
    fill(store, "dead", {b"a": b"1", b"large": LARGE})
    with store.write(intake=False) as transaction:
        assert transaction.delete("dead", b"large")
        assert not transaction.delete("dead", b"large")
        assert transaction.get("dead", b"large") is None
        assert transaction.count("dead") == 1
    assert content(store, "dead") == {b"a": b"1"}


def test_an_exception_undoes_all_of_the_transaction(store: KeyValueStore) -> None:
    before = {b"kept": b"1", b"large": LARGE, b"replaced": b"old"}
    fill(store, "delivery", before)
    used = store.used_bytes

    def change_and_break() -> None:
        with store.write(intake=True) as transaction:
            transaction.put("delivery", b"new", LARGE)
            transaction.put("delivery", b"replaced", LARGE)
            transaction.delete("delivery", b"large")
            transaction.put("meta", b"new", b"1")
            raise BrokenError

    with pytest.raises(BrokenError):
        change_and_break()
    assert content(store, "delivery") == before
    assert content(store, "meta") == {}
    assert store.used_bytes == used
    fill(store, "delivery", {b"after": b"2"})
    assert content(store, "delivery") == before | {b"after": b"2"}


def test_append_takes_rising_keys_only(store: KeyValueStore) -> None:
    with store.write(intake=True) as transaction:
        transaction.put("segments", b"b", b"1", append=True)
        transaction.put("segments", b"c", LARGE, append=True)

    def append_wrongly(key: bytes) -> None:
        with store.write(intake=True) as transaction:
            transaction.put("dead", b"x", b"lost with the rest")
            transaction.put("segments", key, b"2", append=True)

    for key in (b"a", b"c"):
        with pytest.raises(ValueError, match="append"):
            append_wrongly(key)
    assert content(store, "dead") == {}
    assert content(store, "segments") == {b"b": b"1", b"c": LARGE}


@pytest.mark.parametrize("key", [b"", b"k" * 512])
def test_keys_have_bounds(store: KeyValueStore, key: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 511"), store.write(intake=True) as transaction:
        transaction.put("meta", key, b"")
    fill(store, "meta", {b"k" * 511: b"longest"})
    assert content(store, "meta") == {b"k" * 511: b"longest"}


def test_an_unknown_table_is_refused(store: KeyValueStore) -> None:
    with store.read() as transaction:
        for call in (
            lambda: transaction.get("nope", b"k"),
            lambda: transaction.count("nope"),
            lambda: list(transaction.scan("nope")),
            lambda: list(transaction.keys("nope")),
        ):
            with pytest.raises(ValueError, match="nope"):
                call()
    with pytest.raises(ValueError, match="nope"), store.write(intake=True) as writing:
        writing.put("nope", b"k", b"")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("start", [b"", b"a", b"b", b"bb", b"z"])
@pytest.mark.parametrize("stop", [None, b"", b"a", b"b", b"bb", b"c", b"z"])
def test_scan_takes_a_half_open_range(
    store: KeyValueStore, start: bytes, stop: bytes | None, reverse: bool
) -> None:
    keys = [b"a", b"b", b"b\0", b"ba", b"c", b"\xff\xff"]
    fill(store, "waiting", dict.fromkeys(keys, b""))
    expected = [key for key in sorted(keys) if key >= start and (stop is None or key < stop)]
    with store.read() as reading:
        found = [key for key, _ in reading.scan("waiting", start, stop, reverse=reverse)]
        assert list(reading.keys("waiting", start, stop, reverse=reverse)) == found
    assert found == (expected[::-1] if reverse else expected)
    with store.write(intake=False) as writing:
        writing.put("waiting", b"new", b"")
        writing.delete("waiting", b"new")
        found = [key for key, _ in writing.scan("waiting", start, stop, reverse=reverse)]
        assert list(writing.keys("waiting", start, stop, reverse=reverse)) == found
    assert found == (expected[::-1] if reverse else expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_may_delete_what_it_finds(store: KeyValueStore, reverse: bool) -> None:
    entries = {b"%04d" % i: LARGE[: i * 37 % 9_000] for i in range(300)}
    fill(store, "waiting", entries)
    seen = []
    with store.write(intake=False) as transaction:
        for key, value in transaction.scan("waiting", reverse=reverse):
            seen.append((key, bytes(value)))
            transaction.delete("waiting", key)
            transaction.put("delivery", key, value)
        assert transaction.count("waiting") == 0
    assert seen == sorted(entries.items(), reverse=reverse)
    assert content(store, "delivery") == entries


def test_a_scan_sees_changes_ahead_of_it(store: KeyValueStore) -> None:
    fill(store, "dead", {b"a": b"", b"c": b"", b"e": b""})
    seen = []
    with store.write(intake=False) as transaction:
        for key, _ in transaction.scan("dead"):
            seen.append(key)
            if key == b"c":
                transaction.put("dead", b"b", b"behind")
                transaction.put("dead", b"d", b"ahead")
                transaction.delete("dead", b"e")
    assert seen == [b"a", b"c", b"d"]


def test_a_snapshot_does_not_change(store: KeyValueStore) -> None:
    fill(store, "dead", {b"a": b"1", b"b": b"2"})
    fill(store, "waiting", {b"w": b"1"})
    with store.read() as transaction:
        scan = transaction.scan("dead")
        assert bytes(next(scan)[1]) == b"1"
        for round_ in range(3):  # each commit has to spare the snapshot's pages

            def change(round_: int = round_) -> None:
                fill(store, "dead", {b"b": b"changed", b"c%d" % round_: LARGE})
                fill(store, "waiting", {b"w": b"%d" % round_})

            thread = threading.Thread(target=change)
            thread.start()
            thread.join()
        assert [(key, bytes(value)) for key, value in scan] == [(b"b", b"2")]
        assert transaction.count("dead") == 2
        assert bytes(transaction.get("waiting", b"w") or b"") == b"1"
    assert content(store, "dead").keys() == {b"a", b"b", b"c0", b"c1", b"c2"}


def test_an_ended_transaction_is_refused(store: KeyValueStore) -> None:
    fill(store, "dead", {b"a": b"1", b"b": b"1"})
    with store.read() as reading:
        scan = reading.scan("dead")
        next(scan)
    with store.write(intake=True) as writing:
        pass
    for call in (
        lambda: reading.get("dead", b"a"),
        lambda: reading.count("dead"),
        lambda: next(scan),
        lambda: writing.put("dead", b"a", b""),
        lambda: writing.delete("dead", b"a"),
    ):
        with pytest.raises(StoreError, match="ended"):
            call()


def test_transactions_of_a_thread_do_not_nest(store: KeyValueStore) -> None:
    for open_outer in (lambda: store.read(), lambda: store.write(intake=False)):
        for open_inner in (lambda: store.read(), lambda: store.write(intake=False)):
            with open_outer(), pytest.raises(StoreError, match="nest"), open_inner():
                pass
    fill(store, "meta", {b"k": b"usable"})


def test_writers_take_turns(store: KeyValueStore) -> None:
    def count_up() -> None:
        for _ in range(50):
            with store.write(intake=False) as transaction:
                old = transaction.get("meta", b"n")
                transaction.put("meta", b"n", b"%d" % (int(bytes(old or b"0")) + 1))

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(store, "meta") == {b"n": b"200"}


def test_a_closed_store_is_refused(make_store: Callable[[int], KeyValueStore]) -> None:
    store = make_store(16 << 20)
    store.close()
    store.close()
    for call in (lambda: store.read(), lambda: store.write(intake=False)):
        with pytest.raises(StoreError, match="closed"), call():
            pass
    with pytest.raises(StoreError, match="closed"):
        store.sync()


def test_close_waits_for_readers(store: KeyValueStore) -> None:
    fill(store, "dead", {b"a": LARGE})
    closing = threading.Thread(target=store.close)
    with store.read() as transaction:
        closing.start()
        assert bytes(transaction.get("dead", b"a") or b"") == LARGE
    closing.join(timeout=600)
    assert not closing.is_alive()
    with pytest.raises(StoreError, match="closed"), store.read():
        pass


def test_intake_stops_before_the_rest(make_store: Callable[[int], KeyValueStore]) -> None:
    store = make_store(8 << 20)

    def take_in() -> None:
        for number in range(10_000):
            with store.write(intake=True) as transaction:
                transaction.put("segments", number.to_bytes(8, "big"), LARGE, append=True)

    with pytest.raises(StoreFullError, match="full"):
        take_in()
    assert 0.88 < store.used_share <= 0.90
    with store.read() as reading:
        stored = reading.count("segments")
    with store.write(intake=False) as transaction:  # a move still has room
        transaction.put("waiting", b"k", LARGE)
        transaction.delete("segments", (0).to_bytes(8, "big"))
    for number in range(1, stored):
        with store.write(intake=False) as transaction:
            assert transaction.delete("segments", number.to_bytes(8, "big"))
    assert store.used_share < 0.05
    fill(store, "segments", {b"again": LARGE})


def test_a_change_that_would_cross_the_limit_is_refused_whole(
    make_store: Callable[[int], KeyValueStore],
) -> None:
    store = make_store(8 << 20)

    def write_too_much(intake: bool) -> None:
        with store.write(intake=intake) as transaction:
            for number in range(10_000):
                transaction.put("segments", number.to_bytes(8, "big"), LARGE)

    for intake in (True, False):
        with pytest.raises(StoreFullError, match="full"):
            write_too_much(intake)
        assert content(store, "segments") == {}
    with store.write(intake=True) as transaction:
        transaction.put("segments", b"k", LARGE)
    assert content(store, "segments") == {b"k": LARGE}


keys = st.binary(min_size=1, max_size=3)
values = st.one_of(st.binary(max_size=6), st.integers(4_000, 13_000).map(lambda size: LARGE[:size]))
changes = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["waiting", "dead"]), keys, values),
        st.tuples(st.just("delete"), st.sampled_from(["waiting", "dead"]), keys),
        st.tuples(
            st.just("scan"), st.sampled_from(["waiting", "dead"]), keys, st.none() | keys, st.booleans()
        ),
    ),
    max_size=12,
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(transactions=st.lists(st.tuples(changes, st.booleans()), max_size=6))
def test_a_store_is_a_pair_of_sorted_dictionaries(
    make_store: Callable[[int], KeyValueStore], transactions: list[tuple[list[tuple], bool]]
) -> None:
    store = make_store(16 << 20)
    model: dict[str, dict[bytes, bytes]] = {"waiting": {}, "dead": {}}
    for steps, aborted in transactions:
        trial = {table: entries.copy() for table, entries in model.items()}
        try:
            with store.write(intake=True) as transaction:
                for kind, table, *arguments in steps:
                    if kind == "put":
                        transaction.put(table, *arguments)
                        trial[table][arguments[0]] = arguments[1]
                    elif kind == "delete":
                        there = trial[table].pop(arguments[0], None) is not None
                        assert transaction.delete(table, arguments[0]) is there
                    else:
                        start, stop, reverse = arguments
                        expected = sorted(
                            (
                                item
                                for item in trial[table].items()
                                if start <= item[0] and (not stop or item[0] < stop)
                            ),
                            reverse=reverse,
                        )
                        found = transaction.scan(table, start, stop, reverse=reverse)
                        assert [(key, bytes(value)) for key, value in islice(found, 5)] == expected[:5]
                    assert transaction.count(table) == len(trial[table])
                if aborted:
                    raise BrokenError
            model = trial
        except BrokenError:
            pass
        assert {table: content(store, table) for table in model} == model
    store.close()
