"""Measure speed and memory: `python bench/run.py --help`. The suite itself is in `bench/suite/`."""

from suite.app import app

app()
