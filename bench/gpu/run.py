"""Measure on a GPU: `python bench/gpu/run.py --help`. `bench/suite/gpu/parts.py` has the cases."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.application import application
from suite.gpu.parts import PARTS

app = application(
    {part.name: (part.answers, part) for part in PARTS},
    "bench/gpu/run.py",
    "Measure on GPUs, with models of real size and random weights. Without a GPU the cases run small, as a "
    "rehearsal. Exit status 1 if a goal is missed.",
    "sdxl mixed --write",
)

if __name__ == "__main__":  # Some cases start processes, which import this file.
    app()
