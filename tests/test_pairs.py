"""Servers over all pairs of options (`bench/pairs.py`): a tenth of the starts at a time, and how the bench makes and
judges them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from suite.pairs.case import Start, starts_of
from suite.pairs.covering import NoSuchRow, Place, all_pairs, covering_rows, pairs_of
from suite.pairs.files import write_files
from suite.pairs.samples import ABSENT, LEFT_OUT, MODELS, SIMULATED, Refused, Space
from suite.pairs.served import Outcome, start

from tilework.cli.app import app

SPACES = {space.name: space for space in (SIMULATED, MODELS)}
STARTS = {f"{space.name}, {index}": one for space in SPACES.values() for index, one in enumerate(starts_of(space))}


def test_each_option_has_values_or_a_reason_for_none() -> None:
    """A new option needs values in `bench/suite/pairs/samples.py`, or a reason there for none."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for space in SPACES.values() for option in space.values}
    assert known | LEFT_OUT.keys() == {one.name for one in serve.params} - {"help"}
    assert not known & LEFT_OUT.keys()


@pytest.mark.parametrize("name", SPACES)
def test_each_pair_of_values_is_in_a_start_or_refused(name: str) -> None:
    space = SPACES[name]
    rows = [one.row for one in STARTS.values() if one.space is space and one.refused is None]
    assert all(row.keys() == space.values.keys() for row in rows)
    covered = set[frozenset[Place]]().union(*map(pairs_of, rows))
    assert not covered & space.excluded
    assert covered | space.excluded >= all_pairs(space.factors)


def test_rows_are_few_and_the_same_for_the_same_seed() -> None:
    factors = dict.fromkeys("abcdefghij", (0, 1, 2))
    rows = covering_rows(factors, (), seed=1)
    assert rows == covering_rows(factors, (), seed=1)
    assert rows != covering_rows(factors, (), seed=2)
    assert len(rows) < 25, "of 59,049, and nine at least"


def test_a_pair_that_no_row_can_have_is_named() -> None:
    without = [frozenset({("a", 1), ("b", level)}) for level in (0, 1)]
    with pytest.raises(NoSuchRow, match="no row has a 1 and c 0"):
        covering_rows({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, without, seed=1)


class TestFaults:
    SPACE = Space(
        name="any",
        base=(),
        values={"exact": (("--exact",),), "max_batch": (("--max-batch", "4"),)},
        needed=frozenset(),
        refused=(),
    )

    def faults(self, outcome: Outcome, words: str = "") -> str:
        refused = Refused(places=frozenset({("exact", 1), ("max_batch", ABSENT)}), words=words) if words else None
        return "; ".join(Start(space=self.SPACE, row={"exact": 1}, refused=refused).faults(outcome))

    def test_what_is_to_be_served_is_not_refused(self) -> None:
        assert not self.faults(Outcome(answers={"image": "200"}))
        assert self.faults(Outcome(sentence="no")) == "refused: no"
        assert self.faults(Outcome(faults=("image: 500",))) == "image: 500"

    def test_what_is_to_be_refused_is_so_by_its_own_sentence_which_names_it(self) -> None:
        assert not self.faults(Outcome(sentence="error: --exact is alone"), "is alone")
        assert "served, in place of" in self.faults(Outcome(answers={"image": "200"}), "is alone")
        assert "another sentence" in self.faults(Outcome(sentence="--exact is too many"), "is alone")
        assert "does not name exact" in self.faults(Outcome(sentence="it is alone"), "is alone")


def test_what_a_start_leaves_behind_is_found(tmp_path: Path) -> None:
    """A command that ends with a traceback, a process and a file."""
    files = tmp_path / "files"
    files.mkdir()
    (tmp_path / "server.py").write_text(
        "import pathlib, signal, subprocess, sys, tempfile\n"
        "pathlib.Path(tempfile.gettempdir(), 'forgotten').touch()\n"
        "left = [sys.executable, '-c', 'import signal; print(flush=True); signal.pause()']\n"
        "subprocess.Popen(left, stdout=subprocess.PIPE).stdout.readline()\n"
        "raise RuntimeError('damaged')\n"
    )
    found = " | ".join(start((), files, tmp_path, command=(sys.executable, str(tmp_path / "server.py"))).faults)
    assert "exit code 1" in found
    assert "RuntimeError: damaged" in found
    assert "left behind: process" in found
    assert "left behind: tmp/forgotten" in found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "files"
    write_files(folder)
    return folder


def test_a_sentence_names_the_files_of_the_bench_as_the_arguments_do(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import sys; sys.exit(f'error: {sys.argv[1:3]} exclude each other')")
    command = (sys.executable, str(tmp_path / "server.py"))
    found = start(("{files}/a.toml", "{own}/b"), tmp_path / "files", tmp_path, command=command).sentence
    assert found == "error: ['{files}/a.toml', '{own}/b'] exclude each other"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [one for one in STARTS if one.startswith(SIMULATED.name)])
def test_a_server_with_any_two_options_serves_everything_or_says_why_not(files: Path, name: str) -> None:
    one = STARTS[name]
    assert not one.faults(start(one.arguments, files, files.parent)), " ".join(one.arguments)
