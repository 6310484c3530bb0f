"""One simulation of the traffic on a number of devices, and many of them in several processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tilework.control.controller import ControllerConfig
from tilework.core.request import Request
from tilework.core.time import s_from_ns
from tilework.cost.table import CostTable
from tilework.sim.config import SimConfig
from tilework.sim.plan.interval import Decided, DueBlock, Judge
from tilework.sim.plan.traffic import AS_ASKED, Sample, Size, Traffic, WhatIf, num_samples, sample_of
from tilework.sim.runs import Run
from tilework.sim.simulation import Simulation, without_collections

_MOST_DRAWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question of how many devices keep a share `target` of the traffic's deadlines.

    `tables` are the costs of each hardware, by its name. `sim` has what all simulations have in common; the number of
    devices and the seed are those of each trial. `sample` is how many deadlines one trial judges.
    """

    traffic: Traffic
    tables: Mapping[str, CostTable]
    target: float
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    sim: SimConfig = field(default_factory=lambda: SimConfig(num_devices=1))
    sample: int = 400
    _drawn: dict[object, Sequence[Request]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def sample_of(self, number: int, what_if: WhatIf = AS_ASKED, sizes: Collection[Size] | None = None) -> Sample:
        """Return the sample of this number, from 0: those of one seed, then those of the next."""
        num_due = sum(one.deadline_ns is not None for one in self._requests(0, what_if, sizes))
        seed, place = divmod(number, num_samples(num_due, self.sample))
        return sample_of(self._requests(seed, what_if, sizes), self.sample, place)

    def _requests(self, seed: int, what_if: WhatIf, sizes: Collection[Size] | None) -> Sequence[Request]:
        key = seed, what_if, None if sizes is None else frozenset(sizes)
        if key not in self._drawn:
            if len(self._drawn) >= _MOST_DRAWN:
                self._drawn.clear()
            self._drawn[key] = self.traffic.requests(seed, what_if, sizes)
        return self._drawn[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A sample of the traffic on some devices of one hardware; of these sizes alone, if any are given."""

    hardware: str
    num_devices: int
    sample: int
    what_if: WhatIf = AS_ASKED
    sizes: Collection[Size] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """Deadlines kept in one trial, in blocks. Unless it `is_whole`, the run ended early, and the rest counts as kept.

    `device_s` is the device time that ran up to then, by pipeline, stage and degree, and `run_s` how long that was.
    """

    blocks: tuple[DueBlock, ...]
    is_whole: bool
    device_s: Mapping[tuple[str, str, int], float]
    run_s: float


def tried(question: Question, trial: Trial) -> TrialOutcome:
    """Simulate one trial. Raises what a policy or the simulation raises."""
    sample = question.sample_of(trial.sample, trial.what_if, trial.sizes)
    requests = sample.simulated
    judge = Judge(sample.judged, question.target)
    config = replace(question.sim, num_devices=trial.num_devices, seed=trial.sample)
    simulation = Simulation(question.controller, question.tables[trial.hardware], config)
    with without_collections():
        try:
            simulation.run(requests, observe=judge)
            judge.end()
        except Decided:
            pass
    runs = simulation.cluster.runs
    end_ns = max((run.end_ns for run in runs), default=requests[0].arrival_ns)
    return TrialOutcome(
        blocks=judge.blocks(),
        is_whole=judge.is_whole,
        device_s=_device_s(runs),
        run_s=s_from_ns(end_ns - requests[0].arrival_ns),
    )


def _device_s(runs: Sequence[Run]) -> dict[tuple[str, str, int], float]:
    found: Counter[tuple[str, str, int]] = Counter()
    for run in runs:
        stage = run.work.stage
        degree = len(run.devices)
        found[stage.pipeline, stage.name, degree] += degree * (run.end_ns - run.start_ns)
    return {key: s_from_ns(device_ns) for key, device_ns in sorted(found.items())}


Try = Callable[[Sequence[Trial]], Sequence[TrialOutcome]]
"""Simulates trials; their outcomes are in the same order."""

_asked: list[Question] = []  # In a process of the pool: the one that its trials are of.


@contextmanager
def trials_of(
    question: Question, num_processes: int, on_done: Callable[[Trial, TrialOutcome], None] = lambda trial, outcome: None
) -> Iterator[Try]:
    """Yield a function that simulates trials of a question in this many processes; `on_done` gets each, in order."""
    if num_processes == 1:
        yield lambda trials: [_noted(trial, tried(question, trial), on_done) for trial in trials]
        return
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(num_processes, initializer=_begin, initargs=(question,)) as pool:

        def run(trials: Sequence[Trial]) -> list[TrialOutcome]:
            futures = [(trial, pool.submit(_tried_here, trial)) for trial in trials]
            return [_noted(trial, future.result(), on_done) for trial, future in futures]

        try:
            yield run
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            raise


def _noted(trial: Trial, outcome: TrialOutcome, on_done: Callable[[Trial, TrialOutcome], None]) -> TrialOutcome:
    on_done(trial, outcome)
    return outcome


def _begin(question: Question) -> None:
    """Leave Ctrl-C to the parent process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _asked.append(question)


def _tried_here(trial: Trial) -> TrialOutcome:
    return tried(_asked[0], trial)
