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
    return quick_rows([(one,) for one in chosen], [(one,) for one in values])


def quick_rows(chosen: Collection[tuple[Any, ...]], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As `quick`, for a test with several parameters.

    Raises:
        ValueError: a chosen one is none of them.
    """
    rows = list(rows)
    if unknown := [one for one in chosen if one not in rows]:
        raise ValueError(f"{unknown} are none of the parameters")
    return [pytest.param(*one, marks=[] if one in chosen else pytest.mark.exhaustive) for one in rows]
