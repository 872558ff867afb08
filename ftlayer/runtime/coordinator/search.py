"""How many records go out next, when one of them may end the process that works on it.

Adaptive group testing (after Hwang, "A method for detecting all defective members in a population by group
testing", 1972), with groups of an eighth instead of a half: a group that passes costs some milliseconds, one
that does not costs the start of a process.
"""

from __future__ import annotations

FACTOR = 8
"""A group that ends a process is searched in so many parts; a group without suspects that passes grows by it."""

FIRST_GROUP = FACTOR * FACTOR
"""Records of the first group where nothing says which are suspects."""


class GroupSizes:
    """What came of the groups so far, and how large the next one is.

    Counts on what is recalled going out in its old order: what is held back on purpose (rows of a join that wait for
    a partner) and was there before the group that was lost comes first, and is innocent.

    Attributes:
        suspects: records, first in the queue behind the innocent ones, of which one has ended a process.
    """

    def __init__(self) -> None:
        self.suspects = 0
        self._innocent = 0
        self._all_suspect = False
        self._grown = FIRST_GROUP

    def suspect_all(self) -> None:
        """Whatever is recalled next is suspect."""
        self._all_suspect = True

    def lost(self, rows: int) -> None:
        """A process ended while a group of so many records (1 or more) was out."""
        self._all_suspect = False
        self.suspects = rows

    def convicted(self) -> None:
        """The one suspect there was is dead."""
        self.suspects, self._grown = 0, FACTOR

    def recalled(self, rows: int) -> None:
        """So many records were recalled since the loss."""
        if self._all_suspect:
            self._all_suspect = False
            self.suspects = rows
        elif rows:
            # The others of the group are done. (A vertex that restarted has nothing to recall, and knows as much.)
            self.suspects = min(self.suspects, rows)
        self._innocent = max(0, rows - self.suspects)

    @property
    def next(self) -> int:
        """How many records the next group has, 1 or more."""
        return self._innocent or -(-self.suspects // FACTOR) or self._grown

    def passed(self, rows: int) -> None:
        """A group of so many records (up to ``next``) did no harm; fewer than ``next``: there were no more."""
        if rows < self.next:
            self._innocent = self.suspects = 0
        if self._innocent:
            self._innocent = 0
        else:
            self.suspects = max(0, self.suspects - rows)
            self._grown = max(1, rows) * FACTOR
