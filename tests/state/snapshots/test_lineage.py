"""What a snapshot may build on while others are under way."""

from __future__ import annotations

from ftlayer.checkpoint.snapshots import Piece, Scope, StatePiece
from ftlayer.state.snapshots.changelog import PieceLineage, Written


def part(path: str, length: int = 10) -> StatePiece:
    return StatePiece("entries", Piece(b"", length, None, path, 0, Scope.SHARED), 1, 1)


def completed(written: Written, wasteful: tuple[str, ...] = (), amplification: float = 2.0) -> PieceLineage:
    """Return a lineage whose checkpoint 1 holds the freeze 1."""
    lineage = PieceLineage(amplification, 1_000)
    assert lineage.plan(1, 1).base is None
    lineage.wrote(1, written, wasteful)
    lineage.completed(1)
    return lineage


def test_a_snapshot_that_moves_pieces_is_one_that_no_other_builds_beside() -> None:
    """When it completes, the pieces that the other one would refer to are removed."""
    lineage = completed(Written(1, (part("old"), part("good"))), ("old",))
    plan = lineage.plan(2, 2)
    assert plan.base is not None
    assert plan.moved == {"old"}
    assert lineage.plan(3, 3).base is None


def test_after_it_was_given_up_others_build_on_what_was_there() -> None:
    written = Written(1, (part("old"), part("good")))
    lineage = completed(written, ("old",))
    lineage.plan(2, 2)
    lineage.aborted(2)
    plan = lineage.plan(3, 3)
    assert plan.base is written
    assert plan.moved == {"old"}


def test_wasteful_files_that_it_has_nothing_in_are_no_reason_to_move() -> None:
    lineage = completed(Written(1, (part("good"),)), ("other",))
    assert not lineage.plan(2, 2).moved
    assert lineage.plan(3, 3).base is not None


def test_all_pieces_of_a_full_snapshot_count_as_one() -> None:
    """A copy of LMDB, say, and a larger piece of what was in memory."""
    lineage = completed(Written(1, (part("copy", 1), part("memory", 50)), full=2))
    assert lineage.plan(2, 2).base is not None
    lineage = completed(Written(1, (part("copy", 1), part("changes", 50)), full=1))
    assert lineage.plan(2, 2).base is None


def test_nothing_builds_on_what_cannot_be_read() -> None:
    written = Written(1, (part("old"),))
    lineage = completed(written, ("old",))
    lineage.plan(2, 2)
    lineage.distrust(written)
    lineage.aborted(2)
    assert lineage.plan(3, 3).base is None
