"""One slot as the coordinator knows it."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.runtime.protocol.messages import Heartbeat, Hello, Peer


@dataclass
class SlotRecord:
    """One slot: its Spark job, and the instance that is connected.

    Attributes:
        number: which slot.
        attempt: how many Spark jobs were submitted for it.
        submitted: the latest of them has not ended, as far as is known.
        cancelled: it was told to.
        submit_at_ms: when the next one is due; None while none is.
        lost_ms: when an instance was lost that no Spark job was submitted for yet; None: none was.
        patience_ms: until when something is waited for (a Hello; the end of a cancelled Spark job).
        hello: the connected instance; None while there is none.
        deployed: that instance was told to start its tasks.
        started: it has said that they run.
        asked_epoch, dropped_epoch: the last `DropPeers` sent to it and the last it answered.
        heard_ms: when it was heard last.
        heartbeat: what it said last.
        ended: all its tasks have ended; nothing more is wanted of it.
        greeted: some instance of it has been connected.
        failed_starts: Spark jobs that failed before there was one.
        revived: had ended, and starts again because another was lost: no failure of its own.
        excused: was lost to a record, as far as is known: no failure of its own either.
        silent: the last one that was lost did not say why: its process may have ended.
        was_lost: an instance was lost that ran, and nothing was started in its place yet.
        restarts: instances that were started in place of such ones.
        failure: why the last one was lost, or why its Spark job failed before there was one.
        loss: why the last one that ran was lost, with what Spark said of it.
        loss_in: the chain it was busy with then, as far as is known.
        spark_error: what Spark said of the latest Spark job when it ended; None if nothing.
    """

    number: int
    attempt: int = 0
    submitted: bool = False
    cancelled: bool = False
    submit_at_ms: int | None = None
    lost_ms: int | None = None
    patience_ms: int = 0
    hello: Hello | None = None
    deployed: bool = False
    started: bool = False
    asked_epoch: int = 0
    dropped_epoch: int = 0
    heard_ms: int = 0
    heartbeat: Heartbeat | None = None
    ended: bool = False
    greeted: bool = False
    failed_starts: int = 0
    revived: bool = False
    excused: bool = False
    silent: bool = False
    was_lost: bool = False
    restarts: int = 0
    failure: str = ""
    loss: str = ""
    loss_in: str = ""
    spark_error: str | None = None

    @property
    def running(self) -> bool:
        return self.deployed and not self.ended

    @property
    def peer(self) -> Peer:
        assert self.hello is not None
        return Peer(self.number, self.hello.instance, self.hello.address, self.hello.socket)

    def is_instance(self, instance: str) -> bool:
        """Whether this is the instance that is connected."""
        return self.hello is not None and self.hello.instance == instance

    def start_again(self) -> None:
        """Another instance is on its way, or there, in place of one that was lost: count that, once."""
        self.restarts += self.was_lost
        self.was_lost = False

    def connect(self, hello: Hello, now_ms: int) -> None:
        self.start_again()
        self.hello, self.greeted, self.deployed, self.started = hello, True, False, False
        self.heartbeat, self.heard_ms = None, now_ms
        self.failure, self.spark_error = "", None

    def disconnect(self, patience_ms: int) -> None:
        """The instance is gone, or not to be listened to any more."""
        self.hello, self.deployed, self.ended, self.heartbeat = None, False, False, None
        self.started = False
        self.asked_epoch = self.dropped_epoch = 0
        self.patience_ms = patience_ms

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
        where = f"slot {self.number}"
        assert self.hello is not None or not self.deployed, f"{where} is deployed without an instance"
        assert self.hello is None or self.greeted, f"{where} has an instance that did not say Hello"
        assert self.deployed or not self.started, f"{where} runs tasks that it was not told to start"
        assert self.deployed or not self.ended, f"{where} has ended before it was told to start"
        assert self.attempt or not self.submitted, f"{where} is submitted without an attempt"
