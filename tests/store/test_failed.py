"""How many failed records each stream has, and when its last one was, against a list of their keys."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.vertex.store import MemoryStore
from ftlayer.vertex.store.dead_index import FailedTable, counts, key_of, last_ms

keys = st.builds(
    key_of, st.sampled_from([1, 2, 3, 255, 256, 70_000]), st.integers(0, 1 << 63), st.integers(0, 1 << 63)
)


@settings(max_examples=60, deadline=None)
@given(found=st.sets(keys, max_size=20), uncommitted=st.sets(keys, max_size=5))
def test_each_stream_has_the_records_that_have_its_keys(found: set[bytes], uncommitted: set[bytes]) -> None:
    store = MemoryStore()
    with store.write(intake=True) as txn:
        for key in found:
            txn.put(FailedTable.DEAD, key, b"not read")
        txn.put(FailedTable.WAITING, key_of(9, 1, 1), b"another table")
    with store.read() as txn:
        check(txn, found)
    with store.write(intake=True) as txn:
        for key in uncommitted:
            txn.put(FailedTable.DEAD, key, b"not read")
        check(txn, found | uncommitted)


def check(txn: object, found: set[bytes]) -> None:
    expected: dict[int, list[int]] = {}
    for key in sorted(found):
        expected.setdefault(int.from_bytes(key[:4], "big"), []).append(int.from_bytes(key[4:12], "big"))
    assert counts(txn, FailedTable.DEAD) == {stream: len(times) for stream, times in expected.items()}
    for stream in (1, 2, 3, 4, 255, 256, 70_000):
        assert last_ms(txn, FailedTable.DEAD, stream) == max(expected.get(stream, [0]))
