"""`tilework workload`: what it lists, makes, shows and draws, and how it tells a mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from quick import quick
from tilework.cli import console as output
from tilework.cli.app import app
from tilework.formats.workload import WorkloadRequest, read_workload, write_workload
from tilework.report.workload import draw_workload
from tilework.sim.workloads.registry import family, make_workload, parameters_of, workload_names

COUNTS = {"num_requests": "12", "cycles": "2", "bursts": "3", "runs": "1", "to_hour": "15"}


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for console in (output.out, output.console):
        monkeypatch.setattr(console, "_force_terminal", False)
        monkeypatch.setattr(console, "_color_system", None)
        monkeypatch.setattr(console, "width", 140)


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def said_json(*arguments: object) -> Any:
    return json.loads(said(*arguments, "--json"))


@pytest.fixture
def mistake() -> Callable[..., str]:
    def told(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["workload", *map(str, arguments)])
        assert isinstance(result.exception, output.UserError), result.output
        return str(result.exception).replace("\\[", "[")

    return told


def brief(name: str) -> list[str]:
    known = parameters_of(family(name))
    return [word for key, text in COUNTS.items() if key in known for word in ("--set", f"{key}={text}")]


@pytest.mark.parametrize("command", ["list", "make", "show"])
def test_every_command_has_an_example(command: str) -> None:
    text = " ".join(said("workload", command, "--help").split())
    assert re.search(rf"Examples?: tilework workload {command}", text)


def test_list_names_every_workload_with_what_it_is_for() -> None:
    text = said("workload", "list")
    for name in workload_names():
        assert re.search(rf"^ +{name} ", text, re.MULTILINE)
    entries = {entry["name"]: entry for entry in said_json("workload", "list")["workloads"]}
    assert tuple(entries) == workload_names()
    assert entries["tetriserve"]["cost"] == "flux1dev_h100_eager"
    assert entries["tetriserve"]["devices"] == 8
    assert entries["ddit"]["parameters"]["arrivals"]["choices"][-1] == "at_once"


def test_tables_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 80)
    listed, shown = said("workload", "list"), said("workload", "show", "tetriserve")
    assert re.search(r"^ +tetriserve +images of four sizes ", listed, re.MULTILINE)
    assert re.search(r"^ flux.1-dev +2048x2048 +20 +75 ", shown, re.MULTILINE)


@pytest.mark.parametrize("name", workload_names())
def test_list_of_one_shows_its_parameters_and_what_is_ours(name: str) -> None:
    text = said("workload", "list", name)
    assert all(re.search(rf"^ +{parameter} ", text, re.MULTILINE) for parameter in parameters_of(family(name)))
    assert re.search(r"\b[Oo]urs\b", text)


@pytest.mark.parametrize(
    "name", quick(("tetriserve", "tridentserve-flux", "patchedserve-sdxl", "mixes", "flood"), workload_names())
)
def test_a_made_file_is_the_workload_and_runs_on_its_table(name: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    about = said_json("workload", "make", name, "--out", path, "--seed", 5, *brief(name))
    known = parameters_of(family(name))
    values = {key: int(text) for key, text in COUNTS.items() if key in known}
    requests = make_workload(name, values).requests(5)
    assert read_workload(path) == requests
    assert about["num_requests"] == len(requests)
    assert about["parameters"] == {**about["parameters"], **values}
    result = said_json("simulate", path, "--cost", about["cost"], "--devices", about["devices"])["result"]
    assert result["done"] == len(requests)


def test_make_prints_the_command_that_simulates_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert said("workload", "make", "ddit", "--out", path) == (
        f"{path}: 200 requests\ntilework simulate {path} --cost opensora_h800 --devices 8\n"
    )


def test_options_are_parameters(tmp_path: Path) -> None:
    path, trace = tmp_path / "r.jsonl", tmp_path / "t.csv"
    trace.write_text("arrival_s,height,width,steps\n" + "".join(f"{i * i},64,64,1\n" for i in range(9)))
    about = said_json("workload", "make", "tetriserve", "--out", path, "--rpm", 30, "--scale", 1.5, "--num", 9)
    assert {key: about["parameters"][key] for key in ("rate_per_s", "scale", "num_requests")} == {
        "rate_per_s": 0.5,
        "scale": 1.5,
        "num_requests": 9,
    }
    about = said_json("workload", "make", "tetriserve", "--out", path, "--rate", 2, "--num", 9, "--trace", trace)
    assert about["parameters"]["trace"] == str(trace)
    assert [request.arrival_s for request in read_workload(path)] == [pytest.approx(i * i / 16) for i in range(9)]


def test_show_has_sizes_deadlines_and_load() -> None:
    shown = said_json("workload", "show", "tetriserve")
    assert [row["size"] for row in shown["sizes"]] == ["256x256", "512x512", "1024x1024", "2048x2048"]
    assert [row["shortest_slo_s"] for row in shown["sizes"]] == [1.5, 2.0, 3.0, 5.0]
    assert [row["device_s"] for row in shown["sizes"]] == pytest.approx([0.8, 1.4, 4.68, 22.8])
    assert shown["load"] == pytest.approx(75 * (0.8 + 1.4 + 4.68 + 22.8) / shown["span_s"] / 8)
    assert said_json("workload", "show", "tetriserve", "--devices", 16)["load"] == pytest.approx(shown["load"] / 2)
    text = said("workload", "show", "flood")
    assert re.search(r"2048x2048 +20 +75 +25% +5; 67 none", text)
    assert "a load of 127% on 8 devices (flux1dev_h100_eager)" in text


def test_show_of_a_file_has_the_load_if_it_knows_costs(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    said("workload", "make", "tetriserve", "--out", path)
    assert "give --cost and --devices for the load" in said("workload", "show", path)
    of_file = said_json("workload", "show", path, "--cost", "flux1dev_h100_eager", "--devices", 8)
    assert of_file["load"] == pytest.approx(said_json("workload", "show", "tetriserve")["load"])
    assert of_file["title"] == "r.jsonl"


@pytest.mark.parametrize("arguments", [["tetriserve"], ["ddit", "--set", "arrivals=at_once"], ["flood", "--num", "1"]])
def test_show_draws_a_picture(arguments: list[str], tmp_path: Path) -> None:
    said("workload", "show", *arguments, "--png", tmp_path / "r.png")
    picture = Image.open(tmp_path / "r.png")
    assert picture.width == 1430
    assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 10


def test_the_picture_has_a_hue_for_each_size_and_a_line_for_the_capacity(tmp_path: Path) -> None:
    request = WorkloadRequest(arrival_s=0.0, pipeline="p", height=64, width=64, steps=1)
    other = WorkloadRequest(arrival_s=9.0, pipeline="p", height=128, width=128, steps=1, slo_s=1.0)

    def shows(red: int, green: int, blue: int, **more: Any) -> bool:
        draw_workload(tmp_path / "r.png", [request, other], **more)
        counted = Image.open(tmp_path / "r.png").convert("RGB").getcolors(1 << 20) or []
        near = (count for count, (r, g, b) in counted if max(abs(r - red), abs(g - green), abs(b - blue)) < 40)
        return sum(near) > 40

    sky, leaf, brick = (0x56, 0xB4, 0xE9), (0x00, 0x9E, 0x73), (0xB3, 0x26, 0x1E)
    assert all(shows(*hue, device_s=[1.0, 2.0]) for hue in (sky, leaf, brick))
    assert shows(*sky)
    assert not shows(*brick)
    with pytest.raises(ValueError, match="no requests to draw"):
        draw_workload(tmp_path / "r.png", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tetriserv"], "there is no workload 'tetriserv'; did you mean tetriserve?"),
        (["tetriserve", "--set", "mix"], "--set is 'mix'; write NAME=VALUE, as in mix=skewed"),
        (["tetriserve", "--set", "mix=skewd"], "tetriserve: mix is 'skewd'; did you mean skewed? use one of uniform,"),
        (["tetriserve", "--set", "mx=256"], "tetriserve: mx is not a parameter of this workload; did you mean mix?"),
        (["tetriserve", "--set", "steps=ten"], "tetriserve: steps is 'ten'; use a whole number of at least 1"),
        (["tetriserve", "--set", "alpha=1", "--set", "alpha=2"], "--set names alpha twice; leave one out"),
        (["tetriserve", "--scale", "2", "--set", "scale=2"], "scale is set twice, by an option and by --set;"),
        (["tetriserve", "--rate", "2", "--rpm", "3"], "--rate and --rpm set the same parameter"),
        (["tetriserve", "--rate", "0"], "tetriserve: rate_per_s is 0.0; use a number above 0"),
        (["ladder", "--num", "3"], "ladder has no num_requests; leave out --num (it has scale, runs, length, "),
        (["tetriserve", "--trace", "nowhere.csv"], "nowhere.csv: No such file or directory"),
    ],
)
def test_a_mistake_is_reported_with_its_remedy(
    arguments: list[str], message: str, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    assert mistake("make", *arguments, "--out", tmp_path / "r.jsonl").startswith(message)
    assert mistake("show", *arguments).startswith(message)
    assert not (tmp_path / "r.jsonl").exists()


def test_show_reports_errors_in_a_file(tmp_path: Path, mistake: Callable[..., str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("")
    assert mistake("show", path) == f"{path} holds no requests; write one per line"
    write_workload(path, make_workload("ddit", {"num_requests": 3}).requests(0))
    assert mistake("show", path, "--scale", 2).startswith(f"{path} is a file, whose requests are fixed;")
    assert "pipeline 'opensora' is not in the cost table" in mistake("show", path, "--cost", "flux1_l20")
    assert mistake("show", path, "--png", "r.gif") == "r.gif ends in '.gif'; the chart is a .png"
    path.write_text("{}\n")
    assert mistake("show", path).startswith(f'{path}:1: "arrival_s" is missing')
