"""`tilework compare`: what it prints, draws and keeps, what it runs again, and how it tells a mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from comparing import document, invoke
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from builders import PIPELINE, Idle, table
from tilework.cli import console as output
from tilework.cli.app import app
from tilework.core.policy import ClusterView, CostModel
from tilework.core.work import Plan
from tilework.cost.table_file import table_json
from tilework.formats.workload import WorkloadRequest, write_workload
from tilework.policy import registry
from tilework.report.panels import BarPanel, Curve, CurvePanel, draw_panels
from tilework_lab.cli import compare_run, plot
from tilework_lab.compare.grid import BATCHING, POLICIES
from tilework_lab.compare.runs import Task

pytestmark = pytest.mark.usefixtures("wide_output")

SMALL = ("--workload", "tetriserve,num=12,rpm=30", "--policies", "edf,tetriserve", "--processes", "1")


@pytest.fixture
def mistake() -> Callable[..., str]:
    def told(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
        assert isinstance(result.exception, output.UserError), (result.output, result.exception)
        return str(result.exception).replace("\\[", "[")

    return told


def shown(result: Result) -> str:
    return re.sub(" +", " ", result.stdout)


# What it prints.


def test_a_table_has_shares_latency_and_cost_of_each_policy() -> None:
    text = shown(invoke(*SMALL, "--seeds", 2))
    assert "tetriserve,num=12,rpm=30: 12 requests on 8 devices, 2 seeds, simulated; at most" in text
    found = document(*SMALL, "--seeds", 2)["cells"][0]["policies"]
    for policy in ("edf", "tetriserve"):
        share = found[policy]["attainment"]
        half = share["high"] - share["mean"]
        assert re.search(rf"^ {policy} {100 * share['mean']:.1f} ±{100 * half:.1f} ", text, re.MULTILINE), text
    assert "measured on this machine, by the wall clock, under load of 1 process" in text
    assert "vs best" in text
    assert "all 2 cells" not in text


def test_in_a_narrow_terminal_the_table_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 90)
    lines = invoke(*SMALL, "--seeds", 2).stdout.splitlines()
    assert max(map(len, lines[1:-3])) <= 90, "all but the title, which is never broken, and the notes"
    assert sum("edf" in line for line in lines) == 2


def test_without_deadlines_there_is_latency_and_no_share() -> None:
    given = ("--workload", "ddit,num=6", "--policies", "edf,ddit", "--seeds", 2, "--processes", 1)
    (cell,) = document(*given)["cells"]
    assert (cell["with_deadline"], cell["bound"], cell["leading"]) == (0, None, "mean_s")
    edf, ddit = cell["policies"]["edf"], cell["policies"]["ddit"]
    assert (edf["attainment"], edf["of_bound"], edf["fairness"]) == (None, None, None)
    assert edf["lead"]["over"] == "ddit"
    assert edf["lead"]["mean"] == pytest.approx(edf["mean_s"]["mean"] - ddit["mean_s"]["mean"])
    row = next(line for line in shown(invoke(*given)).splitlines() if line.startswith(" edf"))
    assert row.split()[1:3] == ["-", "-"]


def test_json_has_all_figures(tmp_path: Path) -> None:
    found = document(*SMALL, "--seeds", 2, "--jitter", 0.02, "--switch-ms", 3, "--devices", 4, "--devices-per-node", 2)
    assert (found["simulated"], found["jitter"], found["switch_ms"], found["processes"]) == (True, 0.02, 3.0, 1)
    (cell,) = found["cells"]
    assert (cell["workload"], cell["cost"], cell["devices"], cell["devices_per_node"]) == (
        "tetriserve",
        "flux1dev_h100_eager",
        4,
        2,
    )
    assert cell["parameters"]["rate_per_s"] == 0.5
    edf = cell["policies"]["edf"]
    names = ("attainment", "of_bound", "mean_s", "p95_s", "p99_s", "device_s_each", "num_preempted", "fairness")
    for name in (*names, "plan_p50_ms", "plan_p99_ms", "num_events"):
        assert len(edf[name]["values"]) == 2
        assert edf[name]["low"] <= edf[name]["mean"] <= edf[name]["high"]
    assert sum(size["num_requests"] for size in edf["by_size"][0].values()) == 12
    assert [line["policy"] for line in found["overall"]] == ["edf", "tetriserve"]


def test_the_same_seeds_give_the_same_numbers_with_one_process_and_with_two() -> None:
    def numbers(processes: int) -> Any:
        found = document(*SMALL[:-1], processes, "--seeds", 2, "--jitter", 0.05)["cells"]
        for policy in found[0]["policies"].values():
            for name in ("plan_p50_ms", "plan_p99_ms"):
                del policy[name]
        return found

    assert numbers(1) == numbers(2)


def test_several_workloads_have_a_table_of_all() -> None:
    given = ("--workload", "tetriserve,num=12", "--workload", "ddit,num=6", "--policies", "edf,ddit", "--seeds", 1)
    text = shown(invoke(*given, "--processes", 1))
    assert "tetriserve,num=12: 12 requests on 8 devices, 1 seed, simulated; at most" in text
    assert re.search(r"^ddit,num=6: 6 requests on 8 devices, 1 seed, simulated *$", text, re.MULTILINE)
    (rows,) = re.findall(r"all 2 cells, simulated; at most .*?\n(.*?)± half", text, re.DOTALL)
    assert [row.split()[0] for row in rows.splitlines() if row.startswith((" edf", " ddit"))] == ["edf", "ddit"]


def file_of(directory: Path) -> tuple[str, ...]:
    """A file of three requests, of which one cannot be on time on one device."""
    asked = {"pipeline": PIPELINE, "height": 128, "width": 128, "steps": 10}
    lines = [WorkloadRequest(arrival_s=at_s, slo_s=slo_s, **asked) for at_s, slo_s in ((0, 1.2), (0, 1.2), (9, None))]
    write_workload(directory / "r.jsonl", lines)
    (directory / "costs.json").write_text(json.dumps(table_json(table())))
    return ("--workload", str(directory / "r.jsonl"), "--cost", str(directory / "costs.json"), "--policies", "edf")


def test_a_file_is_run_once_unless_there_is_jitter(tmp_path: Path, begun: list[Task]) -> None:
    given = (*file_of(tmp_path), "--processes", 1)
    edf = document(*given)["cells"][0]["policies"]["edf"]
    assert (edf["attainment"]["values"], edf["attainment"]["low"], edf["of_bound"]["mean"]) == ([0.5], None, 1.0)
    assert len(begun) == 2
    document(*given, "--jitter", 0.1, "--seeds", 3)
    assert [task.policy for task in begun[2:]] == [None, "edf", "edf", "edf"]


def true_costs(directory: Path, **changes: Any) -> tuple[str, str]:
    (directory / "true.json").write_text(json.dumps(table_json(table(**changes))))
    return ("--true-cost", str(directory / "true.json"))


def test_devices_may_take_other_times_than_those_by_which_is_planned(tmp_path: Path, begun: list[Task]) -> None:
    """Twice as long: of two requests that are due after 1.2 s, none is on time, and the bound says so."""
    given = (*file_of(tmp_path), "--processes", 1, "--out", tmp_path / "out")
    (alike,) = document(*given)["cells"]
    (slower,) = document(*given, *true_costs(tmp_path, encode_s=0.02, step_s=0.2, decode_s=0.1))["cells"]
    assert (alike["true_cost"], slower["true_cost"]) == (str(tmp_path / "costs.json"), str(tmp_path / "true.json"))
    assert (alike["bound"]["mean"], slower["bound"]["mean"]) == (0.5, 0.0)
    assert slower["policies"]["edf"]["attainment"]["values"] == [0.0]
    assert slower["policies"]["edf"]["mean_s"]["mean"] >= 2 * alike["policies"]["edf"]["mean_s"]["mean"]
    assert len(begun) == 4, "other devices are another result"
    assert "Devices take the times of" in shown(invoke(*given, *true_costs(tmp_path, step_s=0.2)))


def test_true_costs_without_a_degree_that_may_be_planned_are_refused(
    tmp_path: Path, mistake: Callable[..., str]
) -> None:
    given = (*file_of(tmp_path), *true_costs(tmp_path))
    (tmp_path / "costs.json").write_text(json.dumps(table_json(table(degrees=(1, 2)))))
    said = mistake(*given)
    assert f"{tmp_path / 'true.json'} has no time for diffuse of 'toy' at degree 2, which" in said
    assert "measure it, or leave it out" in said


# What is kept.


def test_finished_runs_are_not_repeated(tmp_path: Path, begun: list[Task]) -> None:
    given = (*SMALL, "--out", tmp_path / "out")
    first = document(*given, "--seeds", 2)
    assert len(begun) == 2 * 3
    assert document(*given, "--seeds", 2) == first
    assert len(begun) == 6
    more = document(*given[:3], "edf,tetriserve,fixed-sp1", *given[4:], "--seeds", 2)
    assert {task.policy for task in begun[6:]} == {"fixed-sp1"}
    assert {task.seed for task in begun[6:]} == {0, 1}
    assert more["cells"][0]["policies"]["edf"]["attainment"] == first["cells"][0]["policies"]["edf"]["attainment"]
    document(*given, "--seeds", 3)
    assert [(task.seed, task.policy) for task in begun[8:]] == [(2, None), (2, "edf"), (2, "tetriserve")]
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 11
    (tmp_path / "out" / "results.jsonl").write_text("\n".join(lines[:-2]) + "\n" + lines[-1][:50])
    invoke(*given, "--seeds", 3)
    assert [(task.seed, task.policy) for task in begun[11:]] == [(2, "edf"), (2, "tetriserve")]


def test_results_of_another_state_of_the_program_are_reported(tmp_path: Path) -> None:
    given, path = (*SMALL, "--seeds", 1, "--out", tmp_path), tmp_path / "results.jsonl"
    assert "another state" not in invoke(*given).stderr
    path.write_text(re.sub('"code": "[0-9a-f]+"', '"code": "older"', path.read_text(), count=2))
    assert "2 of them were made by another state" in invoke(*given).stderr


def test_an_interruption_keeps_results_and_prints_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Task], mistake: Callable[..., str]
) -> None:
    given = (*SMALL, "--seeds", 2, "--out", tmp_path)
    end = compare_run._RunProgress.end

    def interrupted(course: Any, task: Task) -> None:
        end(course, task)
        if len(begun) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compare_run._RunProgress, "end", interrupted)
        assert mistake(*given) == (
            f"interrupted: 4 of 6 runs are done; they are in {tmp_path / 'results.jsonl'}; to resume, run it again"
        )
    invoke(*given)
    assert len(begun) == 6


def test_a_policy_that_breaks_is_reported_and_the_others_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Idle):
        def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
            raise ZeroDivisionError("by zero")

    monkeypatch.setitem(registry._GIVEN, "broken", Broken)
    result = invoke(*SMALL[:3], "broken,edf", *SMALL[4:], "--seeds", 1, status=1)
    assert re.search(r"^ broken +failed", result.stdout, re.MULTILINE)
    assert re.search(r"^ edf +\d", result.stdout, re.MULTILINE)
    assert "failed: tetriserve,num=12,rpm=30, broken, seed 0: ZeroDivisionError: by zero" in result.stderr


# What it draws.


def colours(path: Path) -> int:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0))


def test_one_workload_is_drawn_by_size_and_latency(tmp_path: Path) -> None:
    invoke(*SMALL, "--seeds", 1, "--plot", tmp_path / "a.png")
    assert colours(tmp_path / "a.png") > 50


def test_workloads_that_differ_in_a_parameter_are_drawn_as_lines(tmp_path: Path) -> None:
    scales = [word for scale in (1.0, 1.2, 1.5) for word in ("--workload", f"tetriserve,num=12,scale={scale}")]
    invoke(*scales, "--policies", "edf,fixed-sp1", "--seeds", 2, "--processes", 1, "--plot", tmp_path / "a.png")
    assert colours(tmp_path / "a.png") > 50


@pytest.mark.parametrize("number", [1, 5])
def test_panels_are_drawn_in_the_colours_of_their_policies(tmp_path: Path, number: int) -> None:
    policies = [f"policy {index}" for index in range(10)]
    lines = {policy: Curve(xs=(1.0, 2.0), ys=(0.4, 0.1 * i), halves=(0.1, 0.0)) for i, policy in enumerate(policies)}
    times = {policy: Curve(xs=(1.0, 50.0, float("inf")), ys=(0.3, 0.9, 1.0)) for policy in policies}
    bound = Curve(xs=(1.0, 2.0), ys=(0.9, 0.95))
    panels = [
        CurvePanel(title="a", x_label="x", y_label="y", curves=lines, bound=bound),
        BarPanel(title="b", y_label="y", groups=("s", "m", "l"), bars=dict.fromkeys(policies, (0.2, 0.9, 1.0))),
        CurvePanel(title="c", x_label="x", y_label="y", curves=times, is_distribution=True),
    ]
    draw_panels(tmp_path / "a.png", (panels * 3)[:number], policies, title="t")
    with Image.open(tmp_path / "a.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for hue in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)):
        assert (np.abs(pixels.astype(int) - hue).max(-1) <= 2).sum() > 20


def test_shares_by_size_are_bars_from_nothing_to_all_in_the_order_of_the_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group for each size, with the same places for policies in each; a mark shows a share of none, too."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _path: drawn.append(figure))
    shares = {"edf": (0.25, 1.0, 0.0), "fixed-sp1": (0.5, 0.75, 0.125), "rssp": (0.0, 0.5, 1.0)}
    panel = BarPanel(title="t", y_label="on time", groups=("s", "m", "l"), bars=shares, is_share=True)
    draw_panels(tmp_path / "a.png", [panel], [*shares], title="t")
    ((axes,),) = [figure.axes for figure in drawn]
    assert axes.get_ylim()[0] == 0
    assert [label.get_text() for label in axes.get_xticklabels()] == ["s", "m", "l"]
    bars = [[(bar.get_x(), bar.get_height()) for bar in container] for container in axes.containers]
    assert [tuple(height for _, height in one) for one in bars] == [*shares.values()]
    assert [tuple(line.get_ydata()) for line in axes.get_lines()] == [*shares.values()]
    in_order = [bars[policy][group][0] for group in range(3) for policy in range(3)]
    assert in_order == sorted(in_order)
    for group, place in enumerate(axes.get_xticks()):
        first, last = bars[0][group][0], bars[2][group][0] + axes.patches[0].get_width()
        assert (first + last) / 2 == pytest.approx(place), "its name is below its middle"


@pytest.mark.parametrize(("num_sizes", "has_bars"), [(1, False), (2, True)])
def test_sizes_are_compared_if_there_are_two(
    num_sizes: int, has_bars: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels: list[Any] = []
    sizes_of = plot._sizes
    monkeypatch.setattr(plot, "draw_panels", lambda _path, given, _policies, title: panels.extend(given))
    monkeypatch.setattr(plot, "_sizes", lambda cell: sizes_of(cell)[:num_sizes])
    invoke(*SMALL, "--seeds", 1, "--plot", tmp_path / "a.png")
    assert any(isinstance(one, BarPanel) for one in panels) == has_bars


def test_drawing_without_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_panels(tmp_path / "a.png", [], [], title="")


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--workload", "tetriserv"],
            "--workload tetriserv: there is no workload 'tetriserv'; did you mean tetriserve",
        ),
        (["--workload", "tetriserve,rpms=1"], "--workload tetriserve,rpms=1: tetriserve: rpms is not a parameter"),
        (["--workload", "none.jsonl"], "--workload none.jsonl: a file of requests does not say what they cost; give"),
        (["--workload", "none.jsonl", "--cost", "flux1_l20"], "none.jsonl: No such file or directory"),
        (["--workload", "ddit", "--cost", "flux1_l20"], "ddit: pipeline 'opensora' is not in flux1_l20; it knows"),
        (["--workload", "ddit", "--cost", "none.json"], "none.json"),
        (["--workload", "grid:x*"], "--workload grid:x*: no cell of the grid is called 'x*'; it has flux8-uniform"),
        (
            ["--devices", "4"],
            "--workload grid: the cells of the grid have their own devices; leave out --cost, --devices",
        ),
        (["--workload", "ddit", "--workload", "ddit"], "--workload ddit: ddit is named twice; leave one out"),
        (
            ["--workload", "ddit", "--policies", "edg"],
            "--policies edg: policy 'edg' does not exist; did you mean 'edf'",
        ),
        (["--workload", "ddit", "--policies", "edf,edf"], "--policies edf,edf: edf is named twice; leave one out"),
        (["--workload", "ddit", "--plot", "a.svg"], "--plot a.svg ends in '.svg'; the chart is a .png"),
        (["--workload", "ddit", "--full", "--seeds", "4"], "--full means 10 seeds; leave out --full or --seeds 4"),
    ],
)
def test_mistakes_name_the_option_the_value_and_the_remedy(
    mistake: Callable[..., str], arguments: list[str], words: str
) -> None:
    assert words in mistake(*arguments)


def test_a_directory_with_something_else_in_it_is_reported(tmp_path: Path, mistake: Callable[..., str]) -> None:
    (tmp_path / "results.jsonl").write_text("hello\n")
    assert "results.jsonl:1: no result of tilework compare" in mistake(*SMALL, "--out", tmp_path)
    assert "Not a directory" in mistake(*SMALL, "--out", tmp_path / "results.jsonl" / "deeper")


def test_the_default_is_the_grid_with_three_seeds_and_ten_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stop(wish: Any, directory: Path | None) -> None:
        asked.append(wish)
        raise output.UserError("enough")

    monkeypatch.setattr("tilework_lab.cli.compare.prepare", stop)
    for arguments in ([], ["--full"], ["--workload", "ddit"], ["--workload", "patchedserve-grid"]):
        CliRunner().invoke(app, ["compare", *arguments])
    assert [(len(wish.cells), wish.num_seeds) for wish in asked] == [(56, 3), (56, 10), (1, 10), (46, 3)]
    with_batches = {cell.name for cell in asked[0].cells if cell.section in ("stages", "mixed")}
    assert len(with_batches) == 6, "the bound knows no batches, which the tables of L20 have"
    assert len(asked[0].tasks()) == 3 * (56 * len(asked[0].policies) + 56 - len(with_batches))
    assert [wish.policies for wish in asked] == [POLICIES, POLICIES, POLICIES, BATCHING]
    assert len(asked[3].tasks()) == 46 * 3 * len(BATCHING), "the bound knows no batches"
    CliRunner().invoke(app, ["compare", "--workload", "patchedserve-grid:sd3x8-*-r3.2", "--workload", "grid:ddit8-r*"])
    assert asked[4].policies == tuple(dict.fromkeys((*BATCHING, *POLICIES)))
