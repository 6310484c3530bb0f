"""Owns the command line: parsing, progress bars, tables. Every command is a thin call into another package."""

import os
import signal
import sys

from tilework.ownership.own import ONLY_OURS

_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


def start() -> None:
    """Run `tilework` as a process of its own.

    A server heeds signals by its own rules (`server.main.Signals`), and its imports take seconds. Until then SIGTERM
    and SIGINT end the process without a traceback, and SIGHUP has nothing to read again. When it has ended, but for
    what the interpreter takes apart, they do nothing.
    """
    if sys.argv[1:2] in (["serve"], ["agent"]):
        os.umask(ONLY_OURS)  # Prompts, results and states are for no other user to read.
    if sys.argv[1:2] != ["serve"]:
        main()
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # As `nohup` has it.
            signal.signal(number, _end)
    try:
        main()
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Run `tilework`; a user's mistake ends with one line on stderr and exit status 2."""
    from tilework.cli.app import run

    run()


def _end(number: int, _frame: object) -> None:
    if number != signal.SIGHUP:
        raise SystemExit(0 if number == signal.SIGTERM else 128 + number)
