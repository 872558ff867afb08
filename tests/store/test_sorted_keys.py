from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.vertex.store import memory as sorted_keys
from ftlayer.vertex.store.memory import SortedKeys

keys = st.binary(max_size=2)


@given(steps=st.lists(st.tuples(st.booleans(), keys), max_size=80), probe=keys)
def test_it_is_a_sorted_set(steps: list[tuple[bool, bytes]], probe: bytes) -> None:
    model: set[bytes] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_keys, "BLOCK", 2)  # so that blocks are split and dropped
        subject = SortedKeys()
        for adding, key in steps:
            if adding and key not in model:
                subject.add(key)
                model.add(key)
            elif not adding and key in model:
                subject.remove(key)
                model.remove(key)
    for tested in (subject, subject.copy()):
        assert len(tested) == len(model)
        assert tested.last() == max(model, default=None)
        for key in (probe, *model):
            assert tested.above(key, inclusive=True) == min((k for k in model if k >= key), default=None)
            assert tested.above(key, inclusive=False) == min((k for k in model if k > key), default=None)
            assert tested.below(key) == max((k for k in model if k < key), default=None)
