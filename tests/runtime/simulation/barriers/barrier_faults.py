"""What goes wrong outside of a job's own code: processes die, networks break, disks lose what they held."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from barrier_parts import Link
from barrier_process import Process

from ftlayer.runtime.slot.rules.events import CoordinatorLost


def kill(world: Any, process: Process) -> None:
    """A process dies; of what it has sent some arrives."""
    instance = process.instance
    control = instance.control
    if not control.closed:
        kept = world.random.randint(0, len(control.up))
        while len(control.up) > kept:
            control.up.pop()
        control.reason = "its control stream broke: the process was killed"
        control.close()
    for link in process.links:
        kept = world.random.randint(0, len(link.frames))
        while len(link.frames) > kept:
            link.frames.pop()
        link.silent = True
    if instance.server is not None:
        instance.server.close()
    world.killed.add(process.name)
    process.end("the process was killed")


def kill_others(world: Any) -> None:
    """A process but the one that runs dies."""
    others = [process for process in world.processes if process is not world.current]
    if others:
        kill(world, world.random.choice(others))


def cut(world: Any, link: Link) -> None:
    """A stream between two slots breaks, and nothing else."""
    kept = world.random.randint(0, len(link.frames))
    while len(link.frames) > kept:
        link.frames.pop()
    link.back.clear()
    link.broken = "the network broke it"
    if link.receiver is not None:
        link.receiver.streams.pop(link.header.sender, None)


def cut_control(world: Any, process: Process) -> None:
    """Driver and slot lose each other."""
    instance = process.instance
    if not instance.control.closed:
        world.killed.add(process.name)  # as far as anybody knows
        instance.control.close()
        instance.mailbox.put(CoordinatorLost("the network broke the control stream"))


def damage_copies(world: Any) -> None:
    """Slots' own disks fail: of the local copies some are cut, some are changed, some are gone."""
    for directory, _, names in os.walk(world.local_copies):
        for name in names:
            if name.startswith("_") or world.random.random() < 0.3:
                continue
            path = Path(directory, name)
            data = path.read_bytes()
            match world.random.randrange(3):
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(data[: len(data) // 2])
                case _:
                    path.write_bytes(bytes(255 - byte for byte in data))
