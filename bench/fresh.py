"""Run the commands of the README on a machine that has nothing else: `python bench/fresh.py --help`."""

from suite.fresh import app

if __name__ == "__main__":
    app()
