"""Measure in a quarter of an hour on a bare machine with one card: `python bench/gpu/quarter.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.quarter.command import main

if __name__ == "__main__":
    raise SystemExit(main())
