"""What is known of the rows of a stage beside their columns: of those that the vertex delivered, their tries."""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.common.printable import described
from ftlayer.functions.chains.segments import ChainResult
from ftlayer.functions.current import UNTRACKED, Tries
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import FIRST_TRY
from ftlayer.spark.stages.pages import U64

# Run a chain in a forked child, so that a record that kills its process is found and outlived.
#
# Used after a Python worker died, on the rows it may have held: half of them at a time, until the
# killers stand alone. Each becomes a failure that says so; its neighbours' results are kept.


TRIES_ALONE = 2
"""A record alone in its process gets this many tries before it is called a killer: the first death
may have been another's doing (memory)."""

POLL_MS = 50
"""How often a child that says nothing is looked for: whether it has died, while others keep its pipe open."""

_LENGTH = 8


def run_isolated(batch: pa.RecordBatch, run: Callable[[pa.RecordBatch], ChainResult]) -> ChainResult:
    """Return what ``run(batch)`` returns, with a fatal failure for each row that kills its process.

    Functions may be called several times for one row (docs: what a function must be able to bear).
    An exception that ``run`` raises (nothing that can be pinned on a row) is raised here as well.
    """
    for attempt in range(TRIES_ALONE if batch.num_rows == 1 else 1):
        result, death = _in_child(batch, run)
        if result is not None:
            return result
        if batch.num_rows == 1 and attempt == TRIES_ALONE - 1:
            reason = f"killed the process it ran in ({death}), {TRIES_ALONE} times, alone in it"
            return ChainResult([], [RowFailure(0, "", reason, "", fatal=True)])
    half = batch.num_rows // 2
    left = run_isolated(batch.slice(0, half), run)
    right = run_isolated(batch.slice(half), run)
    return ChainResult(
        left.batches + [(rows, parents + half) for rows, parents in right.batches],
        left.failures + [replace(failure, row=failure.row + half) for failure in right.failures],
    )


def _in_child(
    batch: pa.RecordBatch, run: Callable[[pa.RecordBatch], ChainResult]
) -> tuple[ChainResult | None, str]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(batch, run, writing)
    os.close(writing)
    try:
        data, status = _received(reading, child)
    finally:
        os.close(reading)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)  # a real-time signal has a number only
        names = {each.value: each.name for each in signal.Signals}
        return None, f"signal {names.get(number, number)}"
    if os.WEXITSTATUS(status) or not data:
        return None, f"exit code {os.WEXITSTATUS(status)}"
    outcome = pickle.loads(data)
    if isinstance(outcome, BaseException):
        raise outcome
    batches = []
    for schema, rows, parents in outcome[0]:
        known = pa.ipc.read_schema(pa.py_buffer(schema))
        read = pa.ipc.read_record_batch(pa.py_buffer(rows), known)
        batches.append((read, np.frombuffer(parents, np.int64)))
    return ChainResult(batches, outcome[1]), ""


def _received(reading: int, child: int) -> tuple[bytes, int]:
    """Return what the child has said, b"" where that is not whole, and how it ended.

    Its length says where the message ends: a process that a function has forked may keep the pipe's end, and the end
    of file never comes. So it does not where the child dies.
    """
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    data, wanted, status = bytearray(), _LENGTH, None
    while len(data) < wanted:
        if poller.poll(POLL_MS if status is None else 0):
            part = os.read(reading, 1 << 20)
            if not part:
                break
            data += part
            if len(data) >= _LENGTH:
                wanted = _LENGTH + int.from_bytes(data[:_LENGTH], "big")
        elif status is not None:
            break
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            status = ended[1]
    if status is None:
        _, status = os.waitpid(child, 0)
    return bytes(data[_LENGTH:]) if len(data) == wanted else b"", status


def _child(batch: pa.RecordBatch, run: Callable[[pa.RecordBatch], ChainResult], writing: int) -> None:
    """Never returns: the worker's own exit handlers and buffers belong to the parent."""
    try:
        result = run(batch)
        batches = [
            (rows.schema.serialize().to_pybytes(), rows.serialize().to_pybytes(), parents.tobytes())
            for rows, parents in result.batches
        ]
        data = pickle.dumps((batches, result.failures))
    except SystemExit as error:
        # Raised in the parent it would end a worker again, and the batch would never come through.
        code = 0 if error.code is None else 1
        os._exit(error.code & 0xFF if isinstance(error.code, int) else code)
    except BaseException as error:  # noqa: BLE001 - carried to the parent, which raises it
        data = _pickled(error)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(len(data).to_bytes(_LENGTH, "big") + data)
    os._exit(0)


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception; one that the parent could not read is carried as its text."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except BaseException:  # noqa: BLE001 - a class may fail in any way at being pickled
        return pickle.dumps(RuntimeError(described(error)))
    return data


_PLACE = "_ft_place"


@dataclass(frozen=True)
class TriedRoots:
    """Origins and tries by root, which ascend: what a stage behind the first knows of delivered rows."""

    roots: U64
    origins: U64
    tries: U64

    @classmethod
    def of(cls, roots: U64, origins: U64, tries: U64) -> TriedRoots:
        order = np.argsort(roots)
        return cls(roots[order], origins[order], tries[order])

    def known(self, roots: U64) -> Tries:
        """Return what is known of rows with these roots; one that was not delivered is its own origin."""
        if not len(self.roots):
            return Tries(roots, None)
        places = np.minimum(np.searchsorted(self.roots, roots), len(self.roots) - 1)
        found = self.roots[places] == roots
        origins = np.where(found, self.origins[places], roots)
        return Tries(origins, np.where(found, self.tries[places], np.uint64(FIRST_TRY)))


NOTHING_TRIED = TriedRoots(*(np.zeros(0, np.uint64) for _ in range(3)))


def known_of_source(roots: U64, delivered: npt.NDArray[np.bool_], marks: npt.NDArray[np.void]) -> Tries:
    """Return what is known of the rows of a first stage; ``marks`` are those of the delivered ones."""
    origins, tries = roots.copy(), np.full(len(roots), FIRST_TRY, np.uint64)
    origins[delivered], tries[delivered] = marks["origin"], marks["tries"]
    return Tries(origins, tries)


def isolated(
    rows: pa.RecordBatch, known: Tries, run: Callable[[pa.RecordBatch, Tries], ChainResult]
) -> ChainResult:
    """Run rows in child processes (`run_isolated`), whose parts of them take along what is known."""
    if known is UNTRACKED:
        return run_isolated(rows, lambda part: run(part, UNTRACKED))
    placed = rows.append_column(_PLACE, pa.array(np.arange(rows.num_rows)))

    def run_part(part: pa.RecordBatch) -> ChainResult:
        places = part.column(_PLACE).to_numpy()
        return run(part.select(rows.schema.names), known.take(places))

    return run_isolated(placed, run_part)
