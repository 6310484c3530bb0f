"""`tilework plan`: what it asks and answers, and how it tells a mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import PIPELINE, table
from cli.command_line import invoke
from tilework.cost.table import CostTable
from tilework.cost.table_file import table_json
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.server.planning.planner import COSTS, REQUESTS, PlanJob, command_of
from tilework.server.planning.recent import TrafficLines

Mistake = Callable[..., str]


def line(place: int, slo_s: float | None = 2.5, pipeline: str = PIPELINE) -> WorkloadRequest:
    return WorkloadRequest(arrival_s=place / 3, pipeline=pipeline, height=128, width=128, steps=10, slo_s=slo_s)


def write_table(path: Path, costs: CostTable) -> Path:
    path.write_text(json.dumps(table_json(costs)), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three requests a second, of which each takes one device 1.06 s: a load of 3.2 devices."""
    write_workload(tmp_path / REQUESTS, [line(place) for place in range(40)])
    write_table(tmp_path / COSTS, table())
    return tmp_path


def planned(folder: Path, *options: object) -> dict[str, Any]:
    arguments = ["--workload", folder / REQUESTS, "--hardware", folder / COSTS, "--target", "0.8", "--processes", "1"]
    document: dict[str, Any] = json.loads(invoke("plan", *arguments, "--json", *options).stdout)
    return document


def test_the_fewest_devices_their_curve_and_its_error(folder: Path) -> None:
    picture = folder / "plan.png"
    document = planned(
        folder, "--samples", 2, "--served", "4,30", "--plot", picture, "--price", f"{folder / COSTS}=2.5"
    )
    (hardware,), (part,) = document["hardware"], document["choice"]["parts"]
    assert hardware["devices"] == part["devices"] == hardware["least"] == 3
    assert document["choice"]["usd_per_h"] == 7.5
    assert hardware["load"] == pytest.approx(3.1, abs=0.2)
    verdicts = {one["devices"]: one["verdict"] for one in hardware["points"]}
    assert verdicts[3] == "meets"
    assert part["uses"][1]["stage"] == "diffuse"
    assert part["uses"][1]["degrees"] == {"1": 1.0}
    error = document["error"]
    assert (error["live"], error["num_requests"], error["source"]) == (0.75, 40, str(folder / REQUESTS))
    assert error["points"] == pytest.approx(100 * (error["simulated"] - 0.75))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("plain_output")
def test_tables_say_what_was_tried_and_where_the_error_is_from(folder: Path) -> None:
    arguments = ["--workload", folder / REQUESTS, "--hardware", folder / COSTS, "--target", "0.8", "--processes", "1"]
    words = " ".join(invoke("plan", *arguments, "--samples", 1).stdout.split())
    assert f"80.0% on time: 3 devices of {folder / COSTS}" in words
    assert "95% interval" in words
    assert "against a live server with simulated devices: +1.1 points (93.3% simulated, 92.2% there, 180 req" in words


@pytest.mark.usefixtures("plain_output")
def test_a_log_of_a_simulation_is_not_called_a_live_server(folder: Path) -> None:
    log = folder / "events.jsonl"
    invoke("simulate", folder / REQUESTS, "--cost", folder / COSTS, "--devices", 4, "--events", log)
    arguments = ["--workload", log, "--target", "0.8", "--processes", "1", "--samples", "1"]
    words = " ".join(invoke("plan", *arguments).stdout.split())
    assert "Simulation against the simulation that was logged: " in words
    assert "live" not in words
    told = invoke("simulate", "--log", log).output
    assert "the simulation of the log" in told
    assert "simulated / logged mean latency: 1.000" in told
    written = log.read_text("utf-8")
    log.write_text(written.replace(',"simulated":true}', "}", 1), "utf-8")
    document = json.loads(invoke("plan", *arguments, "--json").stdout)
    assert document["error"]["compared_with"] == "a live server"


def test_a_server_asks_what_the_command_understands(folder: Path) -> None:
    traffic = TrafficLines(lines="", num_requests=40, num_due=40, num_met=31, span_s=13.0)
    _, _, _, *arguments = command_of(folder, PlanJob(target=0.8, traffic=traffic, num_devices=4), "edf")
    result = invoke(*arguments)
    document = json.loads(result.stdout)
    assert (document["policy"], document["target"], document["error"]["live"]) == ("edf", 0.8, 0.775)
    progress = [json.loads(one) for one in result.stderr.splitlines()]
    assert [one["simulations"] for one in progress] == list(range(1, document["simulations"] + 1))


