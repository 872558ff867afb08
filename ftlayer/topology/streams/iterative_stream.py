"""`DataStream.iterate`: a stream that something behind it is fed back into."""

from __future__ import annotations

from ftlayer.errors import InvalidTopologyError
from ftlayer.topology.checks import schema_difference
from ftlayer.topology.streams.data_stream import DataStream


class IterativeStream(DataStream):
    """A stream that something behind it is fed back into: `close_with` says what, once.

    Records that come back are given to the operators behind this stream as those are that come for the first time.
    Their times, if they have any, are their own: watermarks come from the stream in front of the iteration alone, so
    that a record that comes back may be late. In one subtask a record that comes back may overtake a new one, and the
    other way round.
    """

    def close_with(self, feedback: DataStream) -> None:
        """Feed ``feedback`` back, which comes from an operator behind this stream and has its schema.

        No task waits to send on the way back, so nothing bounds what is on it but the loop: new records are let in
        while little waits there, and a loop that makes more records out of each than leave it grows without bound.

        Raises:
            InvalidTopologyError: fault tolerance is on; the iteration is closed already, or is fed from outside of
                it; the schemas differ. Names the operators.
        """
        self._check_same_graph(feedback, "close_with")
        head = self._legs[0].node
        difference = schema_difference(self.schema, feedback.schema)
        if difference:
            raise InvalidTopologyError(
                f"close_with: what comes back from {feedback._described()} to iteration {self._described()} has "
                f"another schema: {difference}; map it to the iteration's"
            )
        self._graph.close_iteration(head, feedback._legs)
