"""The CPU time of messages, measured in this process, which has both of their ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pyarrow as pa
from pyarrow import flight

from ftlayer.records.ipc import as_message
from ftlayer.runtime.protocol.channel_frames import decode_from_slot, encode
from ftlayer.runtime.protocol.messages import Heartbeat
from ftlayer.transport.flight_connection import NO_COLUMNS, end_stream, frames_of
from ftlayer.vertex.calls.jobs import EdgeDetails, SubtaskDetails

BATCH_ROWS = 16_384
CHANNELS = 16
MESSAGE = bytes(21)
"""As long as one credit."""


class Sink(flight.FlightServerBase):  # type: ignore[misc]
    """Reads the frames of a stream, and says when it has all."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.ended = threading.Event()

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Read to the end."""
        for _ in frames_of(reader):
            pass
        self.ended.set()


def message_us(messages: int) -> float:
    """Return the CPU time of both ends for a small message over Flight and TCP, one behind the other."""
    with Sink() as server, flight.connect(f"grpc://127.0.0.1:{server.port}") as client:
        writer, _ = client.do_exchange(flight.FlightDescriptor.for_command(b""))
        writer.begin(NO_COLUMNS)
        began = time.process_time()
        for _ in range(messages):
            writer.write_metadata(MESSAGE)
        end_stream(writer)
        server.ended.wait()
        taken = time.process_time() - began
        writer.close()
    return taken / messages * 1e6


def part_us(rounds: int) -> float:
    """Return the CPU time for one channel's part of a batch: its rows are taken, and joined with others later."""
    batch = counted()
    rows = [pa.array(range(first, BATCH_ROWS, CHANNELS)) for first in range(CHANNELS)]

    def split() -> None:
        for each in rows:
            batch.take(each)

    whole = pa.array(range(BATCH_ROWS))
    # What the rows themselves take is in the cost of a record.
    more = cpu_us(split, rounds) - cpu_us(lambda: batch.take(whole), rounds)
    return max(0.0, more) / (CHANNELS - 1)


def heartbeat_us(peers: int, rounds: int) -> float:
    """Return what it takes to read the heartbeat of a slot with so many others."""
    load = tuple(SubtaskDetails(f"chain-{n}", 0, 10**9, 10**9, 1e6, 1e6, 0.5, 0.1, None, 0) for n in range(2))
    counters = {f"records_in/chain-{number}": 10**9 for number in range(10)}
    transports = {str(peer): "flight" for peer in range(peers)}
    edges = (EdgeDetails("chain-0", "chain-1", 0, 10**6, 10**4),)
    beat = Heartbeat(0, 1, False, counters, subtasks=load, edges=edges, transports=transports)
    frame = encode(beat)
    return cpu_us(lambda: decode_from_slot(frame), rounds)


def record_bytes() -> float:
    """Return the bytes that a record of the job has in a full frame."""
    return len(as_message(counted(), dictionaries=False)) / BATCH_ROWS


def counted() -> pa.RecordBatch:
    """Return a batch as the job's exchange has it: an integer and a key of 20 bytes."""
    keys = [f"key-{number % 10_000:016d}" for number in range(BATCH_ROWS)]
    return pa.record_batch([pa.array(range(BATCH_ROWS)), pa.array(keys)], ["id", "key"])


def cpu_us(call: Callable[[], object], rounds: int) -> float:
    """Return the CPU time of a call."""
    call()
    began = time.thread_time()
    for _ in range(rounds):
        call()
    return (time.thread_time() - began) / rounds * 1e6
