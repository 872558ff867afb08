"""Names of columns as Spark sees them: without regard to case, save where a session says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.errors import InvalidTopologyError


def check_unlike(names: Sequence[str], what: str) -> None:
    """Raise `InvalidTopologyError`, with both names, for two columns that are one to Spark."""
    known: dict[str, str] = {}
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidTopologyError(f"{what}: two columns are named {name!r}; rename one")
        other = known.setdefault(name.lower(), name)
        if other != name and not case_matters():
            raise InvalidTopologyError(
                f"{what}: the columns {other!r} and {name!r} are one to Spark, which does not look at case; rename one "
                "(or set spark.sql.caseSensitive)"
            )


def case_matters() -> bool:
    """Whether the names of two columns may differ in case alone."""
    # Late: where nothing is doubtful, nothing of Spark is needed.
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    return spark is not None and str(spark.conf.get("spark.sql.caseSensitive")).lower() == "true"
