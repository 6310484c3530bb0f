"""Owns the command line: parsing, progress bars, tables. Every command is a thin call into another package."""

import signal
import sys


def main() -> None:
    """Run `tilework`; a user's mistake ends with one line on stderr and exit status 2.

    A server heeds signals by its own rules, and its imports take seconds: they wait until it says so.
    """
    if sys.argv[1:2] == ["serve"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGTERM, signal.SIGINT))
    from tilework.cli.app import run

    run()
