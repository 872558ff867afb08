"""Which parameters of a test come by default, and which in the campaign alone (``pytest -m campaign``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def seeds(few: Sequence[int], others: Sequence[int]) -> pytest.MarkDecorator:
    """Give a test ``seeds``: a few of them by default, the others in the campaign."""
    in_campaign = pytest.param(others, id="others", marks=pytest.mark.campaign)
    return pytest.mark.parametrize("seeds", [pytest.param(few, id="few"), in_campaign])


def every_other(names: str, *kinds: Iterable[Any]) -> pytest.MarkDecorator:
    """Give a test every other combination of such values by default, and the rest in the campaign.

    Each value comes with half of the others, in turn.
    """
    parameters = []
    for each in product(*(enumerate(values) for values in kinds)):
        marks = [pytest.mark.campaign] if sum(place for place, _ in each) % 2 else []
        parameters.append(pytest.param(*(value for _, value in each), marks=marks))
    return pytest.mark.parametrize(names, parameters)
