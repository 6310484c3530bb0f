"""Which requests a policy puts into one forward pass, by costs that were measured as a server measures them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from suite.case import Note
from suite.denoisers import begin
from suite.stages import DIFFUSE
from suite.stats import median
from tilework.admission.contract import EtaPrediction
from tilework.control.cluster.job import Job
from tilework.core.block import Demand
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import Stage
from tilework.core.request import Request, Shape
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.pipelines.families.latent_state import LatentState
from tilework.pipelines.staged import StagedPipeline
from tilework.policy.lookahead.batch import LEAST_SAVED, Batch, BatchMember
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.request_costs import RequestCosts
from tilework.runtime.models.costs import random_batches
from tilework.worker.calibrate import calibrate


@dataclass(frozen=True, slots=True)
class BatchChooser:
    """Puts requests together that save LEAST_SAVED of a step, as the lookahead policy does with one device."""

    family: StagedPipeline
    costs: TableCosts

    @staticmethod
    def measured(
        family: StagedPipeline, shapes: Sequence[Shape], combinations: int, passes: int, note: Note
    ) -> BatchChooser:
        """With what `tilework profile --mixed` would measure, in this process.

        A batch costs the median of all `passes`, in each of which it runs once, warm: the machine may be slower for
        minutes, and batches that were measured then would seem to be dearer than others. What the table does not tell,
        steps without guidance, is measured alone, as a server learns it from the first that come.
        """
        alike = [(shape,) * number for number in (1, 2, 4) for shape in shapes]
        batches = [*alike, *random_batches(shapes, combinations)]
        measured = []
        for index in range(passes):
            note(f"{family.info.name}: costs of {len(batches)} batches, pass {index + 1} of {passes}")
            measured.append(calibrate(family, batches, num_runs=1))
        rows = tuple(
            replace(of_all[0], seconds=median([row.seconds for row in of_all]), p99_seconds=None, num_runs=passes)
            for of_all in zip(*measured, strict=True)
        )
        chooser = BatchChooser(family, TableCosts(CostTable(hardware="", rows=rows)))
        for shape in shapes if family.info.two_passes else ():
            chooser._learn_unguided(begin(family, shape.height, shape.width, 1.0, 0), passes)
        return chooser

    def _learn_unguided(self, state: LatentState, runs: int) -> None:
        self.family.predict([state])
        step = latent_diffusion(self.family.info.name).stage(DIFFUSE)
        for _ in range(runs):
            start_ns = time.perf_counter_ns()
            self.family.predict([state])
            self.costs.observe(step, [self._request(0, state)], 1, 1, time.perf_counter_ns() - start_ns)

    def chosen(self, states: Sequence[LatentState]) -> list[LatentState]:
        """The requests that share with the first one, in their order; empty unless there are two."""
        members = [self._member(index, state) for index, state in enumerate(states)]
        sharing = [member for member in members if member.forecast.shares]
        if not sharing:
            return []
        batch = Batch((sharing[0],), 0.0, self._step_ns)
        for member in sharing[1:]:
            if batch.saved(member) >= LEAST_SAVED:
                batch = batch.with_(member)
        return [states[member.job.job_id] for member in batch.members] if len(batch.members) > 1 else []

    def _step_ns(self, stage: Stage, requests: Sequence[Request]) -> float:
        return self.costs.work_ns(stage, requests, 1)

    def _request(self, index: int, state: LatentState) -> Request:
        spec, info = state.spec, self.family.info
        return Request(
            uid=str(index),
            pipeline=info.name,
            shape=spec.shape,
            steps=spec.steps,
            arrival_ns=0,
            guided=spec.guidance_scale > 1 or not info.two_passes,
        )

    def _member(self, index: int, state: LatentState) -> BatchMember:
        request = self._request(index, state)
        job = Job(
            job_id=index,
            request=request,
            urgency_ns=0,
            eta_prediction=EtaPrediction(0, 0, 0, 0, 0),
            demand=Demand(1, 0),
            done=self.costs.start(request),
        )
        known = RequestCosts().of(request, job.left, 1, self.costs)
        forecast = JobForecast(
            job_id=index,
            claim=Claim.BEST_EFFORT,
            order_key=0.0,
            speeds=known.speeds,
            usual=known.usual,
            num_steps=float(request.steps),
            head_ns=float(known.heads_ns[0]),
            tail_ns=float(known.last_ns),
            shares=known.shares,
        )
        return BatchMember(job, forecast, forecast.head_ns, request.steps, forecast.tail_ns)
