"""Twenty minutes of mixed traffic while workers are killed: does memory grow, and how many requests are late."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from suite.case import CaseFailed, Check, Finding, Note, Picture, Table
from suite.server import serving
from suite.stats import Interval, exact, slope
from suite.traffic import Seen, Traffic
from tilework.report.palette import BAD, GOOD, HUES, NEUTRAL
from tilework.server.garbage import rare_collections

_NOTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """`minutes` of Poisson arrivals at `rate_per_s`, of all kinds (`suite.traffic`), at a server of `workers` workers.

    One of them is killed every `kill_s` on average. Pictures are kept for `result_ttl_s` and records for twice as long,
    so that as many are forgotten as come after the warm-up, a share `warm_up` of the time.
    """

    minutes: float = 20.0
    workers: int = 2
    rate_per_s: float = 2.0
    kill_s: float = 15.0
    sample_s: float = 5.0
    window_s: float = 60.0
    warm_up: float = 0.25
    result_ttl_s: float = 60.0
    seed: int = 1

    @classmethod
    def make(cls, quick: bool) -> Soak:
        return cls(minutes=1.0, sample_s=1.0, window_s=15.0, result_ttl_s=5.0) if quick else cls()

    def measure(self, note: Note) -> Finding:
        with serving(self.workers, settings={"result_ttl_s": self.result_ttl_s}) as server, rare_collections():
            seen, totals = asyncio.run(self._measure(server.url, server.pid, note))
        return self._finding(seen, totals)

    async def _measure(self, url: str, pid: int, note: Note) -> tuple[Seen, dict[str, float]]:
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(120)) as http:
            traffic = Traffic(http, pid, self.seed)
            beside = [traffic.kill(self.kill_s), traffic.sample(self.sample_s), _tell(traffic, note)]
            tasks = [asyncio.create_task(one) for one in beside]
            await traffic.arrive(self.rate_per_s, 60 * self.minutes)
            for task in tasks:
                if task.done():
                    task.result()
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await asyncio.sleep(1)  # What was cancelled last may still run.
            return traffic.seen, await traffic.metrics()

    def _finding(self, seen: Seen, totals: dict[str, float]) -> Finding:
        if len(seen.memory) < 16 or not seen.deadlines:
            raise CaseFailed("there was too little time for any figure")
        warm = [sample for sample in seen.memory if sample[0] >= self.warm_up * 60 * self.minutes]
        minutes = [sample[0] / 60 for sample in warm]
        server, worker = (slope(minutes, [sample[column] for sample in warm]) for column in (1, 2))
        left = sum(value for name, value in totals.items() if name.startswith(("tilework_jobs", "tilework_blob")))
        return Finding(
            checks=(
                Check(what="calls without the answer that they should have", measured=exact(len(seen.wrong)), high=0),
                Check(what="open requests and bytes of their states at the end", measured=exact(left), high=0),
                Check(what="server: growth beyond doubt", measured=_beyond_doubt(server), high=0, unit="MB/min"),
                Check(what="worker: growth beyond doubt", measured=_beyond_doubt(worker), high=0, unit="MB/min"),
            ),
            method=self._method(),
            tables=(_answers(seen), _memory(warm, server, worker)),
            facts={
                "deadlines kept": f"{sum(kept for _, kept in seen.deadlines)} of {len(seen.deadlines)}",
                "workers killed": len(seen.kills),
                "workers lost, by the server": round(_total(totals, "tilework_device_losses_total")),
                "works found stuck": round(_total(totals, "tilework_stuck_works_total")),
                "promises broken": round(totals.get('tilework_promises_total{result="broken"}', 0)),
                **({"wrong": "; ".join(seen.wrong[:5])} if seen.wrong else {}),
            },
            pictures=(Picture(name="course", png=_course(seen, self.window_s)),),
        )

    def _method(self) -> tuple[str, ...]:
        return (
            f"`tilework serve shapes --workers {self.workers}` over HTTP, client on the same cores: plain calls, calls "
            "with deadlines and with promises, some that are cancelled within half a second, and streams; three sizes, "
            "three numbers of steps. Pictures are compared with the first of the same request.",
            "A call may be refused while no worker is up, and if it asks for a promise; all others have to get their "
            "picture, whatever is killed.",
            "Memory is what `/metrics` says (`tilework_resident_bytes`): that of the server, and that of a "
            f"worker, the mean of those that are up. After {self.warm_up:.0%} of the time a line is fitted "
            "to the means of 20 blocks of samples; growth is beyond doubt as far as the whole interval is above zero.",
            "Attainment: of the accepted calls with a deadline that were sent within a window, the share that was on "
            "time. No deadline is relaxed for a kill.",
        )


async def _tell(traffic: Traffic, note: Note) -> None:
    while True:
        await asyncio.sleep(_NOTE_S)
        seen = traffic.seen
        note(f"{sum(seen.answers.values())} calls answered, {len(seen.wrong)} wrong, {len(seen.kills)} workers killed")


def _beyond_doubt(growth: Interval) -> Interval:
    """How much of a slope is certain to be growth."""
    low, high = max(0.0, growth.low), max(0.0, growth.high)
    return Interval(value=low, low=low, high=high, kind="end of the slope's interval, or 0", count=growth.count)


def _total(totals: dict[str, float], name: str) -> float:
    return sum(value for key, value in totals.items() if key.partition("{")[0] == name)


def _answers(seen: Seen) -> Table:
    rows = [(kind, str(count)) for kind, count in sorted(seen.answers.items())]
    return Table(title="Calls answered", columns=("kind", "count"), rows=tuple(rows))


def _memory(warm: Sequence[tuple[float, float, float]], *slopes: Interval) -> Table:
    rows = []
    for column, (name, growth) in enumerate(zip(("server", "worker"), slopes, strict=True), start=1):
        values = [sample[column] for sample in warm]
        interval = f"{growth.low:+.3f} to {growth.high:+.3f}"
        rows.append((name, f"{min(values):.1f}", f"{max(values):.1f}", f"{growth.value:+.3f}", interval))
    columns = ("process", "least, MB", "most, MB", "slope, MB/min", growth.kind)
    return Table(title="Memory after the warm-up", columns=columns, rows=tuple(rows))


def _course(seen: Seen, window_s: float) -> bytes:
    """Attainment by window and memory over time, with a tick for every kill."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    windows = sorted({int(sent_s // window_s) for sent_s, _ in seen.deadlines})
    kept = [[kept for sent_s, kept in seen.deadlines if int(sent_s // window_s) == window] for window in windows]
    middles = [(window + 0.5) * window_s / 60 for window in windows]
    above.plot(middles, [sum(some) / len(some) for some in kept], "o-", color=GOOD, markersize=4)
    kills = [at_s / 60 for at_s in seen.kills]
    above.plot(kills, [0.02] * len(kills), "|", color=BAD, markersize=8)
    above.set(ylim=(0, 1.03), ylabel="deadlines kept")
    above.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    above.set_title(f"Deadlines kept, by {window_s:g} s; a tick per killed worker", loc="left", fontweight="bold")
    times = [at_s / 60 for at_s, _, _ in seen.memory]
    for column, (name, colour) in enumerate((("server", HUES[-1]), ("a worker", NEUTRAL)), start=1):
        below.plot(times, [sample[column] for sample in seen.memory], color=colour, label=name)
    below.set(xlabel="minutes", ylabel="MB resident", ylim=(0, None))
    below.set_title("Memory", loc="left", fontweight="bold")
    below.legend(loc="lower right", frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E3E3E3")
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return buffer.getvalue()
