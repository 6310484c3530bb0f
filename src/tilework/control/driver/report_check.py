"""Checks of the reports of a device: each report is compared with the commands that the device was sent.

An impossible report means that its sender is broken, or is not the expected one: then none of its reports counts.
Reports that merely come late are not checked here; the driver core ignores them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tilework.core.preview import PREVIEW_SIDE, SHOWN_FRAMES
from tilework.core.time import NS_PER_S
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Command, Execute, LoadWeights
from tilework.core.wire.reports import Ended, Ending, Failed, Preview, Progress, Report, WeightsLoaded
from tilework.core.wire.spec import Image

_SLACK_NS = NS_PER_S
_DRIFT = 1000
"""Inverse of the largest drift: two clocks part by less than a thousandth, since NTP slews by at most 500 ppm."""
_DROPS_NS = 60 * NS_PER_S
"""Time that the drops before a load, which its time includes, may have begun before it."""
_MOST_SIDE = 1 << 16
_NAME = re.compile("[0-9A-Za-z][0-9A-Za-z._-]{0,199}")
_NO_BLOBS = ("lock", "owner", "weights")
"""Other names in the directory of blobs."""


class BadReport(Exception):
    """An impossible report; the message says why."""


@dataclass(slots=True, eq=False)
class _SentWork:
    """A work that a device has not ended. The device `leads` if it is the first of the group."""

    command: Execute
    members: frozenset[int]
    leads: bool
    sent_ns: int
    steps_done: int = 0


def blob_name_error(name: str) -> str:
    """Return why a name cannot be that of a blob, which is a file beside others; empty if it can."""
    return "" if _NAME.fullmatch(name) and name not in _NO_BLOBS else f"{name[:40]!r} is not the name of a blob"


@dataclass(slots=True, eq=False)
class ReportCheck:
    """Knows what the worker of a device was sent, in one life of it. `device_id` is its id in its commands.

    `is_taken` returns whether there is a blob of this name already. All times are of one clock.
    """

    device_id: int
    is_taken: Callable[[str], bool] = lambda _name: False
    _works: dict[int, _SentWork] = field(default_factory=dict)
    _loads: dict[int, list[tuple[frozenset[str], int]]] = field(default_factory=dict)

    def sent(self, command: Command, now_ns: int) -> None:
        """Record that a command is sent."""
        match command:
            case Execute(work_id=work_id, group=group):
                members = frozenset(job_id for job_id, _ in command.members)
                leads = group is None or group.devices[0] == self.device_id
                self._works[work_id] = _SentWork(command, members, leads, now_ns)
            case LoadWeights(load_id, components):
                self._loads.setdefault(load_id, []).append((frozenset(components), now_ns))
            case _:
                pass

    def knows(self, report: Report) -> bool:
        """Return whether it was sent the work or load that a report is about, and has not ended it."""
        match report:
            case Progress() | Preview() | Ended() | Failed():
                return report.work_id in self._works
            case WeightsLoaded():
                return report.load_id in self._loads
            case _:
                return False

    def check(self, report: Report, now_ns: int, within_ns: int | None = 0) -> None:
        """Take a report on a work or a load. Other reports are not checked.

        Its times may be wrong by `within_ns`; None: only their differences count. Raises BadReport.
        """
        match report:
            case Progress():
                self._step(self._work(report.work_id), report.steps_done)
            case Preview():
                self._preview(self._work(report.work_id), report)
            case Ended():
                self._ended(self._work(report.work_id), report, now_ns, within_ns)
                del self._works[report.work_id]
            case Failed():
                work = self._work(report.work_id)
                if report.refuses is not None:
                    _among("refuses", (report.refuses,), work)
                del self._works[report.work_id]
            case WeightsLoaded():
                self._loaded(report, now_ns)
            case _:
                pass

    def _work(self, work_id: int) -> _SentWork:
        work = self._works.get(work_id)
        if work is None:
            raise BadReport(f"work {work_id} does not run on device {self.device_id}")
        return work

    def _step(self, work: _SentWork, steps_done: int) -> None:
        _check(work.steps_done <= steps_done <= work.command.num_steps, "steps_done", steps_done, work)
        work.steps_done = steps_done

    def _preview(self, work: _SentWork, preview: Preview) -> None:
        _among("job", (preview.job_id,), work)
        _check(work.steps_done <= preview.steps_done <= work.command.num_steps, "steps_done", preview.steps_done, work)
        image = preview.image
        _check(_is_whole(image), "the preview", image, work)
        small = max(image.height, image.width) <= PREVIEW_SIDE and image.frames <= SHOWN_FRAMES
        _check(small, "the preview", image, work)

    def _ended(self, work: _SentWork, ended: Ended, now_ns: int, within_ns: int | None) -> None:
        _check(ended.ending not in (Ending.FAILED, Ending.LOST), "ending", ended.ending.value, work)
        is_cut_off = ended.ending.is_cut_off
        least = 0 if is_cut_off else work.steps_done
        _check(least <= ended.steps_done <= work.command.num_steps, "steps_done", ended.steps_done, work)
        is_done = ended.ending is Ending.DONE
        _check(not is_done or ended.steps_done == work.command.num_steps, "steps_done", ended.steps_done, work)
        _check_times(work, ended, now_ns, within_ns)
        absent = [one.job_id for one in ended.absent]
        _among("absent", absent, work)
        _among("for_any_seed", ended.for_any_seed, work)
        _among("cache_use", ended.cache_use, work)
        results = [*ended.blobs, *ended.images, *ended.files]
        _among("results", [*results, *absent], work)
        _check(work.leads or is_cut_off or not results, "results", results, work)
        if work.leads and not is_cut_off and ended.steps_done:
            _check(len(results) + len(absent) == len(work.members), "results", results, work)
        self._blobs(work, ended.blobs)
        for image in ended.images.values():
            _check(_is_whole(image), "an image", image, work)

    def _blobs(self, work: _SentWork, blobs: Mapping[int, StateBlob]) -> None:
        names = [blob.name for blob in blobs.values()]
        _check(len(set(names)) == len(names), "blobs", names, work)
        for name in names:
            if error := blob_name_error(name):
                raise BadReport(f"{error} (work {work.command.work_id})")
            _check(not self.is_taken(name), "the blob", name, work)

    def _loaded(self, loaded: WeightsLoaded, now_ns: int) -> None:
        sent = self._loads.get(loaded.load_id)
        if sent is None:
            raise BadReport(f"load {loaded.load_id} does not run on device {self.device_id}")
        components, sent_ns = sent.pop(0)
        if not sent:
            del self._loads[loaded.load_id]
        most_ns = _longest_ns(sent_ns, now_ns) + _DROPS_NS
        if not 0 <= loaded.run_ns <= most_ns:
            raise BadReport(f"run_ns = {loaded.run_ns} of load {loaded.load_id}, which was sent {most_ns} ns ago")
        if not components.issuperset(loaded.dropped):
            raise BadReport(f"load {loaded.load_id} dropped what it should not load")


def _check(holds: bool, what: str, value: object, work: _SentWork) -> None:
    if not holds:
        raise BadReport(f"{what} = {value!r:.200} of work {work.command.work_id} of {work.command.num_steps} steps")


def _among(what: str, job_ids: Collection[int], work: _SentWork) -> None:
    """Check that these jobs are members of a work, each given once."""
    _check(len(set(job_ids)) == len(job_ids) and work.members.issuperset(job_ids), what, sorted(job_ids), work)


def _longest_ns(sent_ns: int, now_ns: int) -> int:
    """Return the longest time, by another clock, of something that began when it was sent and has ended now."""
    return now_ns - sent_ns + (now_ns - sent_ns) // _DRIFT + _SLACK_NS


def _check_times(work: _SentWork, ended: Ended, now_ns: int, within_ns: int | None) -> None:
    """Check that the time of a work is between the command and the report on it."""
    run_ns = ended.end_ns - ended.start_ns
    _check(0 <= run_ns <= _longest_ns(work.sent_ns, now_ns), "run_ns", run_ns, work)
    if within_ns is not None:
        slack_ns = within_ns + _SLACK_NS
        _check(work.sent_ns - slack_ns <= ended.start_ns, "start_ns", ended.start_ns, work)
        _check(ended.end_ns <= now_ns + slack_ns, "end_ns", ended.end_ns, work)


def _is_whole(image: Image) -> bool:
    """Return whether the buffer of an image is as long as its size says."""
    sides = image.height, image.width, image.frames
    return all(0 < side <= _MOST_SIDE for side in sides) and len(image.pixels) == 3 * sides[0] * sides[1] * sides[2]
