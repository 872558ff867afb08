"""The board: which jobs there are, how they fared when their drivers announced them last, and orders to them.

Drivers announce, tools list and ask; no tool reaches a driver. An order goes from its asker over the board to the run
that it names, with the reply to that run's next announcement. It is carried out once or not at all:

- it waits until its run has said that it has taken it; after `ORDER_EXPIRES_MS` without that word it expires, and a
  word that comes later changes nothing;
- a run carries it out when the board has shown that it knows of that word (see `Announced`);
- an id stands for one order. Asked again, it is answered with what has become of it.

What a board says is in memory. It is written down at each change of a job's state, and every `WRITE_EVERY_MS`; orders
and checkpoints that ended at once. Where a store has no room left for reports, they are not written until it has; where
it is full nothing is, orders neither.

A board needs a store and no vertex: a driver that has none keeps one by itself, over a `MemoryStore`. As with
`FTLayerCore`, memory is ahead of the store until a transaction is committed: if it is lost, make a new board.
"""

from __future__ import annotations

from ftlayer.vertex.rules.board.board import Board as Board
