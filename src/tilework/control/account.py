"""The time of one request: its works, its waits between them, and the reason why it was late or not served."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.control.decisions import span_text
from tilework.control.history import History, LostWork, PastLoad, PastRequest, PastWork
from tilework.core.actions import Finish, Reject
from tilework.core.request import Status
from tilework.core.work import Group

EndedWork = PastWork | LostWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One request's time from its arrival to its end, or to the end of a log that leaves it open.

    `works` are those that ran, in order of their starts. A wait is a span without a work of the request; its devices
    are those of the next work (all devices, if there is none). `blockers` are the requests that ran on these devices
    during waits, each with its time, the longest first. Of the time in waits when none of the devices ran anything, one
    of them loaded weights for `loading_ns`, and all were idle for `idle_ns`.
    `overrun_ns` is how much longer its works took than predicted, over works of which both times are known.
    """

    past: PastRequest
    works: tuple[EndedWork, ...]
    waited_ns: int
    loading_ns: int
    idle_ns: int
    ran_ns: int
    overrun_ns: int
    blockers: tuple[tuple[str, int], ...]

    @property
    def slack_ns(self) -> int | None:
        """Time from its end to its deadline; None without a deadline, or while it is open."""
        deadline_ns = self.past.request.deadline_ns
        finish_ns = self.past.finish_ns
        return None if deadline_ns is None or finish_ns is None else deadline_ns - finish_ns

    @property
    def eta_error_ns(self) -> int | None:
        """Time from its predicted to its actual end; None if it was not done."""
        past = self.past
        if past.status is not Status.DONE or past.eta_ns is None or past.finish_ns is None:
            return None
        return past.finish_ns - past.eta_ns


def account_of(history: History, past: PastRequest) -> Account:
    """Return the account of one request of a history."""
    ran: tuple[EndedWork, ...] = (*history.works, *history.lost)
    ran = tuple(work for work in ran if work.end_ns > work.start_ns)
    own = sorted((work for work in ran if past.job_id in work.work.job_ids), key=lambda work: work.start_ns)
    uids = {one.job_id: one.request.uid for one in history.requests if one.job_id is not None}
    all_devices = tuple(sorted({change.device_id for change in history.devices}))
    waits = _waits(past, own, history.end_ns, all_devices)
    blocked_ns: dict[str, int] = {}
    idle_ns = loading_ns = 0
    for start_ns, end_ns, devices in waits:
        meanwhile = _clipped(ran, start_ns, end_ns, devices)
        busy = [(work_start, work_end) for work_start, work_end, _ in meanwhile]
        loads = _loads(history.loads, start_ns, end_ns, devices)
        with_loads_ns = _union_ns([*busy, *loads])
        loading_ns += with_loads_ns - _union_ns(busy)
        idle_ns += end_ns - start_ns - with_loads_ns
        for work_start_ns, work_end_ns, work in meanwhile:
            for job_id in work.work.job_ids:
                uid = uids[job_id]
                blocked_ns[uid] = blocked_ns.get(uid, 0) + work_end_ns - work_start_ns
    measured = [work for work in own if isinstance(work, PastWork)]
    times = [(work.run_ns, work.predicted_ns) for work in measured]
    return Account(
        past=past,
        works=tuple(own),
        waited_ns=sum(end_ns - start_ns for start_ns, end_ns, _ in waits),
        loading_ns=loading_ns,
        idle_ns=idle_ns,
        ran_ns=_union_ns([(work.start_ns, work.end_ns) for work in own]),
        overrun_ns=sum(run - predicted for run, predicted in times if run is not None and predicted is not None),
        blockers=tuple(sorted(blocked_ns.items(), key=lambda item: (-item[1], item[0]))),
    )


def cause_of(account: Account) -> str | None:
    """Return why a request was not served or was late, in one line; None if it was neither, or is open."""
    status = account.past.status
    if status is None or (status is Status.DONE and account.past.on_time is not False):
        return None
    return _why_late(account) if status is Status.DONE else _why_not_served(account.past)


def _why_not_served(past: PastRequest) -> str:
    end = next(action for _, action in past.actions if isinstance(action, Reject | Finish))
    word = f"refused ({end.code})" if isinstance(end, Reject) else end.status
    return f"{word}: {end.reason}"


def _why_late(account: Account) -> str:
    """Return the first reason, in this order, that explains why the request was late."""
    past = account.past
    slack_ns = account.slack_ns
    assert past.request.deadline_ns is not None, "a request without a deadline is not late"
    assert slack_ns is not None, "a request that is done has an end"
    lost = [work for work in account.works if isinstance(work, LostWork)]
    if lost:
        return f"{len(lost)} of its works {'was' if len(lost) == 1 else 'were'} lost: {lost[0].reason}"
    if account.overrun_ns >= -slack_ns:
        return f"its works took {span_text(account.overrun_ns)} longer than predicted"
    if account.waited_ns < -slack_ns:
        had_ns = past.request.deadline_ns - past.request.arrival_ns
        text = f"its works took {span_text(account.ran_ns)}, and it had {span_text(had_ns)}"
        return f"{text}; it also waited {span_text(account.waited_ns)}" if account.waited_ns else text
    text = f"waited {span_text(account.waited_ns)} and ran {span_text(account.ran_ns)}"
    uid, blocked_ns = account.blockers[0] if account.blockers else ("", 0)
    if account.loading_ns > max(blocked_ns, account.idle_ns):
        return f"{text}; its devices loaded weights for {span_text(account.loading_ns)} of the wait"
    if account.idle_ns > blocked_ns:
        return f"{text}; its devices were idle for {span_text(account.idle_ns)} of the wait"
    return f"{text}; waited longest for {uid} ({span_text(blocked_ns)})"


def _waits(past: PastRequest, own: list[EndedWork], last_ns: int, all_devices: Group) -> list[tuple[int, int, Group]]:
    """Return (start, end, devices) of each wait of the request; see `Account`.

    `own` are its works in order of their starts. A log has works in the order of their reports, which may differ.
    """
    now_ns = past.request.arrival_ns
    waits = []
    for work in own:
        if work.start_ns > now_ns:
            waits.append((now_ns, work.start_ns, work.work.devices))
        now_ns = max(now_ns, work.end_ns)
    end_ns = last_ns if past.finish_ns is None else past.finish_ns
    if end_ns > now_ns and past.status is not Status.DONE:
        waits.append((now_ns, end_ns, all_devices))
    return waits


def _clipped(
    works: tuple[EndedWork, ...], start_ns: int, end_ns: int, devices: Group
) -> list[tuple[int, int, EndedWork]]:
    """Return the works that ran on any of `devices` between these times, each with its start and end cut to them."""
    wanted = set(devices)
    return [
        (max(work.start_ns, start_ns), min(work.end_ns, end_ns), work)
        for work in works
        if work.start_ns < end_ns and work.end_ns > start_ns and not wanted.isdisjoint(work.work.devices)
    ]


def _loads(loads: tuple[PastLoad, ...], start_ns: int, end_ns: int, devices: Group) -> list[tuple[int, int]]:
    """Return the loads on any of `devices` between these times, cut to them."""
    return [
        (max(past.start_ns, start_ns), min(past.end_ns, end_ns))
        for past in loads
        if past.start_ns < end_ns and past.end_ns > start_ns and past.load.device_id in devices
    ]


def _union_ns(spans: list[tuple[int, int]]) -> int:
    covered_ns, until_ns = 0, 0
    for start_ns, end_ns in sorted(spans):
        covered_ns += max(0, end_ns - max(start_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return covered_ns
