"""What the demo runs, as a user would write it: a wrapped query, a topology in acker mode, one in barrier mode.

And their input: lines of text, in files. The query gets a file a core and batch, a topology line by line.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftlayer import (
    CheckpointConfig,
    Context,
    FailurePolicy,
    FTLayer,
    Job,
    JobState,
    ProcessFunction,
    Retention,
    StreamEnvironment,
    partitions,
)
from ftlayer.cli.demo.driver import (
    BACKOFF,
    MAX_ATTEMPTS,
    BatchDone,
    Progress,
    Restarted,
    RunDirectory,
    Started,
    Starting,
    Tell,
    Writing,
)
from ftlayer.cli.demo.ledger import ENRICHED_SCHEMA, WORDS_SCHEMA, Service, Word, split_record, words_of
from ftlayer.errors import ConfigError, JobError
from ftlayer.runtime.driver.rules.job_status import JobStatus
from ftlayer.runtime.environment import LATEST
from ftlayer.sinks import FileSink
from ftlayer.spark.facade import list_records
from ftlayer.spark.query.supervisor import TrackedQuery
from ftlayer.vertex.calls import BatchState, ListAudit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ftlayer.topology.streams.data_stream import DataStream


FILES_A_BATCH = PARALLELISM = 2
"""One for each core of the demo's Spark."""

NOT_ITS_OWN = {"site-packages", "test", "tests", "lib2to3", "idlelib", "__pycache__"}
"""Directories of a standard library that hold other people's code, tests, or what is often left out."""


@dataclass(frozen=True)
class PreparedInput:
    """The query's input: ``lines`` records out of ``sources`` files, in ``batches`` micro-batches."""

    title: str
    sources: int
    lines: int
    batches: int


