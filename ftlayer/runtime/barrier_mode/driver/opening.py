"""A job's checkpoints at its start: the key, the storage, and the checkpoint to restore."""

from __future__ import annotations

import logging

from ftlayer.checkpoint.coordinator.coordinator import CheckpointCoordinator
from ftlayer.checkpoint.coordinator.in_flight import JobFacts
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.files import NAMED, open_files
from ftlayer.checkpoint.storage.keys import key_of, storage_key, take_over
from ftlayer.checkpoint.storage.layout import METADATA, checkpoint_number, last_name, pieces_directory
from ftlayer.checkpoint.storage.loading import (
    JobResult,
    find_result,
    forget_result,
    load_checkpoint,
    read_each,
    remains,
)
from ftlayer.checkpoint.storage.opening import DriverStorage, absolute, driver_storage
from ftlayer.common.checks import check_named
from ftlayer.errors import CheckpointDamagedError, CheckpointError, ConfigError
from ftlayer.functions.keyed import SUFFIX as TTL_SUFFIX
from ftlayer.runtime.barrier_mode.driver.checkpointing import JobCheckpointParts
from ftlayer.runtime.barrier_mode.driver.committing import Committer, resealed
from ftlayer.runtime.barrier_mode.driver.letters import open_letters
from ftlayer.runtime.barrier_mode.driver.restoring import edge_infos, goes_back, operator_infos, restores
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import ReaderCheckpoints
from ftlayer.runtime.protocol.messages import CheckpointPlan, may_overtake
from ftlayer.topology.job_graph import JobGraph

LATEST = "latest"
"""``restore_from``: the latest checkpoint of the topology in its directory."""

SPARE = 3
"""With `LATEST`, so many older checkpoints are read too, or as many as are retained: one of them may be needed if the
latest is damaged."""

logger = logging.getLogger(__name__)


def ended_before(name: str, config: CheckpointConfig | None, restore_from: str | None) -> JobResult | None:
    """Return how a job has ended that is to go on where it was; None: there is something to do, or to begin."""
    if config is None or restore_from != LATEST:
        return None
    return find_result(config, name)


def open_checkpoints(
    graph: JobGraph, config: CheckpointConfig, run: str, restore_from: str | None, seal_key: bytes
) -> tuple[JobCheckpointParts, CheckpointPlan]:
    """Open the storage, and read what is to be restored.

    Args:
        graph: what will run.
        config: as the user gave it.
        run: names this execution; its checkpoints lie in a directory of that name.
        restore_from: URL of a checkpoint or savepoint, `LATEST`, or None.
        seal_key: seals what driver and slots of this run send each other; what is kept is sealed with the storage's.

    Raises:
        ConfigError: `LATEST` without a directory.
        CheckpointStorageError: the directory cannot be used, or has no such checkpoint.
        CheckpointDamagedError: it cannot be read.
        IncompatibleCheckpointError: it does not fit the graph; says what is in the way.
    """
    config = absolute(config)
    key = storage_key(config, graph.name)
    storage = driver_storage(config, graph.name, run, key)
    # What does not fit is said here, before anything runs, and before a driver is fenced that may do well.
    _known(graph, config, (key, seal_key), storage, storage.completed(graph.name), restore_from)
    ownership = take_over(config.directory, graph.name, run)
    if ownership is not None:
        # Another first run, which this one has overtaken, may have kept its key in the place of this one's.
        key = storage_key(config, graph.name)
        storage = driver_storage(config, graph.name, run, key)
    # What an earlier owner has published until now counts, and nothing of it that comes later.
    locations = storage.completed(graph.name)
    known = _known(graph, config, (key, seal_key), storage, locations, restore_from)
    if (ended := ended_before(graph.name, config, restore_from)) is not None:
        raise CheckpointError(f"{ended}. It did while this start looked for its checkpoints; start it again")
    if restore_from == LATEST and not known and ownership is not None and ownership.epoch > 1:
        logger.warning(
            "restore_from='latest': topology %r has been started before with the checkpoints in %s, and there is none "
            "of it now: it begins anew, without state, and transactional sinks get again what they have got. (A "
            "cancelled or failed job leaves none if its retention says so; a savepoint is restored by its path.)",
            graph.name,
            config.directory,
        )
    taken = [checkpoint_number(last_name(location)) or 0 for location in locations]
    rules = CheckpointCoordinator(
        config,
        _facts(graph, config, run),
        highest=max([*taken, *(each.checkpoint for each in known)], default=0),
        known=known,
        # A checkpoint that a user names is the user's.
        claimed=restore_from == LATEST,
    )
    if restore_from != LATEST:
        # This is a new run, and asked for as such.
        forget_result(config, graph.name)
    committer = Committer(graph, seal_key, allow_unknown=config.allow_unclaimed_state)
    readers = ReaderCheckpoints(graph)
    letters = open_letters(config, graph.name, key, locations)
    gone_back = _gone_back(locations, known) if restore_from == LATEST else ""
    parts = JobCheckpointParts(
        graph, config, run, rules, storage, (key, seal_key), committer, readers, letters, ownership, gone_back
    )
    return parts, CheckpointPlan(config, run, key)


