"""Remake the figures of the papers: `python lab/bench/run.py --help`. One case per figure, in `lab/bench/figures/`."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT / "bench"), str(_ROOT / "tests")]  # For the suite, and the optimum of small cases.

from figures.papers import FIGURES, PaperMaker  # noqa: E402
from figures.yardsticks import Yardsticks  # noqa: E402
from suite.application import Cases, application  # noqa: E402

CASES: Cases = {
    **{name: ("A figure of a paper, remade in simulation", PaperMaker(name)) for name in FIGURES},
    "yardsticks": ("The bound on requests on time: how tight it is, and how long it takes, simulated", Yardsticks),
}

app = application(
    CASES,
    "lab/bench/run.py",
    "Remake the figures of the papers in simulation; without CASES all of them, half an hour on two cores. Exit status "
    "1 if a paper says something else.",
    "tetriserve-6 tetriserve-7 --write",
    results=Path(__file__).parent / "results",
)

if __name__ == "__main__":
    app()
