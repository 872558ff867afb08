from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import ConfigError, SourceError
from ftlayer.runtime.connectors import readers as push
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.readers import PushReader
from ftlayer.runtime.protocol.messages import AssignSplits, ReaderRange
from ftlayer.topology.operators import Push, PushSource, Source

ID = pa.schema([("id", pa.int64())])


class Pushed:
    """A push source whose ``push`` the test calls from threads of its own."""

    def __init__(self, driver: Any, rows: int = 100) -> None:
        self.driver = driver
        self.stopped = threading.Event()
        self._pushes: list[Push] = []
        self.reader = driver.open(Source("clicks", PushSource(self._start), ID), rows=rows)
        self.reader.start()
        driver.until(lambda: self._pushes)
        self.push = self._pushes[0]

    def _start(self, push: Push) -> Callable[[], None]:
        self._pushes.append(push)
        return self.stopped.set

    def in_thread(self, records: list[Any]) -> Call:
        return Call(lambda: self.push(records))


class Call:
    """A call in a thread of its own, and what became of it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: SourceError | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except SourceError as error:
            self.error = error

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join(600)
        assert self.over
        if self.error is not None:
            raise self.error


@pytest.fixture
def pushed(driver: Any) -> Pushed:
    return Pushed(driver)


def test_push_returns_once_its_records_are_accepted(driver: Any, pushed: Pushed) -> None:
    call = pushed.in_thread([1, 2, 3])
    rows = driver.next(pushed.reader)
    assert rows.payload.to_pydict() == {"id": [1, 2, 3]}
    assert rows.position is None
    assert not call.over
    assert pushed.reader.accepted(rows) is None
    call.finish()


def test_a_long_push_is_over_with_its_last_batch(driver: Any) -> None:
    pushed = Pushed(driver, rows=2)
    call = pushed.in_thread([1, 2, 3, 4, 5])
    batches = [driver.next(pushed.reader) for _ in range(3)]
    assert [rows.first_ordinal for rows in batches] == [0, 2, 4]
    for rows in reversed(batches):
        assert not call.over
        pushed.reader.accepted(rows)
    call.finish()


def test_pushes_travel_together_while_the_loop_is_busy(driver: Any, pushed: Pushed) -> None:
    calls = [pushed.in_thread([number]) for number in range(50)]
    seen: list[int] = []
    driver.until(lambda: driver.wakes == 50)
    rows = driver.next(pushed.reader)
    seen += rows.payload.column(0).to_pylist()
    assert sorted(seen) == list(range(50))
    pushed.reader.accepted(rows)
    for call in calls:
        call.finish()


def test_what_does_not_fit_is_the_callers_to_handle(driver: Any, pushed: Pushed) -> None:
    with pytest.raises(SourceError, match=r"source 'clicks' gave 'two'"):
        pushed.push([1, "two"])
    pushed.push([])
    assert pushed.reader.take(0) is None
    call = pushed.in_thread([4])
    rows = driver.next(pushed.reader)
    assert rows.payload.num_rows == 1
    pushed.reader.accepted(rows)
    call.finish()


def test_stop_tells_all_that_wait(driver: Any, pushed: Pushed) -> None:
    taken = pushed.in_thread([1])
    driver.next(pushed.reader)
    waiting = pushed.in_thread([2])
    driver.until(lambda: driver.wakes == 2)
    pushed.reader.stop()
    for call in (taken, waiting):
        with pytest.raises(SourceError, match="they may be or not"):
            call.finish()
    with pytest.raises(SourceError, match="has ended: nothing was taken"):
        pushed.push([3])
    assert pushed.stopped.wait(600)
    assert pushed.reader.ended


def test_finish_hands_over_what_was_pushed(driver: Any, pushed: Pushed) -> None:
    call = pushed.in_thread([1])
    driver.until(lambda: driver.wakes == 1)
    pushed.reader.finish()
    assert pushed.stopped.wait(600)
    assert not pushed.reader.ended
    with pytest.raises(SourceError, match="told to end"):
        pushed.push([2])
    rows = driver.next(pushed.reader)
    pushed.reader.accepted(rows)
    call.finish()
    assert driver.next(pushed.reader) is None


def test_a_start_that_raises_ends_the_source(driver: Any) -> None:
    def start(push: Push) -> None:
        raise OSError("no such port")

    reader = driver.open(Source("clicks", PushSource(start), ID))
    reader.start()
    with pytest.raises(
        SourceError, match=r"'clicks': its listener raised before its first record: OSError: no such"
    ):
        driver.next(reader)


def test_a_listener_that_raises_after_a_while_says_so_and_loses_nothing(driver: Any) -> None:
    pushed: list[Call] = []

    def start(push: Push) -> None:
        pushed.append(Call(lambda: push([1, 2])))
        driver.until(lambda: pushed[0].over)
        pushed.append(Call(lambda: push([3])))
        driver.until(lambda: driver.wakes == 2)
        raise OSError("connection reset")

    reader = driver.open(Source("clicks", PushSource(start), ID))
    reader.start()
    reader.accepted(driver.next(reader))
    rows = driver.next(reader)
    assert rows.payload.to_pydict() == {"id": [3]}
    with pytest.raises(SourceError, match=r"its listener raised after 3 records: OSError: connection reset"):
        driver.next(reader)
    reader.abandon()
    assert reader.ended
    reader.accepted(rows)
    pushed[1].finish()
    with pytest.raises(SourceError, match="connection reset"):
        reader([4])


def test_pushes_that_do_not_wait_travel_together(driver: Any, pushed: Pushed) -> None:
    futures = [pushed.push.push_async([number]) for number in range(20)]
    rows = driver.next(pushed.reader)
    assert rows.payload.num_rows == 20
    assert not any(future.done() or future.cancel() for future in futures)
    pushed.reader.accepted(rows)
    assert [future.result(0) for future in futures] == [None] * 20
    assert pushed.push.push_async([]).done()
    with pytest.raises(SourceError, match="gave 'two'"):
        pushed.push.push_async(["two"])


class WatchedCondition(threading.Condition):
    """Knows how many threads wait on it."""

    waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1


def test_pushes_that_do_not_wait_are_bounded(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room = WatchedCondition()
    monkeypatch.setattr(push, "threading", SimpleNamespace(Condition=lambda: room, Thread=threading.Thread))
    monkeypatch.setattr(push, "MAX_WAITING_BYTES", 100)
    pushed = Pushed(driver)
    first = pushed.push.push_async(list(range(50)))
    calls = [Call(partial(pushed.push.push_async, [number])) for number in (1, 2)]
    driver.until(lambda: room.waiting == 2)
    rows = driver.next(pushed.reader)
    for call in calls:
        call.finish()
    pushed.reader.accepted(rows)
    assert first.done()
    pushed.push.push_async(list(range(50)))
    stuck = Call(lambda: pushed.push.push_async([3]))
    driver.until(lambda: room.waiting == 1)
    pushed.reader.stop()
    with pytest.raises(SourceError, match="has ended"):
        stuck.finish()


def test_stop_fails_the_futures_of_what_is_not_known(driver: Any) -> None:
    pushed = Pushed(driver, rows=2)
    future = pushed.push.push_async([1, 2, 3, 4])
    driver.next(pushed.reader)
    pushed.reader.stop()
    with pytest.raises(SourceError, match="they may be or not"):
        future.result(0)


@pytest.mark.parametrize("wrong", [7, None, "seven", {"id": 7}])
def test_what_is_no_list_of_records_is_refused(driver: Any, wrong: Any) -> None:
    pushed = Pushed(driver, rows=2)
    for way in (pushed.push, pushed.push.push_async):
        with pytest.raises(
            SourceError, match=r"push takes a list of records of its schema \(id int64\), got"
        ):
            way(wrong)


def test_a_source_needs_a_listener() -> None:
    with pytest.raises(ConfigError, match="PushSource: start: expected a function"):
        PushSource(5)  # type: ignore[arg-type]


def test_a_start_may_stay_and_push(driver: Any) -> None:
    ends: list[str] = []

    def start(push: Push) -> None:
        for number in range(3):
            push([number])
        try:
            push([3])
        except SourceError as error:
            ends.append(str(error))

    reader = driver.open(Source("clicks", PushSource(start), ID))
    reader.start()
    for _ in range(3):
        reader.accepted(driver.next(reader))
    driver.next(reader)
    reader.stop()
    driver.until(lambda: ends)


def test_instances_number_their_records_apart() -> None:
    source = Source("clicks", PushSource(lambda push: None), ID)
    numbers = {PushReader(source, 0, BatchLimits(1, 1), lambda: None)._number for _ in range(20)}
    assert len(numbers) == 20


def test_it_takes_no_splits(pushed: Pushed) -> None:
    with pytest.raises(SourceError, match="pushed to"):
        pushed.reader.assign(AssignSplits("clicks", 0, ReaderRange(1, "0", "1", 1, b""), ()))
