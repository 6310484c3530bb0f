"""How long a server takes to be ready."""

from __future__ import annotations

from dataclasses import dataclass

from suite.case import Check, Finding, Note
from suite.server import serving
from suite.stats import extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """`starts` times a server with `workers` workers, one after the other."""

    workers: int = 2
    starts: int = 5

    @classmethod
    def make(cls, quick: bool) -> Ready:
        return cls(starts=1) if quick else cls()

    def measure(self, note: Note) -> Finding:
        seconds = []
        for index in range(self.starts):
            with serving(self.workers) as server:
                seconds.append(server.ready_s)
            note(f"start {index + 1} of {self.starts}: {seconds[-1]:.1f} s")
        measured = extremes(seconds)
        return Finding(
            checks=(Check(what=f"start to ready, {self.workers} workers", measured=measured, high=15, unit="s"),),
            method=(
                "From before `python -m tilework serve` is started to the first 200 of /ready: interpreter and "
                "libraries, forkserver, workers, model, calibration, HTTP.",
                "Files are in the page cache after the first start; the largest number is usually that one.",
            ),
            facts={"each start": ", ".join(f"{second:.2f} s" for second in seconds)},
        )
