"""Passes the progress and results of works to tickets, the checkpoint keeper and the observer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tilework.control.controller import Controller
from tilework.control.driver.result import WorkResult
from tilework.core.actions import LoadComponents
from tilework.core.cache import CacheUse
from tilework.core.checkpoint import CheckpointKeeper
from tilework.core.request import Request
from tilework.core.time import ns_from_s
from tilework.core.wire.blobs import SavedState
from tilework.core.wire.reports import Ended, Preview
from tilework.core.work import Work
from tilework.runtime.models.costs import MEASURE_AGAIN
from tilework.runtime.observer import EndedWork, Observer
from tilework.runtime.request_table import RequestTable
from tilework.runtime.ticket import TicketPreview, WorkSegment

_log = logging.getLogger(__name__)
_TELL_EVERY_NS = ns_from_s(3600)


@dataclass(frozen=True, slots=True)
class _Begun:
    """The requests of a work at its start, and its predicted duration."""

    requests: tuple[Request, ...]
    predicted_ns: int


class WorkRecorder:
    """Follows each work from start to end. `origin_ns` is the zero of the engine's clock on the machine's clock."""

    def __init__(
        self,
        controller: Controller,
        requests: RequestTable,
        keeper: CheckpointKeeper | None,
        observer: Observer,
        origin_ns: int,
    ) -> None:
        self.observer = observer
        self._costs = controller.costs
        self._requests = requests
        self._keeper = keeper
        self._origin_ns = origin_ns
        self._begun: dict[int, _Begun] = {}
        self._load_ns: Counter[int] = Counter()  # Since the latest work of each device ended.
        self._told_ns: dict[tuple[str, str], int] = {}  # Times of log lines on the deviation of a stage.

    def loaded(self, load: LoadComponents, run_ns: int) -> None:
        """Record that a device has loaded weights for its next work."""
        if not load.is_ahead:
            self._load_ns[load.device_id] += run_ns
        self.observer.on_weights_loaded(load.device_id, load.source, load.num_bytes, run_ns)

    def lose(self, device_id: int) -> None:
        """Forget the loads of a lost device."""
        self._load_ns.pop(device_id, None)

    def begin(self, work: Work) -> None:
        requests = tuple(self._requests[job_id].ticket.request for job_id in work.job_ids)
        predicted_ns = self._costs.work_ns(work.stage, requests, len(work.devices), work.num_steps)
        self._begun[work.work_id] = _Begun(requests, predicted_ns)
        self.observer.on_work_sent(work, requests, predicted_ns, time.monotonic_ns() - self._origin_ns)

    def progress(self, work: Work | None, members: Collection[int], steps_done: int) -> None:
        """Record a finished step. `members` are the jobs that the work still belongs to."""
        for job_id, first_step in _first_steps(work, members):
            self._requests[job_id].ticket.progress(first_step + steps_done)

    def preview(self, work: Work | None, members: Collection[int], preview: Preview) -> None:
        for _, first_step in _first_steps(work, {preview.job_id} & set(members)):
            shown = TicketPreview(first_step + preview.steps_done, preview.image)
            self._requests[preview.job_id].ticket.show(shown)
            self.observer.on_previewed(preview.job_id)

    def record(self, result: WorkResult) -> None:
        """Record what an ended work did for each request; before the controller handles its end."""
        report = result.report
        load_ns = max(self._load_ns.pop(one, 0) for one in result.work.devices)
        if report is None:
            return
        for job_id, first_step in _first_steps(result.work, result.members):
            entry = self._requests[job_id]
            request = entry.ticket.request
            entry.ticket.add(self._segment(result.work, report, load_ns, report.cache_use.get(job_id)), first_step)
            # The work before the one with the result may end after it, if its last device reports late.
            entry.image = report.images.get(job_id, entry.image)
            entry.file = report.files.get(job_id, entry.file)
            if self._keeper is not None and job_id in report.blobs:
                before = result.members[job_id]
                index = self._costs.start(request).itinerary.at[before].num_done
                saved = SavedState(index, before + report.steps_done, report.blobs[job_id])
                self._keeper.keep(request.uid, saved)

    def _segment(self, work: Work, report: Ended, load_ns: int, cache_use: CacheUse | None) -> WorkSegment:
        return WorkSegment(
            stage=work.stage.name,
            devices=work.devices,
            num_steps=report.steps_done if work.stage.has_steps else 0,
            start_ns=report.start_ns - self._origin_ns,
            end_ns=report.end_ns - self._origin_ns,
            sliced=work.sliced,
            batch=len(work.job_ids) - len(report.absent),
            load_ns=load_ns,
            cache_use=cache_use,
        )

    def observe(self, result: WorkResult) -> None:
        """Tell the observer of an ended work; after the controller has corrected its costs by it."""
        work = result.work
        begun = self._begun.pop(result.work.work_id)
        now_ns = time.monotonic_ns()
        start_ns, end_ns = (now_ns, now_ns) if result.report is None else (result.report.start_ns, result.report.end_ns)
        ended = EndedWork(
            work=work,
            requests=begun.requests,
            ending=result.ending,
            steps_done=result.steps_done,
            predicted_ns=begun.predicted_ns,
            start_ns=start_ns - self._origin_ns,
            end_ns=end_ns - self._origin_ns,
            correction=self._costs.correction(work.stage, begun.requests, len(work.devices)),
        )
        self.observer.on_work_ended(ended)
        self._tell_deviations(now_ns)

    def _tell_deviations(self, now_ns: int) -> None:
        """Log each stage whose works take more than half longer or shorter than measured, every hour at most."""
        deviations = self._costs.deviations
        self._told_ns = {key: told_ns for key, told_ns in self._told_ns.items() if now_ns - told_ns < _TELL_EVERY_NS}
        for pipeline, stage in deviations.keys() - self._told_ns.keys():
            self._told_ns[pipeline, stage] = now_ns
            _log.warning(
                "%s: the latest runs of %s took %.2g times as long as measured; predictions are corrected. %s",
                pipeline,
                stage,
                deviations[pipeline, stage],
                MEASURE_AGAIN,
            )


def _first_steps(work: Work | None, members: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield these members of a work, each with the steps that it had made before."""
    if work is not None:
        for one in work.members:
            if one.job_id in members:
                yield one.job_id, one.first_step
