"""Which handler a task gets."""

from __future__ import annotations

import pytest

from ftlayer.checkpoint.handlers import AlignedHandler, AlternatingHandler, TrackingHandler, make_handler
from ftlayer.checkpoint.options import CheckpointingMode
from ftlayer.errors import ConfigError

EXACTLY, AT_LEAST = CheckpointingMode.EXACTLY_ONCE, CheckpointingMode.AT_LEAST_ONCE


def test_the_mode_decides() -> None:
    assert type(make_handler(EXACTLY, False, 2)) is AlignedHandler
    assert type(make_handler(EXACTLY, True, 2)) is AlternatingHandler
    assert type(make_handler(AT_LEAST, False, 2)) is TrackingHandler


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="unaligned, mode"):
        make_handler(AT_LEAST, True, 2)
    with pytest.raises(ConfigError, match="channels"):
        make_handler(EXACTLY, False, 0)
