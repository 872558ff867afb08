"""A job in barrier mode in one thread, on a manual clock: the real driver's and slots' code, joined by queues.

Whatever can happen next (a message arrives, a slot takes a turn, a piece of a snapshot is written, time passes, a
process dies) is one of a list of moves, and a seeded `Random` picks among them.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from barrier_boxes import Boxes
from barrier_driver import Driver, Setting
from barrier_letters import Content, FaultyVertex, content_of, in_files
from barrier_moves import Moves
from barrier_parts import Channels, Control, Link, StepWorker
from barrier_process import Process
from barrier_topologies import Case, Extent

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.keys import storage_key
from ftlayer.checkpoint.storage.layout import pieces_directory
from ftlayer.checkpoint.storage.loading import all_pieces, paths_of
from ftlayer.checkpoint.storage.opening import driver_storage
from ftlayer.common.clock import Now
from ftlayer.runtime.protocol.messages import unseal


def files_below(root: str) -> list[str]:
    """Return the paths of all files below a directory, relative to it."""
    return [
        os.path.relpath(os.path.join(directory, name), root)
        for directory, _, names in os.walk(root)
        for name in names
    ]


class World:
    """All processes of a job, and what is on its way between them."""

    def __init__(
        self, case: Case, setting: Setting, seed: int, directory: Path, *, has_vertex: bool = False
    ) -> None:
        self.case, self.setting = case, setting
        self.outside = case.outside
        self.random = Random(seed)
        self.directory = directory
        self.pace_ms = setting.pace_ms
        self.mono, self.wall = 1_000_000, 1_700_000_000_000
        self.lives = 0
        self.closing = False
        self.current: Process | None = None
        self.processes: list[Process] = []
        self.servers: dict[str, Channels] = {}
        self.controls: list[Control] = []
        self.links: list[Link] = []
        self.spark_ended: list[tuple[int, int, str | None]] = []
        self.killed: set[str] = set()  # processes, and "<life>." for a driver with all that it had
        self.was_undecided = False  # whether a checkpoint might exist whose publishing failed
        self.leaves_copies: set[int] = set()  # lives
        self.boxes = Boxes(self)
        self.complete: set[tuple[str, int]] = set()  # checkpoints, by run and number
        self.letters: dict[bytes, ChainLetter] = {}  # of complete checkpoints
        self.vertex = FaultyVertex(self) if has_vertex else None
        self.in_savepoints: set[int] = set()  # messages that a user's savepoint holds
        self.moves_made: Counter[str] = Counter()
        self.workers: list[StepWorker] = []
        self.driver: Driver
        self._moves = Moves(self)

    @property
    def now(self) -> Now:
        return Now(self.mono, self.wall)

    @contextmanager
    def running(self, process: Process) -> Iterator[None]:
        """All that happens meanwhile happens in this process."""
        self.current, before = process, self.current
        self.outside.writer, writer = process.name, self.outside.writer
        try:
            yield
        finally:
            self.current, self.outside.writer = before, writer

    # ------------------------------------------------------------ lives

    def begin(self, restore_from: str | None = None, parallelism: int | None = None) -> None:
        """Start a driver."""
        if parallelism is not None:
            self.setting = replace(self.setting, parallelism=parallelism)
        self.lives += 1
        self.workers = []
        self.closing = False
        self.driver = Driver(self, self.setting, self.case, restore_from)

    def kill_driver(self) -> None:
        """The driver dies, and with it all processes: nothing is left but the storage, and what is outside."""
        self.closing = False
        self.outside.stuck.clear()
        self.killed.add(f"{self.lives}.")
        self.workers = []
        for process in list(self.processes):
            process.alive = False
            process.let_go_of_local_copies()
        self.processes.clear()
        self.controls.clear()
        self.links.clear()
        self.spark_ended.clear()

    def finish(self) -> None:
        """The job has come to its verdict: what its thread does then."""
        self.outside.stuck.clear()
        self.closing = True
        self.driver.job.finish()
        self.closing = False
        self.controls.clear()
        self.links.clear()

    # ------------------------------------------------------------ moving

    def step(self) -> None:
        """Let one thing happen, or time pass."""
        self._moves.step()

    def pass_time(self, ms: int) -> None:
        """Let nothing but time pass."""
        self._moves.pass_time(ms)

    # ------------------------------------------------------------ what is looked at

    def savepoint(self) -> str:
        return f"{self.directory}/savepoints/savepoint-{secrets.token_hex(6)}"

    def note_savepoint(self, savepoint: Checkpoint, key: bytes) -> None:
        self.in_savepoints |= self.in_savepoint(savepoint, key)

    def note_complete(self, checkpoint: Checkpoint, key: bytes) -> None:
        """Keep the dead letters of a checkpoint that is complete, and look at what else it holds."""
        if (checkpoint.run, checkpoint.checkpoint) in self.complete:
            return
        self.complete.add((checkpoint.run, checkpoint.checkpoint))
        letters = [letter for part in checkpoint.subtasks for letter in part.letters]
        self.letters |= {letter.letter: letter for letter in letters}
        self.case.completed(checkpoint, len(self.letters), key)

    def requeue(self) -> None:
        """A user sends all dead letters back that the vertex has."""
        if self.vertex is not None:
            self.case.came_back |= self.vertex.requeue_all() > 0

    def check_letters(self, extent: Extent) -> None:
        """Each letter of a complete checkpoint is in a file or in the vertex, once: this is where people look."""
        expected = Counter(content_of(letter) for letter in self.letters.values())
        found = in_files(self.driver.letters.files)
        back: Counter[Content] = Counter()
        if self.vertex is not None:
            # Who dies behind the vertex' answer leaves the file too, and the next driver knows by its name.
            found |= self.vertex.dead()
            back = self.vertex.requeued()
        made_up = set(found) - set(expected)
        assert not made_up, f"{len(made_up)} letters are of no complete checkpoint: {sorted(made_up)[:3]}"
        if extent is not Extent.CUT:
            # (Else the last checkpoint may be gone with what it was to make visible.)
            lost = set(expected) - set(found) - set(back)
            assert not lost, f"{len(lost)} letters are nowhere: {sorted(lost)[:3]}"
        if not self.case.came_back:
            assert extent is Extent.CUT or found == expected, found - expected or expected - found
        elif self.case.exact and self.case.name != "alarmed":
            # What has come back and died again is another letter, and its checkpoint has the job rid of the old one.
            twice = [content for content, times in found.items() if times > 1]
            assert not twice, f"dead twice: {twice[:3]}"

    def in_savepoint(self, savepoint: Checkpoint, key: bytes) -> set[int]:
        """Return the names of the messages that it holds."""
        return {
            unseal(committable.message, key).name
            for part in savepoint.subtasks
            for committable in part.committables
        }

    @property
    def local_copies(self) -> str:
        return f"{self.directory}/local"

    def files(self) -> list[str]:
        """Return the files of checkpoints, relative to their directory."""
        root = self.setting.config.directory
        if root is None:
            return []
        return files_below(root)

    def referred_to(self, checkpoints: Iterable[Checkpoint]) -> set[str]:
        """Return the files of checkpoints, as `files` names them."""
        found = set()
        for checkpoint in checkpoints:
            base = os.path.relpath(pieces_directory(checkpoint), self.setting.config.directory)
            found |= {f"{base}/{path}" for path in paths_of(all_pieces(checkpoint))}
            found.add(f"{base}/chk-{checkpoint.checkpoint}/_metadata")
        return found

    def copies(self) -> list[str]:
        """Return the files of local copies, relative to their directory."""
        return files_below(self.local_copies)

    def _storage(self) -> Any:
        config = self.setting.config
        return driver_storage(config, self.driver.graph.name, "look", storage_key(config, "simulated"))

    def load(self, location: str) -> Checkpoint:
        """Return the checkpoint or savepoint that lies there."""
        checkpoint: Checkpoint = self._storage().load(location)
        return checkpoint

    def latest(self) -> Any:
        """Return the latest checkpoint in the storage, everything that it refers to read; None without one."""
        config = self.setting.config
        if config.directory is None:
            return None
        storage = self._storage()
        found = storage.completed(self.driver.graph.name)
        if not found:
            return None
        checkpoint = storage.load(found[0])
        storage.verify(checkpoint)
        return checkpoint

    def report(self) -> str:
        """Say where everything is, for a run that does not end."""
        job = self.driver.job
        lines = [
            f"seed's moves {dict(self.moves_made)}",
            f"job {job.state}, last failure {job.core.last_failure!r}, restarts {job.core.restarts}",
            f"checkpoints {self.driver.checkpoints.checkpoint_counts}, under way {self.driver.rules.in_progress}",
        ]
        for process in self.processes:
            core = process.instance.core
            counters = {} if core is None else core.counters()
            lines.append(f"{process.name}: deployed {core is not None}, counters {counters}")
        return "\n".join(lines)
