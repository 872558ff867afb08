"""A mode's half in a slot's process: what it opens, and the calls, threads and files that its rules need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.deaths import Death
from ftlayer.runtime.protocol.messages import Deploy, FromSlot
from ftlayer.runtime.protocol.order import SlotOrder
from ftlayer.runtime.slot.events import Event
from ftlayer.runtime.slot.instructions import ModeInstruction
from ftlayer.runtime.slot.mode import SlotMode, SlotParts
from ftlayer.runtime.slot.tracing import RunTracer
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.runtime.task.mode import TaskMode


@dataclass(frozen=True)
class SlotContext:
    """What a mode is given of one instance of a slot.

    Attributes:
        order: what the slot was started with.
        instance: names this instance.
        post: puts an event into the loop's mailbox; any thread.
        tell: reaches the coordinator; any thread.
        barrier_waits: whether the loop has yet to look at a barrier, or at the order to send one.
    """

    order: Order
    instance: str
    post: Callable[[Event], None]
    tell: Callable[[FromSlot], None]
    barrier_waits: Callable[[], bool]

    def run_of(self, deploy: Deploy) -> str:
        """Name this instance's part in this run of the job: no other instance has the same."""
        return f"{deploy.run}/{self.instance}"


class SlotModeShell(Protocol):
    """One mode's half in one instance of a slot. Methods are of the loop's thread, save what says otherwise.

    `open` comes first, then `rules`; `touch`, `end` and `close` may come before both.
    """

    @property
    def touch_timeout_ms(self) -> int | None:
        """The shortest time after which a root that is not touched times out; None: nothing is to be touched."""

    def open(self, deploy: Deploy) -> TaskMode:
        """Open what the slot needs; return what its tasks are made by."""

    def rules(self, parts: SlotParts) -> SlotMode:
        """Return the mode's part in the rules, with all that is restored beside the tasks' state."""

    @property
    def tracer(self) -> RunTracer | None:
        """What is told of each run; None where nothing is traced. Behind `open`."""

    def positions(self, key: TaskKey) -> Mapping[str, bytes]:
        """Return where a source's subtask begins to read, by partition."""

    def carry_out(self, instruction: ModeInstruction) -> None:
        """Do what the mode's rules want done; waits for nothing."""

    def touch(self, roots: list[U64Array]) -> None:
        """Start the time of roots again; any thread."""

    def deaths(self) -> tuple[Death, ...]:
        """Return how earlier processes of the job on this host have ended themselves; before `open`, once."""

    def damaged(self, error: BaseException) -> int:
        """Return the checkpoint that has turned out to be damaged with an error; 0 for none."""

    def end(self, *, over: bool, stands: int) -> None:
        """The tasks run no more; streams and heartbeats go on.

        ``over``: no other instance follows here. ``stands`` is the latest checkpoint that may stand.
        """

    def close(self) -> None:
        """All else of the instance is closed."""


class SlotModeFactory(Protocol):
    """What a slot's order says of its mode; travels pickled, and holds nothing that is open."""

    @property
    def restarts_in_place(self) -> bool:
        """Whether another instance follows in the same process when a task has failed, or when it is told to."""

    def instance(self, slot: SlotContext) -> SlotModeShell:
        """Return the mode's half of a new instance; nothing is open yet."""


Order: TypeAlias = SlotOrder[SlotModeFactory]
