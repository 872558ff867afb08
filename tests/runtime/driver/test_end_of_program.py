"""The driver's program ends while slots are connected: in order, with the exit code that is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

WAIT_S = 120

SLOTS = """
import sys, threading
from ftlayer.runtime.slot.main import ControlClient
from ftlayer.runtime.protocol.messages import Cancel, Hello
from ftlayer.transport.flight_connection import Endpoint

left = threading.Semaphore(0)
endpoint = Endpoint(address=sys.argv[1], token="a-token-of-the-tests-long-enough")
clients = []
for slot in range(4):
    client = ControlClient(endpoint, job="job", slot=slot, instance=f"slot-{slot}")
    client.start(lambda message: left.release() if isinstance(message, Cancel) else None, lambda reason: None)
    client.send(Hello(slot, f"slot-{slot}", "grpc://127.0.0.1:1", "host", 7))
    clients.append(client)
for client in clients:
    left.acquire()
for client in clients:
    client.close()
"""

DRIVER = """
import subprocess, sys, threading
from ftlayer.transport.address import Address
from ftlayer.runtime.driver.control_server import ControlServer

said = threading.Semaphore(0)
server = ControlServer(
    listen=Address("127.0.0.1"),
    token="a-token-of-the-tests-long-enough",
    job="job",
    slots=4,
    certificate=None,
    on_message=lambda *what: said.release(),
    on_lost=lambda *what: None,
)
slots = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(server.address)])
for _ in range(4):
    assert said.acquire(timeout=60)
"""


def run(script: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", DRIVER + script, SLOTS], capture_output=True, timeout=WAIT_S, check=False
    )


@pytest.mark.parametrize("attempt", range(4))
def test_slots_that_die_while_the_server_closes_do_not_abort_the_program(attempt: int) -> None:
    """So it is when the JVM is killed. Each attempt is a race, which most of them would lose."""
    done = run("server.close()\nslots.kill()\nsys.exit(3)")
    assert (done.returncode, done.stderr) == (3, b"")


def test_a_program_that_ends_while_its_job_runs_lets_the_slots_go() -> None:
    """They wait for it, and Flight waits for them: without a word to them neither would end."""
    done = run("sys.exit(3)")
    assert (done.returncode, done.stderr) == (3, b"")
