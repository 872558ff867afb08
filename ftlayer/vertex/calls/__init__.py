"""The calls of the vertex: one frozen dataclass a call, one a reply.

These are the contract between the rules (`ftlayer.vertex.rules`), the service that carries them and its clients. A call
that changes the vertex travels in an envelope with (client, sequence); see `Envelope`. Arrays are NumPy, ids are
uint64, times are milliseconds, ``payload`` is an Arrow record batch that the vertex does not look into.

Names:
  stream    what a source's records are filed under: ``"<query>/<source>"`` for a wrapped source,
            ``"ingest/<name>"`` for an ingest, ``"<job>/<source>"`` for a topology. A stream lives on one shard.
  query     the stable name of a wrapped query (it survives restarts)
  epoch     handed out by `OpenQuery`; calls of an older epoch are refused with `StaleOwnerError`
  owner     the run of a topology that a call is of, "" for no topology's: after `ClaimJob` by another run it is
            refused with `StaleOwnerError`
  offset    position in a stream's delivery log: the number of rows ever made deliverable before it
"""

from __future__ import annotations

from ftlayer.vertex.calls.common import *
from ftlayer.vertex.calls.jobs import *
from ftlayer.vertex.calls.records import *
from ftlayer.vertex.calls.streams import *
