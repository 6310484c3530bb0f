"""From run to run over workers: clips of stock calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.handoff import check_stock_call, served
from zoo.model import ZooModel


@pytest.mark.parametrize("model", served(clips=True))
def test_of_stock_calls(model: ZooModel, tmp_path: Path) -> None:
    check_stock_call(model, tmp_path)
