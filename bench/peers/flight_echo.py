"""A Flight server that sends every frame back: ``python -m bench.peers.flight_echo ADDRESS``, until its input ends.

Frames travel as the vertex's do: as metadata of a ``DoExchange``, without columns.
"""

from __future__ import annotations

import sys

import pyarrow as pa
from pyarrow import flight


class Echo(flight.FlightServerBase):  # type: ignore[misc]
    """The server."""

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Send back what comes."""
        writer.begin(pa.schema([]))
        for chunk in reader:
            writer.write_metadata(chunk.app_metadata)


def main(address: str) -> None:
    """Serve; "ready" on standard output says that it does."""
    with Echo(address):
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
