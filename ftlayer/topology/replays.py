"""Where replays of a source's records may come from."""

from __future__ import annotations

from ftlayer.checks import check_choice
from ftlayer.errors import ConfigError
from ftlayer.topology.operators import IterableSource, SourceConnector
from ftlayer.vertex.calls import REPLAYS


def check_replay(replay: str, connector: SourceConnector) -> None:
    """Raise `ConfigError` unless the rows of this source can be replayed from there."""
    check_choice(replay, "source: replay", REPLAYS)
    if replay == "source" and not isinstance(connector, IterableSource):
        raise ConfigError(
            "source: replay: 'source' is for iterables, which can be read again from any row on; this is a "
            f"{type(connector).__name__}: use replay='store' (the default), which stores its records before they are "
            "processed"
        )
