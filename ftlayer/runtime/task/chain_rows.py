"""How rows go through a chain: its functions, and the way out behind them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.common.clock import Now
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.functions.chains.firing import TimerKind
from ftlayer.functions.current import UNTRACKED, Known
from ftlayer.runtime.handler import Handler
from ftlayer.runtime.protocol.messages import Batch, Idle, Watermark
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import KnownOf, replayed
from ftlayer.runtime.task.pipeline import OperatorChain, Outlet


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Records of a subtask of a chain that failed.

    Attributes:
        retried: how often one failed and another attempt followed, in this run.
        dead: how many were given up, in this run.
        waiting, waiting_bytes: those that wait for another attempt now.
        paused: it takes no input now, since too many fail or wait.
    """

    retried: int = 0
    dead: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    paused: bool = False


NO_FAILURES = FailureCounts()


class ChainRows:
    """One subtask's; its `ChainTask` owns it. By default nothing waits in it."""

    def opened(self, now: Now) -> None:
        """All functions are open, and state is restored."""

    @abstractmethod
    def take(self, input: int, batch: Batch, now: Now) -> list[Action]:
        """Run a batch of one input of the chain, and send what came of it."""

    @abstractmethod
    def fire(self, stage: int, kind: TimerKind, now: Now) -> list[Action]:
        """Fire the timers of a stage of the pipeline that are due, and send what they put out on its way."""

    def again(self, now: Now) -> list[Action]:
        """Run records whose next attempt is due."""
        return []

    def readmit(self, letters: tuple[ChainLetter, ...], now: Now) -> None:
        """Dead letters are to be tried again."""
        raise ValueError(f"{len(letters)} dead letters came back to a chain that makes none")

    def holds(self, mark: Watermark | Idle) -> bool:
        """Whether the chain is to keep a mark of its inputs to itself for now."""
        return False

    def ends(self, now: Now) -> None:
        """No more records come, but those that wait: they are not to wait for long."""

    def last(self) -> None:
        """The chain has said that it is done: what fails from now on has no further attempt."""

    def due_ms(self, now: Now) -> int | None:
        """Return the monotone time (ms) at which `again` has something to do; None while nothing waits."""
        return None

    def hold_ms(self, now: Now) -> int:
        """Return for how long the chain is to take nothing; 0: it goes on."""
        return 0

    def circuits(self, now_ms: int) -> dict[str, CircuitStatus]:
        """Return where circuit breakers are, by operator, at a monotone time. Any thread may look."""
        return {}

    @property
    def counts(self) -> FailureCounts:
        """What has failed so far. Any thread may look."""
        return NO_FAILURES


class WholeBatches(ChainRows):
    """Where a record that fails is the handler's to settle: a batch goes through as it is."""

    counts = NO_FAILURES

    def __init__(self, pipeline: OperatorChain, handler: Handler, outlet: Outlet) -> None:
        self._pipeline = pipeline
        self._handler = handler
        self._outlet = outlet

    def take(self, input: int, batch: Batch, now: Now) -> list[Action]:
        lineage = batch.lineage
        fresh = lineage is None or lineage.origins is None or not replayed(lineage).all()
        known: Known = UNTRACKED if lineage is None else KnownOf(lineage)
        passed = self._pipeline.run(batch.payload, batch.times, fresh, input, now, known)
        return self._outlet.take(lineage, batch.payload.num_rows, passed, now)

    def fire(self, stage: int, kind: TimerKind, now: Now) -> list[Action]:
        found = self._pipeline.stages[stage]
        if kind == "event":
            fired = found.chain.fire_event_timers(found.watermark_ms, now.wall_ms)
        else:
            fired = found.chain.fire_processing_timers(now.wall_ms)
        if not fired:
            return []
        passed = self._pipeline.run_behind(stage, fired, now)
        if passed.failures:
            # Chains end behind timers where records are tracked: here only the task can fail.
            self._handler.xor.fail(None, passed.failures)
        return self._outlet.take_fired(passed.outputs, now)
