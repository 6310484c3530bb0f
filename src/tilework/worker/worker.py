"""What a worker does, command by command; no process, thread or pipe in here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from tilework.core.wire import (
    Calibrate,
    Calibrated,
    Command,
    Decode,
    Denoise,
    Encode,
    Ended,
    Exported,
    ExportState,
    Failed,
    Forget,
    ImportState,
    Progress,
    Report,
)
from tilework.pipelines.family import Family
from tilework.worker.calibrate import calibrate
from tilework.worker.jobs import Job, JobMissing, Jobs
from tilework.worker.moving import export_job, import_job
from tilework.worker.settle import settle
from tilework.worker.works import OpenWorks

_log = logging.getLogger(__name__)
WorkCommand = Encode | Denoise | Decode
_T = TypeVar("_T", bound=WorkCommand)


class Worker:
    """Executes one command after another on one model, and says through `emit` how each work ended.

    `works` knows the works and exports that were received; `execute` closes the works that it ends. Between two steps
    of a work, states of other jobs leave for other workers; nobody else has to wait for the end of the work. An
    error in a work is contained: the work answers `Failed`, its job is lost here, and so are the job's later works.
    """

    def __init__(self, family: Family, works: OpenWorks, emit: Callable[[Report], None]) -> None:
        self._family = family
        self._works = works
        self._emit = emit
        self._jobs = Jobs()

    @property
    def num_jobs(self) -> int:
        """Jobs of which something is kept in memory."""
        return len(self._jobs)

    def execute(self, command: Command) -> None:
        """Do what `command` says; `StopWork` and `Quit` are the receiver's affair."""
        match command:
            case Encode():
                self._work(command, self._encode)
            case Denoise():
                self._work(command, self._denoise)
            case Decode():
                self._work(command, self._decode)
            case ExportState():
                if self._works.take_export(command.transfer_id):
                    self._export(command)
            case ImportState():
                self._import(command)
            case Forget():
                self._jobs.forget(command.job_id)
            case Calibrate():
                self._emit(Calibrated(calibrate(self._family, command.shapes)))
            case _:
                raise TypeError(f"a worker does not execute {type(command).__name__}")

    def _work(self, command: _T, run: Callable[[_T, int], Ended]) -> None:
        """Run a work, or skip it if it was stopped in the queue, and report its end."""
        start_ns = time.monotonic_ns()
        try:
            if self._works.is_stopped(command.work_id):
                report: Report = Ended(command.work_id, start_ns, start_ns, steps_done=0, stopped=True)
            else:
                report = run(command, start_ns)
        except JobMissing as error:
            report = Failed(command.work_id, describe(error))
        except Exception as error:
            _log.exception("work %d of job %d failed", command.work_id, command.job_id)
            report = Failed(command.work_id, describe(error))
            self._jobs.lose(command.job_id, f"work {command.work_id} failed with {describe(error)}")
        self._works.close(command.work_id)
        self._emit(report)

    def _encode(self, command: Encode, start_ns: int) -> Ended:
        conditioning = self._family.encode(command.spec)
        self._jobs.put(command.job_id, Job(spec=command.spec, conditioning=conditioning))
        return Ended(command.work_id, start_ns, self._now_ns(), steps_done=1)

    def _denoise(self, command: Denoise, start_ns: int) -> Ended:
        """Run up to `num_steps` steps, fewer if the request has no more or a stop is seen between two of them."""
        family, job = self._family, self._jobs.present(command.job_id)
        state = job.state = job.state or family.begin(job.spec, job.conditioning)
        first = seen = state.steps_done
        last = min(first + command.num_steps, job.spec.steps)
        while state.steps_done < last:
            if state.steps_done > seen:
                seen = state.steps_done
                settle(family.device)
                if self._works.is_stopped(command.work_id):
                    return Ended(command.work_id, start_ns, self._now_ns(), seen - first, stopped=True)
                self._emit(Progress(command.work_id, seen - first))
                for export in self._works.early_exports():
                    self._export(export)
            family.advance(state, family.predict([state])[0])
        return Ended(command.work_id, start_ns, self._now_ns(), last - first)

    def _decode(self, command: Decode, start_ns: int) -> Ended:
        job = self._jobs.present(command.job_id)
        steps_done = 0 if job.state is None else job.state.steps_done
        if job.state is None or steps_done < job.spec.steps:
            raise ValueError(f"job {command.job_id} has {steps_done} of {job.spec.steps} steps; denoise it first")
        image = self._family.decode(job.state)
        return Ended(command.work_id, start_ns, self._now_ns(), steps_done=1, image=image)

    def _export(self, command: ExportState) -> None:
        """Answer with the job, or with None if it is not here; its conditioning stays for a later return."""
        blob = None
        try:
            job = self._jobs.present(command.job_id)
            blob = export_job(self._family, job, command.conditioning)
            job.state, job.away = None, True
        except JobMissing:
            _log.warning("job %d is to be exported but is not here", command.job_id)
        except Exception as error:
            _log.exception("export of job %d failed", command.job_id)
            self._jobs.lose(command.job_id, f"its export failed with {describe(error)}")
        self._emit(Exported(command.transfer_id, blob))

    def _import(self, command: ImportState) -> None:
        job_id = command.job_id
        if command.blob is None:
            self._jobs.lose(job_id, "the worker that had its state could not hand it over")
            return
        try:
            self._jobs.put(job_id, import_job(self._family, self._jobs, job_id, command.blob))
        except Exception as error:
            _log.exception("import of job %d failed", job_id)
            self._jobs.lose(job_id, f"its import failed with {describe(error)}")

    def _now_ns(self) -> int:
        settle(self._family.device)
        return time.monotonic_ns()


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
