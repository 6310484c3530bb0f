"""Do two revisions of Tilework decide alike? `python bench/decisions.py --help`; see `bench/suite/decisions/`."""

from suite.decisions.app import app

if __name__ == "__main__":
    app()