def prepare(pattern: str | None, directory: Path, *, max_lines: int, batches: int) -> PreparedInput:
    """Write the lines of the files that match ``pattern`` (None: Python's own sources) into ``directory``.

    Blank lines are left out. Raises `ConfigError` when there are no files, or too few lines for two batches.
    """
    paths = _standard_library() if pattern is None else _matching(pattern)
    base = Path(os.path.commonpath([path.parent for path in paths]))
    lines = list(islice(_records(paths, base), max_lines))
    if len(lines) < 2 * FILES_A_BATCH:
        raise ConfigError(f"--input: {pattern!r} has {len(lines)} lines of text; that is too few to show")
    files = min(batches * FILES_A_BATCH, len(lines))
    directory.mkdir(parents=True)
    for number in range(files):
        part = lines[len(lines) * number // files : len(lines) * (number + 1) // files]
        text = "".join(f"{line}\n" for line in part)
        # Spark must never see a file that is half written.
        partial = directory / f".part-{number:04}"
        partial.write_text(text, "utf-8", newline="\n")
        partial.rename(directory / f"part-{number:04}.txt")
    title = "the sources of Python's standard library" if pattern is None else pattern
    return PreparedInput(title, len(paths), len(lines), -(-files // FILES_A_BATCH))


def prepared_files(directory: Path) -> Iterator[tuple[str, list[str]]]:
    for path in sorted(directory.glob("part-*.txt")):
        yield path.name, path.read_bytes().decode().removesuffix("\n").split("\n")


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not NOT_ITS_OWN & set(path.relative_to(root).parts)]
    if not paths:
        raise ConfigError(f"{root} holds no .py files on this machine; name others with --input 'GLOB'")
    return sorted(paths)


def _matching(pattern: str) -> list[Path]:
    found = glob.glob(os.path.expanduser(pattern), recursive=True)
    paths = [Path(name).absolute() for name in found if os.path.isfile(name)]
    if not paths:
        raise ConfigError(
            f"--input: no file matches {pattern!r}; put it in quotes, so that the shell leaves it alone"
        )
    return sorted(paths)


def _records(paths: Sequence[Path], base: Path) -> Iterator[str]:
    """Yield ``"file:number<tab>text"`` for each line that has text in it."""
    for path in paths:
        # A tab or a line break in a file's name would end the record's name.
        name = " ".join(str(path.relative_to(base)).split())
        try:
            text = path.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise ConfigError(f"--input: {path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{name}:{number}\t{line.removesuffix(chr(13))}"


FILE_S = 1.0
"""Each partition gives a file a second: slow enough to be killed in the middle, quick enough to be watched."""

STEP = 50
"""Lines between two pauses."""


@dataclass(frozen=True)
class Partition:
    """Every so-manyth file, line by line. ``mark`` is a file that holds how many lines have ever been read.

    Up to there a reader that begins again gets the lines at once, behind it at the pace of `FILE_S`.
    """

    files: tuple[str, ...]
    mark: str

    def __call__(self) -> Iterator[str]:
        """Yield the records, the same ones each time."""
        reached = lines_read(Path(self.mark))
        number = 0
        mark = os.open(self.mark, os.O_WRONLY | os.O_CREAT)
        try:
            for file in self.files:
                lines = Path(file).read_bytes().decode().removesuffix("\n").split("\n")
                for place, line in enumerate(lines, 1):
                    yield line
                    number += 1
                    if number > reached and (place % STEP == 0 or place == len(lines)):
                        # Overwritten in place by a number of the same length: whole at any moment.
                        os.pwrite(mark, b"%012d" % number, 0)
                        time.sleep(FILE_S * (1 + (place - 1) % STEP) / len(lines))
        finally:
            os.close(mark)


def lines_read(mark: Path) -> int:
    try:
        return int(mark.read_bytes() or b"0")
    except FileNotFoundError:
        return 0


def input_partitions(directory: Path, marks: Path) -> list[Partition]:
    """Return the partitions of the files that `prepare` wrote."""
    paths = sorted(str(path) for path in directory.glob("part-*.txt"))
    return [
        Partition(tuple(paths[number::FILES_A_BATCH]), str(marks / f"lines-{number}"))
        for number in range(FILES_A_BATCH)
    ]


POLL_S = 0.05


@dataclass(frozen=True)
class EnrichWord:
    service: Service

    def __call__(self, record: Word) -> tuple[str, int, str, str]:
        line, _, word = record
        return (*record, self.service.kind(line, word))


def enriched_words(env: StreamEnvironment, directory: RunDirectory) -> DataStream:
    parts = input_partitions(directory.input, directory.marks)
    return (
        env.source(partitions(*parts), "value string", uid="lines")
        .flat_map(words_of, WORDS_SCHEMA, uid="parse")
        .map(EnrichWord(Service(str(directory.service))), ENRICHED_SCHEMA, uid="enrich")
    )


def follow(
    job: Job, directory: RunDirectory, tell: Tell, figures: Callable[[JobStatus], dict[str, int]]
) -> None:
    """Tell where a job is until it has ended. Raises what it fails with."""
    before = directory.committed_files()
    tell(Starting("the slots"))
    over = False
    while not over and job.state is not JobState.RUNNING:
        over = job.over(POLL_S)
    tell(Started())
    while not over:
        over = job.over(POLL_S)
        status = job.status()
        tell(
            Progress(
                sum(lines_read(mark) for mark in directory.marks.iterdir()),
                directory.committed_files() - before,
                [slot.pid for slot in status.slots],
                figures(status),
            )
        )
    job.wait()
    if job.state is not JobState.ENDED:
        raise JobError(f"the job is {job.state}, and should have come to its end")


INTERVAL = "500ms"
COUNTED_SCHEMA = ENRICHED_SCHEMA + ", count long"


class Count(ProcessFunction):
    def open(self, ctx: Context) -> None:
        self._count = ctx.value("count", 0)

    def process(self, record: tuple[str, int, str, str], ctx: Context) -> Iterator[tuple[object, ...]]:
        count = self._count.get() + 1
        self._count.set(count)
        yield (*record, count)


def run_checkpointed(spark: SparkSession, directory: RunDirectory, tell: Tell) -> None:
    """Keyed state and an exactly-once sink, by checkpoints; started again, it goes on from the latest one."""
    config = CheckpointConfig(
        interval=INTERVAL,
        directory=str(directory.checkpoints),
        savepoint_directory=str(directory.savepoints),
        retention=Retention.RETAIN_ON_CANCELLATION,
        failures=FailurePolicy(max_attempts=MAX_ATTEMPTS, backoff=BACKOFF),
    )
    env = StreamEnvironment(spark, name="demo", parallelism=PARALLELISM, checkpointing=config)
    words = enriched_words(env, directory)
    # A dead letter is a record like others: this sink has each of them exactly once, whatever is killed.
    words.dead_letters().sink(FileSink(str(directory.dead_letters)), uid="dead")
    (
        words.key_by("word")
        .process(Count(), COUNTED_SCHEMA, uid="count")
        .sink(FileSink(str(directory.output)), uid="sink")
    )
    job = env.execute_async(restore_from=LATEST)
    follow(job, directory, tell, _figures_of_checkpoints)
    _write_checkpoints(job, directory)


def _figures_of_checkpoints(status: JobStatus) -> dict[str, int]:
    counts = status.checkpoints
    assert counts is not None
    return {
        "slot restarts": status.restarts,
        "checkpoints": counts.completed,
        "failed": counts.failed,
        "restores": counts.restored,
        "waiting": sum(chain.waiting for chain in status.chains),
    }


def _write_checkpoints(job: Job, directory: RunDirectory) -> None:
    rows = [
        {
            "checkpoint": it.number,
            "kind": ("final " if it.final else "") + it.kind,
            "outcome": it.state,
            "duration_ms": it.duration_ms,
            "alignment_ms": it.total.alignment_ms,
            "sync_ms": it.total.sync_ms,
            "async_ms": it.total.async_ms,
            "state_bytes": it.total.state_bytes,
            "written_bytes": it.total.written_bytes,
            "failure": it.failure,
        }
        for it in reversed(job.checkpoints())
    ]
    directory.checkpoint_list.write_text(json.dumps(rows), "utf-8")


NAMES = {"requeue": "requeued", "edit": "edited", "purge": "purged"}
"""Fields of `ftlayer.cli.demo.ledger.HandChanges` by what the audit log calls a change."""


def write_dead_letters(layer: FTLayer, directory: RunDirectory) -> None:
    """Write a line of JSON a dead letter; the source's records are in a column ``value``."""
    with directory.dead.open("w", encoding="utf-8") as file:
        for letter in list_records(layer.client, "dead"):
            line, text = split_record(letter.payload.column("value")[0].as_py())
            entry = {
                "line": line,
                "reason": letter.reason,
                "operator": letter.operator,
                "attempts": len(letter.history),
                "edited": bool(letter.edited_by),
                "text": text,
            }
            file.write(json.dumps(entry) + "\n")


def write_changes(layer: FTLayer, directory: RunDirectory) -> None:
    """Write how many letters were requeued, edited and purged, by anybody: the audit log has all of it."""
    changes = dict.fromkeys(NAMES.values(), 0)
    page = None
    while page is None or page.more:
        page = layer.client.call(ListAudit(b"" if page is None else page.more))
        for entry in page.entries:
            if entry.what in NAMES:
                changes[NAMES[entry.what]] += entry.count
    directory.changes.write_text(json.dumps(changes), "utf-8")


TIMEOUT = "2m"
"""Longer than a slot is away on any machine: a record is replayed for a failure or a kill, and for nothing else."""


def run_tracked(spark: SparkSession, directory: RunDirectory, tell: Tell) -> None:
    """Every record is stored, followed, and replayed where it is lost; started again, it goes on with these."""
    with FTLayer.embedded(
        directory.store, timeout=TIMEOUT, max_attempts=MAX_ATTEMPTS, backoff=BACKOFF
    ) as layer:
        tell(Starting("the vertex"))
        layer.client_for(spark)
        env = StreamEnvironment(spark, layer, name="demo", parallelism=PARALLELISM)
        (
            enriched_words(env, directory)
            .key_by("word")
            .sink(FileSink(str(directory.output)), every="250ms", uid="sink")
        )
        follow(env.execute_async(), directory, tell, _figures_of_vertex)
        write_dead_letters(layer, directory)
        write_changes(layer, directory)


def _figures_of_vertex(status: JobStatus) -> dict[str, int]:
    figures = {"slot restarts": status.restarts}
    if (vertex := status.vertex) is None:
        return figures
    counts = {"pending": vertex.pending + vertex.due, "waiting": vertex.waiting, "dead letters": vertex.dead}
    return figures | counts


def parse(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for line, place, word in words_of(record["value"]):
        yield {"line": line, "place": place, "word": word}


@dataclass(frozen=True)
class EnrichRecord:
    service: Service

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "kind": self.service.kind(record["line"], record["word"])}


def run_query(spark: SparkSession, directory: RunDirectory, tell: Tell) -> None:
    with FTLayer.embedded(directory.store, max_attempts=MAX_ATTEMPTS, backoff=BACKOFF) as layer:
        tell(Starting("the vertex"))
        layer.client_for(spark)
        tell(Starting("the query"))
        query = _start(spark, layer, directory, tell)
        tell(Started())
        _report(query, tell)
        query.awaitTermination()
        write_dead_letters(layer, directory)
        write_changes(layer, directory)


def _start(spark: SparkSession, layer: FTLayer, directory: RunDirectory, tell: Tell) -> TrackedQuery:
    lines = (
        spark.readStream.format("text")
        .option("lineSep", "\n")
        .option("maxFilesPerTrigger", FILES_A_BATCH)
        .load(str(directory.input))
    )

    def write(rows: DataFrame, batch: int) -> None:
        tell(Writing(batch))
        rows.write.mode("overwrite").parquet(str(directory.batch_output(batch)))

    return (
        layer.source(lines, name="lines")
        .flat_map(parse, WORDS_SCHEMA)
        .map(EnrichRecord(Service(str(directory.service))), ENRICHED_SCHEMA, name="enrich")
        .key_by("word")
        .sink(write, checkpoint=str(directory.checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def _report(query: TrackedQuery, tell: Tell) -> None:
    told = restarts = 0
    before = time.monotonic()
    active = True
    while active:
        time.sleep(POLL_S)
        active = query.isActive
        reports = query.recent_batches
        for report in reports[told:]:
            now = time.monotonic()
            counts = (report.rows_in, report.waiting, report.dead, report.delivered)
            tell(BatchDone(report.batch, report.state is BatchState.SEALED, *counts, now - before))
            before = now
        told = len(reports)
        if query.restarts > restarts:
            restarts = query.restarts
            tell(Restarted(query.last_failure))
