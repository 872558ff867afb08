"""A `Connection` that is a ``DoExchange`` of Flight."""

from __future__ import annotations

import contextlib
import threading

from pyarrow import flight

from ftlayer.transport.client import Endpoint, connect
from ftlayer.transport.failures import TRANSPORT_ERRORS
from ftlayer.transport.streams import NO_COLUMNS, end_stream
from ftlayer.transport.tokens import call_options


class FlightConnection:
    def __init__(self, endpoint: Endpoint, command: bytes) -> None:
        """Prepare a stream to ``endpoint``, whose descriptor is ``command``."""
        self._endpoint, self._command = endpoint, command
        self._lock = threading.Lock()
        self._cancelled = False
        self._client: flight.FlightClient | None = None
        self._writer: flight.FlightStreamWriter | None = None
        self._reader: flight.FlightStreamReader | None = None

    def open(self) -> None:
        self._client = connect(self._endpoint)
        descriptor = flight.FlightDescriptor.for_command(self._command)
        options = call_options(self._endpoint.token)
        self._writer, reader = self._client.do_exchange(descriptor, options)
        with self._lock:
            self._reader = reader
            cancelled = self._cancelled
        if cancelled:
            raise ConnectionAbortedError("the stream was cancelled before it began")
        self._writer.begin(NO_COLUMNS)

    def read(self) -> bytes | None:
        assert self._reader is not None
        while True:
            try:
                frame = self._reader.read_chunk().app_metadata
            except StopIteration:
                return None
            if frame is not None:
                data: bytes = frame.to_pybytes()
                return data

    def write(self, frame: bytes) -> None:
        assert self._writer is not None
        self._writer.write_metadata(frame)

    def end(self) -> None:
        assert self._writer is not None
        end_stream(self._writer)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            reader = self._reader
        if reader is not None:
            reader.cancel()

    def close(self) -> None:
        if self._writer is not None:
            # A writer that is not closed complains when it is freed.
            with contextlib.suppress(*TRANSPORT_ERRORS):
                self._writer.close()
        if self._client is not None:
            self._client.close()