@pytest.mark.usefixtures("plain_output")
def test_what_cannot_be_answered_is_told_beside_the_answer(folder: Path) -> None:
    arguments = ["--workload", folder / REQUESTS, "--hardware", folder / COSTS, "--processes", "1", "--samples", "2"]
    undivided = invoke("plan", *arguments, "--target", "0.8", "--stages", "--most", "2").stdout
    assert "80.0% on time: not with 2 devices; give more with --most" in undivided
    assert "stages: no number of devices is enough" in undivided
    write_workload(folder / REQUESTS, [line(place, slo_s=0.1) for place in range(40)])
    late = invoke("plan", *arguments, "--target", "0.8", "--plot", folder / "plan.png")
    assert "80.0% on time: out of reach\n" in late.stdout
    assert f"{folder / COSTS}: 100.0% of the requests would be late even alone, on any number" in late.stdout
    assert "simulated" not in late.stdout
    assert "plan.png is not drawn: nothing was simulated" in " ".join(late.stderr.split())
    assert not (folder / "plan.png").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--price", "x=1"], "--price x=1: 'x' is not one of the hardware"),
        (["--price", "COSTS=0"], "'0' is not a price; give US dollars per hour above 0"),
        (["--price", "COSTS=1", "--price", "COSTS=2"], "has a price already"),
        (["--plot", "plan.pdf"], "--plot plan.pdf ends in '.pdf'; the chart is a .png"),
        (["--policy", "edff"], "policy 'edff' does not exist; did you mean"),
        (["--policy", "deadline-belady"], "only a simulation can run it"),
        (["--served", "4"], "--served is '4'; give the devices and the requests on time, such as 8,412"),
        (["--hardware", "other.json"], "--hardware other.json: no such file or table"),
        (["--hardware", "other.json"], "`tilework cost list` names those that ship"),
        (["--hardware", "COSTS"], "is given twice; leave one out"),
        (["--target", "95"], "--target is 95; give a share of the deadlines from 0.01 to 0.999, such as 0.95"),
        (["--target", "nan"], "--target is nan"),
        (["--target", "0.999"], "40 requests with a deadline are too few to show 99.9%"),
        (["--step", "9", "--most", "8"], "--step 9 is more than --most 8; give less, or more with --most"),
        (["--plot", "nowhere/plan.png"], "the directory"),
        (["--workload", "nowhere.jsonl"], "--workload nowhere.jsonl: there is no such file"),
        (["--workload", "FOLDER"], "the directory has no event log"),
    ],
)
def test_each_mistake_is_told(folder: Path, mistake: Mistake, options: list[str], told: str) -> None:
    costs = str(folder / COSTS)
    given = [one.replace("COSTS", costs).replace("FOLDER", str(folder)) for one in options]
    assert told in mistake("plan", "--workload", folder / REQUESTS, "--hardware", costs, *given)


def test_a_workload_that_cannot_be_planned_is_told(folder: Path, mistake: Mistake) -> None:
    assert "give --workload" in mistake("plan")
    assert "there is no workload 'tetra'" in mistake("plan", "--workload", "tetra")
    assert "give --cost" not in (told := mistake("plan", "--workload", folder / REQUESTS))
    assert "--hardware" in told
    write_workload(folder / REQUESTS, [line(0, slo_s=None)])
    costs = folder / COSTS
    assert "no request has a deadline" in mistake("plan", "--workload", folder / REQUESTS, "--hardware", costs)
    write_workload(folder / REQUESTS, [line(place, pipeline="other") for place in range(20)])
    assert "pipeline 'other' is not in" in mistake("plan", "--workload", folder / REQUESTS, "--hardware", costs)
    other = write_table(folder / "other.json", replace(table(), hardware="other"))
    told = mistake("plan", "--workload", folder / REQUESTS, "--hardware", costs, "--hardware", other)
    assert "has no costs of other" in told
    told = mistake(
        *("plan", "--workload", folder / REQUESTS, "--hardware", costs, "--hardware", other, "--price", f"{other}=1")
    )
    assert f"--price of {costs} is missing" in told
