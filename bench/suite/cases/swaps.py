"""Requests for two models in turn on a device that has room for one: what that costs beyond the loads themselves."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from select import select
from statistics import median
from tempfile import TemporaryDirectory

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.cases.weights import save_model
from suite.stats import extremes
from tilework.comm.messages import receive_messages, send_message
from tilework.core.component import LoadSource
from tilework.core.model import ModelSource
from tilework.core.wire.commands import DropWeights, Execute, Forget, LoadWeights, Quit, Site
from tilework.core.wire.reports import Ended, Loaded, WeightsLoaded
from tilework.core.wire.spec import Spec
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.observer import Observer
from tilework.runtime.worker_process import forkserver_context
from tilework.worker.process import serve

_MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Swaps:
    """Two pipelines whose denoisers have `layers` of about 100 MB in float32, one worker, `requests` one by one.

    A round is the requests with room for both, and with room for one, in an order that changes from round to round. Its
    cost is the difference of the median times of a request, over the median time that the worker reports for its loads.

    Then one worker runs `runs` encodes in each round while it has nothing to do, and as many a quarter into a load that
    they do not need, in turns. Their delay is the difference of the medians over the median load.
    """

    layers: int = 3
    requests: int = 20
    steps: int = 1
    side: int = 64
    rounds: int = 9
    most: float = 1.1
    runs: int = 20
    most_delay: float = 0.5

    @classmethod
    def make(cls, quick: bool) -> Swaps:
        return cls(layers=1, requests=6, rounds=1, runs=4) if quick else cls()

    def measure(self, note: Note) -> Finding:
        return asyncio.run(self._measure(note))

    async def _measure(self, note: Note) -> Finding:
        with TemporaryDirectory(prefix="tilework-bench-") as room:
            sizes = [save_model(Path(room) / name, self.layers, seed) for seed, name in enumerate(("one", "other"))]
            sources = tuple(ModelSource(path=f"{room}/{name}", name=name) for name in ("one", "other"))
            async with AsyncExitStack() as stack:
                both = await _started(stack, sources, None)
                one = await _started(stack, sources, int(1.2 * max(sizes)))
                rounds = [await self._round(both, one, note, index) for index in range(self.rounds)]
            delays = self._delays(sources, note)
        ratios = [(alternating_s - resident_s) / loads_s for resident_s, alternating_s, loads_s, _ in rounds]
        rows = tuple(
            (
                str(index + 1),
                *(f"{1000 * seconds:.1f}" for seconds in times[:3]),
                f"{times[3] / _MB:.0f}",
            )
            for index, times in enumerate(rounds)
        )
        return Finding(
            checks=(
                Check(what="cost of alternating, over the bare loads", measured=extremes(ratios), high=self.most),
                Check(
                    what="delay of a run that needs nothing of the load in progress, over the load",
                    measured=extremes([(among_s - alone_s) / load_s for alone_s, among_s, load_s in delays]),
                    high=self.most_delay,
                ),
            ),
            tables=(
                Table(
                    title="Medians per request",
                    columns=("round", "room for both, ms", "room for one, ms", "loads, ms", "loaded in all, MB"),
                    rows=rows,
                ),
                Table(
                    title="Medians per encode that comes a quarter into a load",
                    columns=("round", "without a load, ms", "beside one, ms", "the load, ms"),
                    rows=tuple(
                        (str(index), *(f"{1000 * seconds:.1f}" for seconds in times))
                        for index, times in enumerate(delays, 1)
                    ),
                ),
            ),
            method=(
                f"Two pipelines of {max(sizes) / _MB:,.0f} MB each that share text encoders and VAE, one CPU worker; "
                f"{self.requests} requests of {self.steps} step and {self.side} px, for one and the other in turn, "
                "each after the answer to the one before.",
                "Loads come from the copies that the host keeps. On a CPU a load maps such a copy, copying nothing; "
                "its time includes the drop that makes room for it, which gives the pages back.",
                "The encodes are sent to a worker that has loaded their model while it loads the denoiser of the other "
                "one. A run that waited for the whole load would be late by three quarters of it.",
            ),
        )

    def _delays(self, sources: Sequence[ModelSource], note: Note) -> list[tuple[float, float, float]]:
        """In each round: seconds of an encode alone, of one a quarter into a load, and of the load."""
        found = list[tuple[float, float, float]]()
        with TemporaryDirectory(prefix="tilework-bench-", dir="/dev/shm") as blobs, _worker(sources, blobs) as worker:
            whole_s = worker.load_all()
            for index in range(self.rounds):
                alone_s, among_s, loads_s = list[float](), list[float](), list[float]()
                for _ in range(self.runs):
                    worker.encode_s(self.side)  # What the last one has dropped is gone then.
                    alone_s.append(worker.encode_s(self.side))
                    if (among := worker.encode_into_load_s(self.side, whole_s / 4)) is not None:
                        among_s.append(among[0])
                        loads_s.append(among[1])
                if not loads_s:
                    raise CaseFailed("each load had ended when its run came; measure with more layers")
                whole_s = median(loads_s)
                found.append((median(alone_s), median(among_s), whole_s))
                note(f"round {index + 1}: encodes {found[-1][0]:.4f} s, {found[-1][1]:.4f} s, loads {whole_s:.4f} s")
        return found

    async def _round(self, both: Served, one: Served, note: Note, index: int) -> tuple[float, float, float, float]:
        """Seconds of a request with room for both, with room for one, of its loads; and the bytes that were loaded."""
        order = (both, one) if index % 2 else (one, both)
        times = {id(served): await self._alternate(served) for served in order}
        resident_s, nothing_s, _ = times[id(both)]
        if nothing_s:
            raise CaseFailed("something was loaded although all was there")
        alternating_s, loads_s, num_bytes = times[id(one)]
        note(f"round {index + 1}: {resident_s:.4f} s, {alternating_s:.4f} s, loads {loads_s:.4f} s")
        return resident_s, alternating_s, loads_s, num_bytes

    async def _alternate(self, served: Served) -> tuple[float, float, float]:
        """The median seconds of a request and of the loads before one, and the bytes of all loads."""
        loads = served.loads = Loads()
        served.engine.observe(loads)
        times_s, loads_s = list[float](), list[float]()
        for index in range(self.requests):
            spec = Spec(
                prompt="a red circle",
                height=self.side,
                width=self.side,
                steps=self.steps,
                guidance_scale=4.0,
                seed=index,
            )
            served.count += 1
            start_s, loaded_s = time.perf_counter(), loads.seconds
            answer = served.engine.submit({str(served.count): spec}, model=("one", "other")[index % 2])
            if not isinstance(answer, tuple):
                raise CaseFailed(answer.reason)
            outcome = await answer[0].outcome
            if outcome.image is None:
                raise CaseFailed(outcome.reason)
            times_s.append(time.perf_counter() - start_s)
            loads_s.append(loads.seconds - loaded_s)
        return median(times_s), median(loads_s), loads.num_bytes


class Worker:
    """A worker process of two models, at the other end of `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._answers = connection, receive_messages(connection)
        self._count = 0
        loaded = next(self._answers)
        if not isinstance(loaded, Loaded):
            raise CaseFailed(str(loaded))
        self._one, other = loaded.models
        self._denoiser = (other.components["transformer"].digest,)

    def load_all(self) -> float:
        """Load the first model, and the denoiser of the other one once; returns the seconds of that."""
        self._load(tuple(component.digest for component in self._one.components.values()))
        self._loaded_s()
        self._load(self._denoiser)
        return self._drop()

    def encode_s(self, side: int) -> float:
        """Seconds until an encode of the first model is answered."""
        start_s = time.perf_counter()
        self._encode(side)
        next(self._answers)
        return time.perf_counter() - start_s

    def encode_into_load_s(self, side: int, after_s: float) -> tuple[float, float] | None:
        """The same so long after the load of the other denoiser has begun, and the seconds of that load.

        None if that had ended by then.
        """
        self._load(self._denoiser)
        time.sleep(after_s)
        if select([self._connection], [], [], 0)[0]:
            self._drop()
            return None
        start_s = time.perf_counter()
        self._encode(side)
        answers = [(next(self._answers), time.perf_counter() - start_s) for _ in range(2)]
        send_message(self._connection, DropWeights(self._denoiser))
        seconds = next(at_s for answer, at_s in answers if isinstance(answer, Ended))
        (load,) = (answer for answer, _ in answers if isinstance(answer, WeightsLoaded))
        return seconds, load.run_ns / 1e9

    def _encode(self, side: int) -> None:
        self._count += 1
        spec = Spec(
            prompt="a red circle",
            height=side,
            width=side,
            steps=1,
            guidance_scale=4.0,
            seed=self._count,
        )
        name, stage = self._one.info.name, self._one.info.graph.stages[0].name
        send_message(
            self._connection, Execute(self._count, name, stage, ((self._count, 0),), specs={self._count: spec})
        )
        send_message(self._connection, Forget(self._count))

    def _load(self, digests: tuple[str, ...]) -> None:
        send_message(self._connection, LoadWeights(0, digests))

    def _loaded_s(self) -> float:
        if not isinstance(loaded := next(self._answers), WeightsLoaded):
            raise CaseFailed(f"the answer to a load is {loaded}")
        return loaded.run_ns / 1e9

    def _drop(self) -> float:
        """Drop the other denoiser once it is there; returns the seconds of its load."""
        seconds = self._loaded_s()
        send_message(self._connection, DropWeights(self._denoiser))
        return seconds


@contextmanager
def _worker(sources: Sequence[ModelSource], blobs: str) -> Iterator[Worker]:
    context = forkserver_context()
    ours, theirs = socket.socketpair()
    process = context.Process(
        target=serve, args=(theirs, tuple(sources), Site(device_id=0, blobs=blobs, loads_on_demand=True))
    )
    process.start()
    theirs.close()
    try:
        yield Worker(ours)
    finally:
        send_message(ours, Quit())
        process.join()
        ours.close()


class Loads(Observer):
    """The time and the bytes of loads."""

    def __init__(self) -> None:
        self.seconds, self.num_bytes = 0.0, 0

    def on_weights_loaded(self, device_id: int, source: LoadSource, num_bytes: int, run_ns: int) -> None:
        self.seconds += run_ns / 1e9
        self.num_bytes += num_bytes


@dataclass(slots=True)
class Served:
    engine: Engine
    loads: Loads
    count: int = 0


async def _started(stack: AsyncExitStack, sources: Sequence[ModelSource], weights_bytes: int | None) -> Served:
    executor = LocalExecutor(LocalConfig(num_workers=1, sources=tuple(sources), weights_bytes=weights_bytes))
    engine = await EngineStart(EngineConfig(exact=True), executor).start()
    stack.push_async_callback(engine.stop)
    return Served(engine, Loads())
