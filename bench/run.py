"""Measure speed and memory: `python bench/run.py --help`. The suite itself is in `bench/suite/`."""

from suite.app import app

if __name__ == "__main__":  # Some cases start processes, which import this file.
    app()
