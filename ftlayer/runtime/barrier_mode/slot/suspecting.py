"""A slot's part in the search for records that end the process that works on them."""

from __future__ import annotations

import logging

from ftlayer.runtime.barrier_mode.slot.black_box import BlackBox, box_directory, deaths_of
from ftlayer.runtime.barrier_mode.task.chain_suspects import ChainSuspects
from ftlayer.runtime.protocol.deaths import Conviction, Death
from ftlayer.runtime.protocol.messages import Deploy
from ftlayer.runtime.slot.shell import SlotContext
from ftlayer.runtime.task.suspects import NO_SUSPECTS, Suspects

logger = logging.getLogger(__name__)


class Suspecting:
    """One instance's. Chains without a failure policy have no suspects, and a job without any has no boxes."""

    def __init__(self, slot: SlotContext, directory: str | None) -> None:
        """``directory`` is for local files; None: the system's for temporary ones."""
        self._slot = slot
        self._directory = directory
        self._chains = tuple(
            vertex.uid for vertex in slot.order.graph.vertices if vertex.failures is not None
        )
        self._box: BlackBox | None = None
        self._armed = False
        self._convictions: tuple[Conviction, ...] = ()

    def deaths(self) -> tuple[Death, ...]:
        """Return how processes of the job on this host have ended themselves, as far as nobody has asked yet."""
        if not self._chains:
            return ()
        try:
            return deaths_of(self._directory, self._slot.order.job, self._chains)
        except OSError as error:
            logger.warning("slot %d: how others have ended cannot be read: %s", self._slot.order.slot, error)
            return ()

    def begin(self, deploy: Deploy) -> None:
        """The tasks begin: from now on the process writes down how it ends itself."""
        if not self._chains:
            return
        order = self._slot.order
        self._convictions = deploy.convictions
        try:
            directory = box_directory(self._directory, order.job)
            self._box = BlackBox(directory, order.slot, self._slot.instance, self._chains)
        except OSError as error:
            logger.warning(
                "slot %d: a record that ends its process would not be found, since nothing can be kept of it: %s",
                order.slot,
                error,
            )
            return
        self._armed = deploy.armed

    def of(self, uid: str) -> Suspects:
        """Return the suspects of a chain in this slot; behind `begin`."""
        if uid not in self._chains:
            return NO_SUSPECTS
        if self._box is None:
            return ChainSuspects(uid, armed=False, convictions=self._convictions, notes=_NoNotes())
        return ChainSuspects(uid, armed=self._armed, convictions=self._convictions, notes=self._box)

    def end(self) -> None:
        """The tasks run no more: what becomes of the process now is no record's doing."""
        if self._box is not None:
            self._box.close()
            self._box = None


class _NoNotes:
    """Of a process that cannot have a box."""

    def about_to(self, chain: str, digest: bytes) -> None:
        """No process would read it."""

    def over(self) -> None:
        """Nothing was noted."""