def _known(
    graph: JobGraph,
    config: CheckpointConfig,
    keys: tuple[bytes, bytes],
    storage: DriverStorage,
    locations: list[str],
    restore_from: str | None,
) -> list[Checkpoint]:
    """Return what the job may be restored from; the latest of it fits the graph. Raises as `open_checkpoints`."""
    known: list[Checkpoint] = []
    if restore_from == LATEST:
        if config.directory is None:
            raise ConfigError("restore_from='latest', directory: there is no directory to look in; give one")
        found = _latest(storage, locations, max(SPARE, config.retained))
        known = [resealed(each, *keys) for each in found]
    elif restore_from is not None:
        known = [_loaded(restore_from, config, keys[1])]
    operators = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
    for migration in config.migrations:
        check_named(migration.operator, operators, "migrations: the topology has no operator")
    if known:
        latest = max(known, key=lambda each: each.checkpoint)
        _say_what_is_not_migrated(config, latest)
        restores(latest, graph, allow_unclaimed=config.allow_unclaimed_state)
    return known


def _say_what_is_not_migrated(config: CheckpointConfig, checkpoint: Checkpoint) -> None:
    """Log migrations of states that are not in ``checkpoint``: misspelled ones, or such as no record has come to."""
    there: dict[str, set[str]] = {}
    for snapshot in checkpoint.subtasks:
        for table in snapshot.keyed.tables if snapshot.keyed is not None else ():
            there.setdefault(table.operator, set()).add(table.name.removesuffix(TTL_SUFFIX))
    for migration in config.migrations:
        names = there.get(migration.operator, set())
        if not names & {migration.state, migration.renamed_from}:
            logger.warning(
                "migrations: %r has no state %r in %s, so nothing of it is migrated; it has there: %s",
                migration.operator,
                migration.state,
                checkpoint.location,
                ", ".join(sorted(names)) or "none",
            )


def _latest(storage: DriverStorage, locations: list[str], most: int) -> list[Checkpoint]:
    """Return the latest checkpoints that can be read, ``most`` and one; [] where there has never been one."""
    found: list[Checkpoint] = []
    damages: list[CheckpointDamagedError] = []
    for _, read in read_each(locations, storage.load):
        if isinstance(read, CheckpointDamagedError):
            logger.error("%s; an older checkpoint is looked for", read)
            damages.append(read)
        elif isinstance(read, CheckpointError):
            raise read
        else:
            found.append(read)
        if len(found) > most:
            break
    if not found and damages:
        named = "; ".join(str(damage) for damage in damages[:NAMED])
        more = f"; and {len(damages) - NAMED} more" if len(damages) > NAMED else ""
        raise CheckpointDamagedError(
            f"there is no checkpoint that can be read: {named}{more}; restore_from takes any checkpoint or savepoint "
            "by its path"
        ) from damages[0]
    return found


def _gone_back(locations: list[str], known: list[Checkpoint]) -> str:
    """Return what to say where the latest checkpoint is damaged; "" where it is not."""
    if not known or known[0].location == locations[0]:
        return ""
    files = open_files(locations[0])
    if files.size(METADATA) is None:  # Removed since it was listed.
        return ""
    newest = remains(files.read(METADATA), locations[0])
    return goes_back(f"{locations[0]} is damaged", newest, known[0])


def _loaded(url: str, config: CheckpointConfig, seal_key: bytes) -> Checkpoint:
    checkpoint = load_checkpoint(url, config.key)
    return resealed(checkpoint, key_of(pieces_directory(checkpoint), config.key), seal_key)


def _facts(graph: JobGraph, config: CheckpointConfig, run: str) -> JobFacts:
    subtasks = {(vertex.uid, subtask) for vertex in graph.vertices for subtask in range(vertex.parallelism)}
    sources = {vertex.uid for vertex in graph.vertices if vertex.tells_its_end}
    return JobFacts(
        graph.name,
        run,
        graph.max_parallelism,
        operator_infos(graph),
        frozenset(subtasks),
        frozenset(subtask for subtask in subtasks if subtask[0] in sources),
        edge_infos(graph),
        may_overtake=may_overtake(graph, config),
    )
