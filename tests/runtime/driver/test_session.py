"""What Spark runs, asked of a session that cannot be asked."""

from __future__ import annotations

from ftlayer.runtime.driver.session import count_tasks


class Connected:
    """A session of Spark Connect, as far as is asked of it."""


Connected.__module__ = "pyspark.sql.connect.session"


def test_tasks_of_a_connect_session_cannot_be_counted() -> None:
    assert count_tasks(Connected(), {0: "group"}) is None
