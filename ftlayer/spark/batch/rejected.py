"""Rows that a sink sets aside: whose records they are, and why."""

from __future__ import annotations

import operator as op

from ftlayer.errors import ConfigError
from ftlayer.failures import RowsRejected
from ftlayer.functions.failures import RowFailure, failure_of, this_process
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.vertex.calls import Failure

_MASK = (1 << 64) - 1


def rejections(rejected: RowsRejected, operator: str, rules: RetryRules = NO_RULES) -> tuple[Failure, ...]:
    """Return the failures of the records that a sink has named by their rows' ``_ft_row``.

    Raises `ConfigError` for what is no such name.
    """
    found = []
    place = this_process("the driver")
    for key, error in rejected.errors.items():
        try:
            root = op.index(key) & _MASK
        except TypeError:
            raise _no_row(operator, key) from rejected
        failure = (
            RowFailure(0, operator, error, "")
            if isinstance(error, str)
            else failure_of(0, operator, error, rules)
        )
        found.append(Failure.of(root, failure, place))
    if not found:
        raise ConfigError(
            f"sink {operator!r} raised RowsRejected without a row: name one at least, or return"
        )
    return tuple(found)


def unknown_row(operator: str, root: int) -> ConfigError:
    """Return the error for a record of which the sink was given no row: it would be called without end."""
    return _no_row(operator, root - (1 << 64) if root >> 63 else root)


def _no_row(operator: str, key: object) -> ConfigError:
    return ConfigError(
        f"sink {operator!r} raised RowsRejected for {key!r}, which is the _ft_row of no row that it was given"
    )
