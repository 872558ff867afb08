"""Recalls: the vertex is asked to make what is pending due for replay."""

from __future__ import annotations

from ftlayer.runtime.driver.events import RecallStreams


class Recalls:
    """Whether the vertex has recalled what was pending at the last loss.

    `ask` is for when everything is ready to go on. What a lost slot held is not touched until then, and would
    use up an attempt if it timed out: `meanwhile` has it recalled at once, for its time not to run. Once is not enough.
    Slots that have not heard of the loss yet go on to send to the lost one; and calls that the lost one has made may
    reach the vertex late, such as records that had to wait for room there, which the first recall has made.
    """

    def __init__(self, timeout_ms: int) -> None:
        """``timeout_ms``: nothing that is pending times out before."""
        self._number = 0
        # As often as slots touch what they hold.
        self._every_ms = max(1, timeout_ms // 3)
        self.is_done = False
        self._asked = False
        self._meanwhile: tuple[int, bool] | None = None
        self._meanwhile_ms = 0

    def forget(self) -> None:
        """More may have to be recalled since."""
        self.is_done = self._asked = False

    def ask(self) -> list[RecallStreams]:
        """Have it done, if that is not under way."""
        if self._asked:
            return []
        self._asked = True
        return self._recall()

    def is_due(self, epoch: int, all_know: bool, now_ms: int) -> bool:
        """Whether it is time for `meanwhile`: of a loss, when all others know of it, and again and again."""
        return self._meanwhile != (epoch, all_know) or now_ms - self._meanwhile_ms >= self._every_ms

    def meanwhile(self, epoch: int, all_know: bool, now_ms: int) -> list[RecallStreams]:
        """Have done what can be done while a slot is away."""
        self._meanwhile, self._meanwhile_ms = (epoch, all_know), now_ms
        return self._recall()

    def at_the_end(self) -> list[RecallStreams]:
        """Have it done for the next instance, without waiting for it."""
        return self._recall()

    def _recall(self) -> list[RecallStreams]:
        self._number += 1
        return [RecallStreams(self._number)]

    def answered(self, number: int) -> None:
        """Take an answer; only the one to the last question makes it done."""
        if number == self._number and self._asked:
            self._asked, self.is_done = False, True
