"""`tilework demo --nodes` as in `make demo-cluster`, but small: a workflow over two nodes, of which one is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilework.cli.views.charts import chart_of_history
from tilework.control.history_recorder import read_history

pytestmark = pytest.mark.exhaustive
POSTER = f"{Path(__file__).parents[2] / 'examples' / 'poster.py'}:poster"
COUNT = 6


def test_a_demo_over_nodes_shows_the_loss_of_one(tmp_path: Path) -> None:
    options = ["--nodes", "2", "--workers", "1", "--requests", str(COUNT), "--workflow", POSTER, "--json"]
    command = [sys.executable, "-m", "tilework", "demo", *options, "--out", str(tmp_path)]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert (told["identical"], told["different"]) == (True, 0)
    (loss,) = told["node_losses"]
    assert len(loss["devices"]) == 2, "its worker and its CPU slot"
    page = (tmp_path / "index.html").read_text("utf-8")
    assert f"<li>node {loss['node']} (devices " in page
    assert all(f"<li>{move}</li>" in page for move in loss["moves"])
    assert f"<li>all {COUNT} results are those of a server without nodes, bit for bit</li>" in page
    with (tmp_path / "events.jsonl").open(encoding="utf-8") as lines:
        chart = chart_of_history(read_history(lines))
    assert {outage.device_id for outage in chart.outages} == set(loss["devices"])
    assert set(chart.nodes.values()) == {0, 1}
    assert len(chart.requests) == COUNT
    stages = {work.stage for work in chart.works}
    assert stages == {"long_prompt", "encode", "diffuse", "decode", "large", "checked"}
    assert (tmp_path / "contact_sheet.png").stat().st_size > 0
    assert not (tmp_path / "clips.png").exists(), "a workflow has none"
