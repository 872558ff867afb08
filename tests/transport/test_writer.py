"""The thread that writes to a stream."""

from __future__ import annotations

import threading

import pyarrow as pa

from ftlayer.transport.flight_connection import WriterThread

WAIT_S = 600


class Peer:
    """A peer that reads one item for each `read`, and says what it got."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.errors: list[BaseException] = []
        self.ended = threading.Event()
        self.writing = threading.Semaphore(0)
        self._reads = threading.Semaphore(0)

    def write(self, item: int) -> None:
        self.writing.release()
        assert self._reads.acquire(timeout=WAIT_S)
        if item < 0:
            raise pa.ArrowException("broken")
        self.got.append(item)

    def read(self, count: int = 1) -> None:
        self._reads.release(count)

    def start(self, writer: WriterThread[int]) -> None:
        writer.start(self.write, self.errors.append, self.ended.set)


def test_what_is_put_is_written_in_order_and_then_it_ends() -> None:
    writer, peer = WriterThread[int]("test"), Peer()
    writer.put(1)
    peer.start(writer)
    writer.put(2)
    assert peer.writing.acquire(timeout=WAIT_S)
    assert writer.waiting() == [1, 2], "what is being written is not written yet"
    writer.put(3)
    writer.finish()
    peer.read(3)
    writer.join()
    assert (peer.got, writer.waiting(), peer.errors) == ([1, 2, 3], [], [])
    assert peer.ended.is_set()


def test_one_that_is_stopped_writes_nothing_more() -> None:
    writer, peer = WriterThread[int]("test"), Peer()
    for item in (1, 2, 3):
        writer.put(item)
    peer.start(writer)
    assert peer.writing.acquire(timeout=WAIT_S)
    writer.stop()
    peer.read(3)
    writer.join()
    assert (peer.got, writer.waiting()) == ([1], [2, 3])
    assert not peer.ended.is_set()


def test_a_broken_stream_is_told_once() -> None:
    writer, peer = WriterThread[int]("test"), Peer()
    peer.read(10)
    peer.start(writer)
    for item in (1, -2, 3):
        writer.put(item)
    writer.finish()
    writer.join()
    assert (peer.got, writer.waiting()) == ([1], [-2, 3])
    assert [str(error) for error in peer.errors] == ["broken"]
    assert not peer.ended.is_set()


def test_one_that_was_never_started_keeps_what_it_has() -> None:
    writer = WriterThread[int]("test")
    writer.put(1)
    writer.finish()
    writer.join()
    assert writer.waiting() == [1]
