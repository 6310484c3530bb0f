"""Which parameters of a test belong to `make test`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(chosen: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values` for `parametrize`, of which all but the `chosen` are cases of an exhaustive matrix (`sampling.py`).

    Raises:
        ValueError: a chosen one is none of them.
    """
    values = list(values)
    if unknown := [one for one in chosen if one not in values]:
        raise ValueError(f"{unknown} are none of the parameters")
    return [one if one in chosen else pytest.param(one, marks=pytest.mark.exhaustive) for one in values]
