"""The second phase of sinks, in the driver: what a completed checkpoint holds is committed, what none holds aborted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

from ftlayer.checkpoint.options import may_leave
from ftlayer.checkpoint.snapshots import Checkpoint, Committable, SubtaskSnapshot
from ftlayer.common.printable import described, text_of
from ftlayer.errors import (
    CommitFailedError,
    IncompatibleCheckpointError,
    UnauthorizedError,
    UncommittableError,
)
from ftlayer.functions.failures import raise_signalled
from ftlayer.functions.writing import call_commit
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import reseal_captured
from ftlayer.runtime.protocol.messages import reseal, unseal
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Sink, WriterSink


class GivenUp:
    """What sinks have written for checkpoints that were given up: the next checkpoint holds it, or it is aborted."""

    def __init__(self) -> None:
        self._parts: list[SubtaskSnapshot] = []

    def add(self, parts: Iterable[SubtaskSnapshot]) -> None:
        self._parts += [part for part in parts if part.committables]

    def completed(self, checkpoint: int) -> None:
        """What was written for those before it was in this one."""
        self._parts = [
            part for part in self._parts if any(each.checkpoint > checkpoint for each in part.committables)
        ]

    def take(self, is_gone: Callable[[str, int], bool]) -> list[SubtaskSnapshot]:
        """Return, and forget, the parts of subtasks that are gone (uid, number): they will not be committed."""
        gone = [part for part in self._parts if is_gone(part.uid, part.subtask)]
        self._parts = [part for part in self._parts if not is_gone(part.uid, part.subtask)]
        return gone


logger = logging.getLogger(__name__)


def at_home(message: Any) -> Any:
    """Give a message the class that the driver has, if it came with a copy of its own.

    A class of the program itself (``__main__``) travels by value, and lies in the checkpoint as it was then: a writer
    of another life of the driver would not know it as its own.
    """
    kind: type = type(message)
    home: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        home = getattr(home, name, None)
    if isinstance(home, type) and home is not kind:
        message.__class__ = home
    return message


def resealed(checkpoint: Checkpoint, old: bytes, new: bytes) -> Checkpoint:
    """Return a checkpoint with what the key ``old`` has sealed in it sealed with ``new``.

    Raises `UnauthorizedError` for a message, or a split of a source, that was not sealed with the old one.
    """

    def with_new(part: SubtaskSnapshot) -> SubtaskSnapshot:
        messages = (replace(each, message=reseal(each.message, old, new)) for each in part.committables)
        return replace(part, committables=tuple(messages))

    return replace(
        checkpoint,
        subtasks=tuple(map(with_new, checkpoint.subtasks)),
        sources={uid: reseal_captured(packed, old, new) for uid, packed in checkpoint.sources.items()},
    )


def _raise(failed: dict[str, BaseException], checkpoint: int) -> NoReturn:
    """Raise one error for the sinks that could not commit a checkpoint; what no restart mends comes first."""
    never = [sink for sink, error in failed.items() if isinstance(error, UncommittableError)]
    said = []
    for sink in [*never, *(sink for sink in failed if sink not in never)]:
        error = failed[sink]
        if sink in never:
            what = f"what it holds of the sink can never be committed: {text_of(error)}"
        elif isinstance(error, UnauthorizedError):
            what = (
                "a message in it is not signed with the key of this job's checkpoints, so it is not read; give "
                "CheckpointConfig the key that it was taken with"
            )
        else:
            what = f"commit failed: {described(error)}"
        said.append(f"sink {sink!r}: checkpoint {checkpoint} is complete, and {what}")
    text = "; ".join(said)
    if never:
        raise UncommittableError(
            f"{text}. Mend that, or go on from another checkpoint or savepoint (restore_from=…)"
        ) from failed[never[0]]
    raise CommitFailedError(text) from next(iter(failed.values()))


class Committer:
    """Commits the writers' sinks of a graph. Its methods call users' writers and may block; one thread at a time.

    A writer's ``commit(messages, checkpoint)`` is called once a checkpoint is complete, with the messages of all
    subtasks, subtask by subtask, and not at all if there are none. It is called again, with the same messages and the
    same id, if it raised, and on every restore of that checkpoint, since it is unknown whether it had come to its end.
    So it has to be idempotent: best by the messages (something unique in each). By the id alone will do where a job
    always goes on from its latest checkpoint: ids begin at 1 again for one that is started afresh, and what a savepoint
    holds is committed under another id if the job goes on behind it.

    A message is in two checkpoints if the second one was begun before the first one was committed. That it is
    committed under one id alone takes an order: checkpoint n is committed, then n+1 goes through `uncommitted`, and
    only then it is published.
    """

    def __init__(self, graph: JobGraph, key: bytes, *, allow_unknown: bool | tuple[str, ...] = False) -> None:
        """``key`` is that of the slots' order. ``allow_unknown``: of sinks that the graph lacks."""
        self._key = key
        self._allow_unknown = allow_unknown
        self._connectors = {
            operator.uid: operator.connector
            for vertex in graph.vertices
            for operator in vertex.operators
            if isinstance(operator, Sink) and isinstance(operator.connector, WriterSink)
        }
        self._writers: dict[str, Any] = {}
        self._committed = 0
        # In what was published, or may have been, and not committed: a savepoint has messages that others go on with.
        self._held: dict[int, set[Committable]] = {}

    def uncommitted(
        self, checkpoint: int, subtasks: Iterable[SubtaskSnapshot]
    ) -> tuple[SubtaskSnapshot, ...]:
        """Return the snapshots without the messages that `commit` has committed, to be published; see the class."""
        found = tuple(
            replace(subtask, committables=tuple(filter(self._is_open, subtask.committables)))
            if subtask.committables
            else subtask
            for subtask in subtasks
        )
        self._held[checkpoint] = {committable for subtask in found for committable in subtask.committables}
        return found

    def never_published(self, checkpoint: int) -> None:
        """A checkpoint that went through `uncommitted` is not there, and never will be: let go of its messages."""
        self._held.pop(checkpoint, None)

    def commit(self, checkpoint: int, subtasks: Iterable[SubtaskSnapshot]) -> None:
        """Commit what a completed (or restored) checkpoint holds, but for what this object has committed before.

        A sink that cannot commit keeps none of the others from it.

        Raises:
            CommitFailedError: a writer raised, or a message cannot be read; names the sinks. Call again, or restore the
                checkpoint.
            UncommittableError: a writer says that it never will; names the sinks, those that may commit later, too.
            IncompatibleCheckpointError: the graph has no such sink; nothing is committed then.
        """
        by_sink = self._by_sink(subtasks)
        for sink in by_sink.keys() - self._connectors.keys():
            self._refuse_unknown(sink, checkpoint, len(by_sink.pop(sink)))
        failed: dict[str, BaseException] = {}
        for sink, committables in by_sink.items():
            try:
                messages = [at_home(unseal(committable.message, self._key)) for committable in committables]
                call_commit(self._writer(sink), messages, checkpoint)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the other sinks commit theirs
                raise_signalled(error)
                failed[sink] = error
        if failed:
            _raise(failed, checkpoint)
        self._committed = max(self._committed, checkpoint)
        open_still = {number: set(filter(self._is_open, held)) for number, held in self._held.items()}
        self._held = {number: held for number, held in open_still.items() if held}

    def abort(self, subtasks: Iterable[SubtaskSnapshot]) -> None:
        """Abort what no checkpoint holds, and none will: parts of those that were under way at a restart.

        What went through `uncommitted` is left alone (but for `never_published`), and what is committed. The subtask
        may have aborted it itself. What a writer raises is logged.
        """
        held = set().union(*self._held.values())
        for sink, committables in self._by_sink(subtasks).items():
            if sink not in self._connectors:
                continue
            by_checkpoint: dict[int, list[bytes]] = {}
            for committable in committables:
                if committable in held:
                    continue
                by_checkpoint.setdefault(committable.checkpoint, []).append(committable.message)
            for checkpoint, sealed in by_checkpoint.items():
                try:
                    self._writer(sink).abort(
                        [at_home(unseal(message, self._key)) for message in sealed], checkpoint
                    )
                except BaseException as error:
                    raise_signalled(error)
                    logger.warning(
                        "sink %r: abort of what it wrote for checkpoint %d failed; it may have left something behind",
                        sink,
                        checkpoint,
                        exc_info=True,
                    )

    def _by_sink(self, subtasks: Iterable[SubtaskSnapshot]) -> dict[str, list[Committable]]:
        """Return what is open, each message once, sink by sink in the order of their subtasks."""
        found: dict[str, dict[Committable, None]] = {}
        for subtask in sorted(subtasks, key=lambda subtask: (subtask.uid, subtask.subtask)):
            for committable in filter(self._is_open, subtask.committables):
                found.setdefault(committable.sink, {})[committable] = None
        return {sink: list(committables) for sink, committables in found.items()}

    def _is_open(self, committable: Committable) -> bool:
        # A snapshot has every message up to its own checkpoint that was not committed then.
        return committable.checkpoint > self._committed

    def _refuse_unknown(self, sink: str, checkpoint: int, messages: int) -> None:
        if not may_leave(self._allow_unknown, sink):
            raise IncompatibleCheckpointError(
                f"checkpoint {checkpoint} has rows that sink {sink!r} wrote and has yet to commit, and the topology "
                "has no such sink with a writer; keep it until the checkpoint is restored, or set "
                f"allow_unclaimed_state=[{sink!r}] to drop them"
            )
        logger.warning(
            "checkpoint %d: %d messages of sink %r are dropped, which the topology has no more",
            checkpoint,
            messages,
            sink,
        )

    def _writer(self, sink: str) -> Any:
        from pyspark import cloudpickle

        if sink not in self._writers:
            writer = self._connectors[sink].writer
            self._writers[sink] = cloudpickle.loads(cloudpickle.dumps(writer))  # type: ignore[no-untyped-call]
        return self._writers[sink]
