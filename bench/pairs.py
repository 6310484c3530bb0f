"""Start servers over all pairs of options: `python bench/pairs.py --help`; see `bench/suite/pairs/`."""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("tests", "."))  # For models and costs of tests.

from suite.application import application
from suite.pairs.case import Pairs

app = application(
    {"pairs": ("All pairs of options of tilework serve: refused with a sentence, or served", Pairs)},
    "bench/pairs.py",
    "Start servers over all pairs of options of `tilework serve`.",
    "--write",
)

if __name__ == "__main__":
    app()
