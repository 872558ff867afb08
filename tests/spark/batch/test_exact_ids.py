"""Single ids beside folded values: their XOR is the value, and who owes them is named."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.records.ids import xor_fold_by_root
from ftlayer.spark.batch.runner import event_ids
from ftlayer.vertex.calls.common import check_event_ids

ids = st.integers(1, 2**64 - 1)


def u64(values) -> np.ndarray:
    return np.array(list(values), np.uint64)


@given(st.dictionaries(ids, st.lists(ids, max_size=4), max_size=8), st.booleans(), st.randoms())
def test_the_ids_listed_for_a_root_fold_to_its_value(children, with_own, random):
    pairs = [(root, child) for root, found in children.items() for child in found]
    random.shuffle(pairs)
    parents, single = u64(root for root, _ in pairs), u64(child for _, child in pairs)
    roots = u64(children)
    folded = dict(zip(*(part.tolist() for part in xor_fold_by_root(parents, single)), strict=True))
    values = u64(folded.get(root, 0) ^ (root if with_own else 0) for root in children)

    listed = event_ids(roots, parents, single, "handed on", own=with_own)

    check_event_ids(listed, values, "here")
    for place, (root, found) in enumerate(children.items()):
        part = slice(listed.offsets[place], listed.offsets[place + 1])
        owed = listed.ids[part][listed.owners[part] == 0].tolist()
        assert sorted(owed) == sorted(found)
        assert (root in listed.ids[part][listed.owners[part] == -1].tolist()) == with_own
