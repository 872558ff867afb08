"""A session's fitness for slots, checked before anything runs: one clear error each."""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ftlayer.errors import ConfigError, InvalidTopologyError, JobStartError, UnsupportedError
from ftlayer.functions.pickling import WAY_OUT, pickling_fault, said
from ftlayer.runtime.driver.session import task_slots
from ftlayer.runtime.protocol.order import SlotOrder
from ftlayer.spark.sessions import how_it_ended, is_connect, is_local
from ftlayer.topology.names import display_name
from ftlayer.transport.address import is_loopback

# Executors of a cluster that was just asked for come one by one.
EXECUTORS_WAIT_S = 30.0
_POLL_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where the driver can be reached by slots. ``listen`` and ``advertised`` are hosts.

    ``own_executors``: Spark's executors are this process or its children, so that they can use its files.
    """

    listen: str
    advertised: str
    own_executors: bool = False

    @property
    def is_local(self) -> bool:
        return is_loopback(self.advertised)


def check_session(spark: Any) -> None:
    """Raise for a session that slots cannot live in.

    Raises:
        ConfigError: speculation is on, or Spark kills idle Python workers.
        JobStartError: the session has ended.
    """
    end = how_it_ended(spark)
    if end is not None:
        raise JobStartError(str(end)) from end
    if _is_true(spark, "spark.speculation"):
        raise ConfigError(
            "spark.speculation is on: Spark would start a second copy of every slot, since a slot never ends. "
            "Set it to false for the session that runs topologies"
        )
    for option in (
        "spark.python.worker.killOnIdleTimeout",
        "spark.sql.execution.pyspark.udf.killOnIdleTimeout",
    ):
        if _is_true(spark, option):
            raise ConfigError(
                f"{option} is on: to Spark a slot looks idle for as long as it runs, and would be killed again "
                "and again. Set it to false for the session that runs topologies"
            )


def check_task_slots(spark: Any, wanted: int, name: str) -> None:
    """Raise `JobStartError` if the session has fewer task slots than the job's slots, for as long as it runs.

    Task slots of other topologies of this driver are taken; those of ordinary jobs are not, since they end. Under
    Spark Connect nothing can be counted, and a job that lacks task slots ends by its start timeout.
    """
    if is_connect(spark):
        return
    taken = _TAKEN.by_others(name)
    held = sum(taken.values())
    dynamic = _is_true(spark, "spark.dynamicAllocation.enabled")
    # With dynamic allocation executors come only when tasks wait for them.
    deadline = time.monotonic() + (0 if dynamic or is_local(spark) else EXECUTORS_WAIT_S)
    while (there := task_slots(spark)) - held < wanted:
        if time.monotonic() >= deadline:
            if dynamic:
                logger.warning(
                    "%d task slots are there and %d are needed; dynamic allocation may bring more",
                    there,
                    wanted,
                )
                return
            raise JobStartError(_too_few(spark, wanted, there, taken))
        time.sleep(_POLL_S)


def pickled_order(order: SlotOrder[Any]) -> bytes:
    """Return the order as it goes to the slots; `InvalidTopologyError` names the operator that cannot."""
    from pyspark import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(order)  # type: ignore[no-untyped-call]
    except Exception as error:
        for vertex in order.graph.vertices:
            for operator in vertex.operators:
                fault = pickling_fault(operator)
                if fault is not None:
                    raise InvalidTopologyError(
                        f"{operator.uid!r} ({display_name(operator)}) cannot be sent to the slots: {fault}. "
                        f"{WAY_OUT}, or in open() of a ProcessFunction"
                    ) from error
        raise InvalidTopologyError(f"the topology cannot be sent to the slots: {said(error)}") from error
    return pickled


def place_of(spark: Any) -> Place:
    """Return where the coordinator listens: loopback if all is on this machine, else where executors know it."""
    if is_connect(spark):
        host = _connect_host(spark)
        if host is None or is_loopback(host):
            return Place("127.0.0.1", "127.0.0.1")
        address = _address_towards(host)
        return Place(address, address)
    if is_local(spark):
        return Place("127.0.0.1", "127.0.0.1", own_executors=True)
    advertised = str(spark.conf.get("spark.driver.host"))
    if is_loopback(advertised):
        return Place("127.0.0.1", "127.0.0.1")
    return Place(str(spark.conf.get("spark.driver.bindAddress", advertised)), advertised)


class TaskSlotsTaken:
    """How many task slots each topology of this driver holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}

    def take(self, name: str, slots: int) -> None:
        """A topology begins; `ConfigError` if one of this name runs already: they would share their records."""
        with self._lock:
            if name in self._held:
                raise ConfigError(
                    f"topology {name!r} runs already in this driver; its records are filed under the name, so give "
                    "another one to this, or cancel the other first"
                )
            self._held[name] = slots

    def give_back(self, name: str) -> None:
        with self._lock:
            self._held.pop(name, None)

    def by_others(self, name: str) -> dict[str, int]:
        """Return what topologies of other names hold."""
        with self._lock:
            return {other: slots for other, slots in self._held.items() if other != name}


_TAKEN = TaskSlotsTaken()


def taken_task_slots() -> TaskSlotsTaken:
    return _TAKEN


def _too_few(spark: Any, wanted: int, there: int, taken: dict[str, int]) -> str:
    others = ", ".join(f"{name!r} holds {slots}" for name, slots in taken.items())
    way_out = (
        f"start Spark with master local[{wanted + sum(taken.values())}] or more"
        if is_local(spark)
        else "give the application more executors or cores (spark.executor.cores, spark.cores.max)"
    )
    return (
        f"the topology needs {wanted} task slots for as long as it runs (its highest parallelism), and Spark has "
        f"{there}{f', of which {others}' if others else ''}: {way_out}, or lower the parallelism"
    )


def _is_true(spark: Any, option: str) -> bool:
    return str(spark.conf.get(option, "false")).lower() == "true"


def _connect_host(spark: Any) -> str | None:
    return urlsplit(
        str(getattr(spark.client, "_builder", None) and spark.client._builder.url.geturl())
    ).hostname


def _address_towards(host: str) -> str:
    """Return this machine's address on the way to ``host``; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnsupportedError(
            f"no address of this machine leads to the Spark Connect server {host}: {error}"
        ) from error
