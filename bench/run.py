"""Measure speed and memory: `python bench/run.py --help`. The suite itself is in `bench/suite/`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # For the models of `tests/zoo`.

from suite.app import app

if __name__ == "__main__":  # Some cases start processes, which import this file.
    app()
