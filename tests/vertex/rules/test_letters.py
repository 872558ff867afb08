"""Letters of jobs in barrier mode: each comes once, and a requeued one is in exactly one place until its job has it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import MalformedRequestError, ProtocolError, StaleOwnerError, StoreFullError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import (
    Attempt,
    Changed,
    ClaimJob,
    Edit,
    EditAndRequeue,
    ForgetLetters,
    GetRequeued,
    KeepLetters,
    KeptLetter,
    LettersKept,
    OpenStream,
    Purge,
    Readmitted,
    Requeue,
    RequeuedLetter,
    ReturnLetters,
)

STREAM = "orders/parse"


def letter(number: int, reason: str = "ValueError: no", tracebacks: int = 1) -> KeptLetter:
    """Return a letter of this number, whose schema depends on it."""
    payload = pa.record_batch({"n" if number % 2 else "m": [number]})
    attempts = tuple(
        Attempt(each, 1_000 + each, reason, "parse", "slot 0", "Traceback\n" + "  frame\n" * 60)
        for each in range(1, tracebacks + 1)
    )
    return KeptLetter(name(number), b"facts %d" % number, payload, attempts)


def name(number: int) -> bytes:
    """Return the name of a letter."""
    return number.to_bytes(16, "big")


@pytest.fixture
def job(vertex: Any) -> Any:
    """A vertex with a stream of a job that a run has claimed."""
    vertex.call(ClaimJob("orders", "run"))
    vertex.call(OpenStream(STREAM, owner="run"))
    return vertex


def keep(job: Any, file: str, part: int, *numbers: int) -> int:
    """Send a part of a file; returns how many letters were taken."""
    reply = job.call(KeepLetters(STREAM, file, part, tuple(map(letter, numbers)), "run"))
    assert isinstance(reply, LettersKept)
    return reply.count


def dead(job: Any) -> list[int]:
    """Return the numbers of dead letters."""
    return sorted(each.payload.column(0)[0].as_py() for each in job.list("dead"))


def requeued(job: Any) -> list[RequeuedLetter]:
    """Return all letters that are offered, page by page."""
    found: list[RequeuedLetter] = []
    after = b""
    while True:
        page = job.call(GetRequeued("orders", after, 2, "run"))
        found += page.letters
        after = page.more
        if not after:
            return found


def test_a_kept_letter_is_a_dead_letter_as_any_other(job: Any) -> None:
    assert keep(job, "run-1", 0, 1, 2) == 2
    one, _ = job.list("dead")
    assert (one.stream, one.title, one.source, one.state) == (STREAM, "orders", "parse", "dead")
    assert (one.operator, one.reason, one.attempt) == ("parse", "ValueError: no", 1)
    assert one.history[0].place == "slot 0"
    assert one.traceback.startswith("Traceback\n  frame")
    assert one.payload.to_pylist() == [{"n": 1}]
    (group,) = job.call(calls.DeadGroups("orders")).groups
    assert (group.count, group.operator) == (2, "parse")
    assert job.stats()["dead_letters"] == 2


def test_a_part_that_the_store_has_no_room_for_is_refused() -> None:
    KeepLetters(STREAM, "run-1", (1 << 32) - 1, (letter(1),), "run").check()
    for part in (1 << 32, -1):
        with pytest.raises(MalformedRequestError, match=r"KeepLetters.part: expected 0 to 2\^32-1"):
            KeepLetters(STREAM, "run-1", part, (letter(1),), "run").check()


def test_a_part_is_kept_once_until_its_file_is_forgotten(job: Any) -> None:
    assert (keep(job, "run-1", 0, 1), keep(job, "run-1", 0, 1), keep(job, "run-1", 1, 2)) == (1, 0, 1)
    job.call(Purge(tuple(each.key for each in job.list("dead"))))
    job.restart()
    assert keep(job, "run-1", 0, 1) == 0
    assert job.call(ForgetLetters("orders", "run-1", "run")) == LettersKept(2)
    assert job.call(ForgetLetters("orders", "run-1", "run")) == LettersKept(0)
    assert keep(job, "run-11", 0, 3) == 1
    assert dead(job) == [3]


def test_forgetting_one_file_leaves_the_others_known(job: Any) -> None:
    for file in ("run-1", "run-11", "run-"):
        keep(job, file, 0, 1)
    assert job.call(ForgetLetters("orders", "run-1", "run")) == LettersKept(1)
    assert (keep(job, "run-11", 0, 1), keep(job, "run-", 0, 1)) == (0, 0)


def test_another_run_takes_over(job: Any) -> None:
    keep(job, "run-1", 0, 1)
    job.call(ClaimJob("orders", "next"))
    with pytest.raises(StaleOwnerError, match="started again by another driver"):
        keep(job, "run-2", 0, 2)
    for call in (
        ForgetLetters("orders", "run-1", "run"),
        GetRequeued("orders", owner="run"),
        Readmitted("orders", (), "run"),
        ReturnLetters("orders", (), "no", "run"),
    ):
        with pytest.raises(StaleOwnerError):
            job.call(call)


def test_a_full_store_takes_no_letters_and_keeps_no_name(job: Any) -> None:
    job.store.share = 0.95
    with pytest.raises(ProtocolError, match="takes no letters in: purge some"):
        keep(job, "run-1", 0, 1)
    job.store.share = None
    assert keep(job, "run-1", 0, 1) == 1


def test_a_lost_transaction_has_kept_neither_letters_nor_the_name(job: Any) -> None:
    job.store.fail_next_commit = True
    with pytest.raises(StoreFullError):
        keep(job, "run-1", 0, 1)
    job.restart()
    assert dead(job) == []
    assert keep(job, "run-1", 0, 1) == 1


def test_a_requeued_letter_waits_for_its_job_and_nothing_else_takes_it(job: Any) -> None:
    keep(job, "run-1", 0, 1, 2, 3)
    keys = tuple(each.key for each in job.list("dead"))
    assert job.call(Requeue(keys, "anna")) == Changed(3)
    assert job.call(Requeue(keys, "anna")) == Changed(0)
    assert job.call(Purge(keys, "anna")) == Changed(0)
    assert job.counts() == {"pending": 0, "waiting": 3, "delivery": 0, "dead": 0}
    assert job.call(calls.TakeReplays(STREAM, 10)).batches == ()
    job.restart()
    offered = requeued(job)
    assert [(each.letter, each.facts, each.stream) for each in offered] == [
        (name(number), b"facts %d" % number, STREAM) for number in (1, 2, 3)
    ]
    assert offered[0].payload.to_pylist() == [{"n": 1}]
    *earlier, last = letter(1).attempts
    assert offered[0].attempts == (*earlier, replace(last, requeued_ms=job.wall, requeued_by="anna"))
    assert not offered[0].edited
    assert job.call(Readmitted("orders", (offered[0].key, offered[0].key), "run")) == Changed(1)
    assert [each.letter for each in requeued(job)] == [name(2), name(3)]


def test_a_letter_that_cannot_go_back_is_dead_again_with_the_reason(job: Any) -> None:
    keep(job, "run-1", 0, 1)
    job.call(Requeue((job.list("dead")[0].key,)))
    (offered,) = requeued(job)
    returned = ReturnLetters("orders", (offered.key,), "the job has no operator 'parse'", "run")
    assert job.call(returned) == Changed(1)
    assert job.call(returned) == Changed(0)
    (info,) = job.list("dead")
    assert [each.reason for each in info.history] == ["ValueError: no", "the job has no operator 'parse'"]
    job.call(Requeue((info.key,)))
    (again,) = requeued(job)
    assert (again.letter, again.facts) == (offered.letter, offered.facts)


def test_an_edited_letter_comes_back_with_its_new_payload(job: Any) -> None:
    keep(job, "run-1", 0, 1)
    (info,) = job.list("dead")
    job.call(EditAndRequeue((Edit(info.key, pa.record_batch({"n": [7]})),), "anna"))
    (offered,) = requeued(job)
    assert (offered.edited, offered.payload.to_pylist(), offered.letter) == (True, [{"n": 7}], name(1))


def test_attempts_beyond_the_bound_are_left_out_of_the_middle(job: Any) -> None:
    job.call(KeepLetters(STREAM, "run-1", 0, (letter(1, tracebacks=40),), "run"))
    (info,) = job.list("dead")
    assert [each.number for each in info.history] == [1, *range(26, 41)]
    assert info.attempt == 40


@pytest.mark.parametrize("seed", range(30))
def test_each_letter_is_in_one_place_whatever_happens(job: Any, seed: int) -> None:
    """Letters that were sent and neither purged nor taken back are dead or offered, each once; texts add up."""
    draw = Random(seed)
    sent: dict[tuple[str, int], tuple[int, ...]] = {}
    there: set[int] = set()
    numbers = 0
    for _ in range(60):
        letters = {each.payload.column(0)[0].as_py(): each.key for each in job.list("dead")}
        offered = {int.from_bytes(each.letter, "big"): each.key for each in requeued(job)}
        assert set(letters) | set(offered) == there
        assert not set(letters) & set(offered)
        some = {number: key for number, key in letters.items() if draw.random() < 0.3}
        back = {number: key for number, key in offered.items() if draw.random() < 0.3}
        match draw.randrange(8):
            case 0 | 1:
                fresh = tuple(range(numbers + 1, numbers + draw.randint(2, 4)))
                numbers += len(fresh)
                place = f"run-{draw.randint(1, 5)}", draw.randint(0, 2)
                assert keep(job, *place, *fresh) == (0 if place in sent else len(fresh))
                if place not in sent:
                    sent[place] = fresh
                    there |= set(fresh)
            case 2:
                file = f"run-{draw.randint(1, 5)}"
                job.call(ForgetLetters("orders", file, "run"))
                sent = {place: each for place, each in sent.items() if place[0] != file}
            case 3:
                assert job.call(Requeue((*some.values(), *offered.values()))) == Changed(len(some))
            case 4:
                assert job.call(Purge((*some.values(), *offered.values()))) == Changed(len(some))
                there -= set(some)
            case 5:
                keys = (*back.values(), *letters.values())
                assert job.call(Readmitted("orders", keys, "run")) == Changed(len(back))
                there -= set(back)
            case 6:
                keys = tuple(back.values())
                assert job.call(ReturnLetters("orders", keys, "no such operator", "run")) == Changed(
                    len(back)
                )
            case 7:
                job.restart()
    job.call(Purge(tuple(each.key for each in job.list("dead"))))
    job.call(Readmitted("orders", tuple(each.key for each in requeued(job)), "run"))
    left = [key for key in job.stored("meta") if key.startswith(b"text/")]
    assert left == []
