"""Compare two checkouts: `python bench/ab.py --help`."""

from suite.ab import app

if __name__ == "__main__":
    app()
