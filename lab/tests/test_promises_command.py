"""`tilework compare --promises`: what it prints and draws, what it keeps, and mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from comparing import document, invoke
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from tilework.cli import console as output
from tilework.cli.app import app
from tilework.report.panels import Pair, PairPanel, draw_pairs
from tilework_lab.cli.plot import PARTS, pair_of
from tilework_lab.compare.promises import PromiseCounts
from tilework_lab.compare.runs import Task

pytestmark = pytest.mark.usefixtures("wide_output")

ONE = "promises,num=24,steps=4,last=2,rate=5"
GIVEN = ("--workload", ONE, "--policies", "edf,tilework", "--seeds", 2, "--processes", 1, "--promises", 0.5)


def test_tables_and_document_have_the_same_figures() -> None:
    found = document(*GIVEN)
    assert (found["promises"], found["simulated"]) == (0.5, True)
    (cell,) = found["cells"]
    assert (cell["name"], cell["requests"], cell["seeds"]) == (ONE, 24, 2)
    text = re.sub(" +", " ", invoke(*GIVEN).stdout)
    assert f"{ONE}: 24 requests on 8 devices, 2 seeds, simulated" in text
    for policy in ("edf", "tilework"):
        of = cell["policies"][policy]
        assert of["accepted"] == of["kept"] + of["broken"]
        assert of["on_time"] == of["kept"] + of["others_on_time"]
        assert of["asked"] + of["others"] == of["with_deadline"]
        assert of["of_best_effort"] == of["on_time"] / of["best_effort_on_time"]
        shares = (
            (of["best_effort_on_time"], of["with_deadline"]),
            (of["on_time"], of["with_deadline"]),
            (of["on_time"], of["best_effort_on_time"]),
            (of["others_on_time"], of["others"]),
        )
        outcome = " ".join(f"{100 * part / whole:.1f}" for part, whole in shares)
        fitting = f"{100 * of['accepted_of_these'] / of['asked_and_best_effort_on_time']:.1f}"
        assert f" {policy} {outcome} {of['asked']} {of['accepted']} {fitting} {of['kept']} {of['broken']} " in text
    assert "all 1 cells" not in text
    assert "50% of those with a deadline" in text


def test_several_cells_have_a_table_of_all_and_the_worst() -> None:
    given = ("--workload", ONE, "--workload", f"{ONE},mix=skewed", *GIVEN[2:5], 1, *GIVEN[6:])
    found = document(*given)
    text = re.sub(" +", " ", invoke(*given).stdout)
    assert "all 2 cells, simulated" in text
    (edf, _), cells = found["overall"], [cell["policies"]["edf"] for cell in found["cells"]]
    assert edf["on_time"] == sum(cell["on_time"] for cell in cells)
    assert edf["worst"] == min(cell["of_best_effort"] for cell in cells)
    assert f"edf: at worst {100 * edf['worst']:.1f}% of best effort, in {edf['worst_in']}" in text


def test_in_a_narrow_terminal_the_table_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 80)
    text = invoke(*GIVEN).stdout
    assert sum(line.startswith(" edf") for line in text.splitlines()) == 2
    assert "…" not in text


def test_the_runs_of_best_effort_serve_every_share(tmp_path: Path, begun: list[Task]) -> None:
    first = document(*GIVEN, "--out", tmp_path)
    assert len(begun) == 2 * 2 * 2
    assert document(*GIVEN, "--out", tmp_path) == first
    assert len(begun) == 8
    document(*GIVEN[:-1], 1.0, "--out", tmp_path)
    assert {task.promises for task in begun[8:]} == {1.0}
    document(*GIVEN[:-2], "--out", tmp_path)
    assert {task.promises for task in begun[12:]} == {None}, "a comparison without promises is another"


def test_bars_are_parts_of_all_requests_with_a_deadline() -> None:
    """Of 20: 8 ask, of which 5 are accepted, 1 broken, and 2 of the refused are on time as best effort."""
    counts = PromiseCounts(
        num_due=20,
        before=15,
        after=13,
        asked=8,
        accepted=5,
        fitting=6,
        fitting_accepted=4,
        kept=4,
        others=12,
        others_before=9,
        others_after=9,
    )
    pair = pair_of("edf", counts)
    assert pair.before == (6 / 20, 9 / 20, 0, 0, 0, 5 / 20)
    assert pair.after == (4 / 20, 9 / 20, 1 / 20, 2 / 20, 1 / 20, 3 / 20)
    assert sum(pair.after) == pytest.approx(1)


def test_each_part_is_drawn_in_its_colour(tmp_path: Path) -> None:
    shares = (0.3, 0.3, 0.1, 0.1, 0.1, 0.1)
    panels = [PairPanel(title=str(n), pairs=(Pair(label="a", before=shares, after=shares),) * n) for n in (1, 2, 3, 4)]
    draw_pairs(tmp_path / "a.png", panels, PARTS, num_good=2, title="t", foot="f")
    with Image.open(tmp_path / "a.png") as picture:
        colours = {pixel for _, pixel in picture.convert("RGB").getcolors(1 << 24) or ()}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in PARTS.values()} <= colours
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_pairs(tmp_path / "a.png", [], PARTS, num_good=2, title="t", foot="f")


def test_the_parts_of_a_bar_follow_each_other_and_the_good_ones_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _path: drawn.append(figure))
    pair = Pair(label="a", before=(0.25, 0.5, 0.25), after=(0.125, 0.5, 0.375))
    parts = dict(list(PARTS.items())[:3])
    draw_pairs(tmp_path / "a.png", [PairPanel(title="p", pairs=(pair,))], parts, num_good=2, title="t", foot="f")
    ((axes,),) = [figure.axes for figure in drawn]
    bars = [(bar.get_x(), bar.get_width()) for container in axes.containers for bar in container]
    assert bars == [(0, 0.25), (0.25, 0.5), (0.75, 0.25), (0, 0.125), (0.125, 0.5), (0.625, 0.375)]
    assert [text.get_text() for text in axes.texts] == ["a", "75.0", "62.5"]


def test_the_command_draws_a_picture(tmp_path: Path) -> None:
    invoke(*GIVEN, "--plot", tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize("share", ["0", "1.5", "-1"])
def test_a_wrong_share_is_named(share: str) -> None:
    result = CliRunner().invoke(app, ["compare", "--promises", share])
    assert f"--promises {share} is no share; give a number above 0 and at most 1" in str(result.exception)
