"""Owns the command line: parsing, progress bars, tables. Every command is a thin call into another package."""


def main() -> None:
    """Run `tilework`; a user's mistake ends with one line on stderr and exit status 2."""
    from tilework.cli.app import run

    run()
