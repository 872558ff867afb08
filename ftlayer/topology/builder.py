"""Where a topology begins: sources, whose streams write the graph, and the graph in the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ftlayer.common.checks import check_instance
from ftlayer.common.rules.restart import RestartStrategy, check_pauses, check_strategy
from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError
from ftlayer.functions.retry_rules import Errors, rules_of
from ftlayer.topology.checks import check_graph, check_replay
from ftlayer.topology.connectors import Options, ParseSchema, Schema, open_source
from ftlayer.topology.ddl import parse_ddl, to_ddl
from ftlayer.topology.draft import GraphDraft
from ftlayer.topology.job_graph import StreamGraph
from ftlayer.topology.operators import Queue, Source
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.vertex.calls import StreamOptions


class GraphBuilder:
    """Makes streams and keeps the graph that they write.

    The same calls give the same graph: an operator without a ``uid`` is called by its kind and its place among those
    of its kind, ``map-1``, ``map-2``. Give uids to keep ids and positions over a change of the program.

    Args:
        name: of the topology; the vertex files its records under it.
        parallelism: of operators that have none of their own.
        restart: of sources that have no strategy of their own; None: `default_restart`.
        status: whether records are tracked; `FTStatus.OFF` allows operators that could not be.
        parse_schema: reads schemas that are given as text; `parse_ddl` by default.
        open_letters: opens the dead letters of streams of the vertex; None: there is no vertex.

    Attributes:
        draft: the graph that its streams write.
    """

    def __init__(
        self,
        name: str,
        *,
        parallelism: int = 1,
        status: FTStatus | str = FTStatus.ON,
        restart: RestartStrategy | None = None,
        parse_schema: ParseSchema = parse_ddl,
        open_letters: Callable[[Sequence[str]], Any] | None = None,
    ) -> None:
        self.draft = GraphDraft(
            name, parallelism=parallelism, status=status, restart=restart, parse_schema=parse_schema
        )
        self.draft.open_letters = open_letters

    @property
    def name(self) -> str:
        return self.draft.name

    def source(
        self,
        source: Any,
        schema: Schema | None = None,
        *,
        options: Options | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        retry: StreamOptions | None = None,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
        restart: RestartStrategy | None = None,
        replay: str = "store",
    ) -> DataStream:
        """Begin a stream.

        Args:
            source: a stream reader or `DataSource` class of pyspark; an iterable of records that can be gone through
                again and again, a function without arguments that returns one, or `partitions` of either; a DataFrame
                of pandas, polars, Arrow (or anything with ``__arrow_c_stream__``), which is read now, or a list of
                dicts; a source of `ftlayer.sources`; or a `PushSource`. A record is a value (one column), a tuple in
                the order of the columns (several), or whole `pa.RecordBatch`es come.
            schema: of the records, as a `pa.Schema` or as Spark's DDL; may be left out for a `DataSource` that knows,
                for a DataFrame, and for lists and the like whose first records say it: a line on stderr does then.
            options: for a `DataSource` class.
            uid: stable name; positions of the source are kept under it.
            parallelism: subtasks that read. By default as many as there are partitions of iterables, up to the
                topology's; one for a `PushSource` (its callback is registered in each subtask) and a simple reader.
            retry: retry options of these records; by default the topology's.
            retry_on: which errors are worth another attempt of these records, where an operator does not say so
                itself; by default the topology's. Acker mode only.
            dead_on: which are not; asked before ``retry_on``. Acker mode only.
            max_failing: a share of this source's records of the last minute (``"5%"``), or a number a minute (``100``,
                ``"100/min"``), of those that fail in operators without a limit of their own. While more fail, the
                source pauses; by default the topology's limit, which is about all sources' records. Acker mode only.
            restart: whether, and after what pause, this source is read again when it raises; by default as the
                topology's ``restart``. Each subtask counts its own failures. A source that its strategy gives up ends
                the job with a `SourceGivenUpError`.
            replay: where the vertex has a record from that is tried again. ``"store"``: it stores each record before
                the first operator sees it. ``"source"``: it stores where records are in their source; a record itself
                is stored when it fails, and what was in flight when a slot is lost is read again. Acker mode only, and
                only of sources that give the same rows in the same order when they are read again: iterables, and
                stream readers.

        Raises:
            ConfigError: what cannot be a source, a one-shot iterator among others; no or a wrong schema.
        """
        rules = rules_of(retry_on, dead_on, "source", max_failing)
        if retry is not None:
            check_instance(retry, "source: retry", StreamOptions)
            check_pauses(retry, "source: retry")
            if retry.replay != "store":
                raise ConfigError("source: retry: replay is not to be given: use replay=…")
            if retry.circuits:
                raise ConfigError("source: retry: circuits are not to be given: use max_failing=…")
        check_strategy(restart, "source: restart")
        draft = self.draft
        wanted = None if schema is None else draft.schema(schema, "source")
        opened = open_source(source, wanted, options, draft.parse_schema)
        check_replay(replay, opened.connector)
        known = wanted if wanted is not None else opened.schema
        if known is None:
            raise ConfigError("source: give schema=…, a pyarrow.Schema or text like 'id bigint, name string'")
        if parallelism is None and opened.most_subtasks is not None:
            parallelism = min(opened.most_subtasks, draft.parallelism)
        most = source.most_subtasks if isinstance(source, Queue) else None
        if most is not None and parallelism is not None and parallelism > most:
            raise ConfigError(
                f"source: parallelism: a {type(source).__name__} is read by {most}, got {parallelism}"
            )
        strategy = restart or draft.restart

        def make(uid: str) -> Source:
            return Source(uid, opened.connector, known, rules, strategy, replay)

        leg = draft.add(make, [], uid=uid, parallelism=parallelism, retry=retry)
        if wanted is None and opened.inferred:
            # Said once: types that are guessed are to be seen.
            said = f"{draft.operator(leg.node).uid}: schema '{to_ddl(known)}', {opened.inferred}"
            print(said, file=sys.stderr, flush=True)
        return DataStream(draft, (leg,), known)

    def build(self) -> StreamGraph:
        """Return the graph, checked: see `check_graph` for what is raised."""
        graph = self.draft.graph()
        check_graph(graph, tracked=self.draft.status is FTStatus.ON)
        return graph
