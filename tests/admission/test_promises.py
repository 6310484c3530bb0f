"""What a promise costs others, that it is kept, and what a refusal says."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from builders import only, promise, request, shipped, simulate, table
from tilework.admission.promise_query import PromiseQuery
from tilework.admission.reservations import Reservations
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Action, HoldBack, Reject, Stop
from tilework.core.block import Demand
from tilework.core.events import DeviceJoined, Event, Restored, Stopped, Submitted, WorkFinished
from tilework.core.request import OnMiss, Request, Shape
from tilework.core.time import NS_PER_MS, NS_PER_S, ns_from_s
from tilework.cost.table import CostTable
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

FLUX = shipped("flux1dev_h100_eager")
_ENCODE_NS = 10 * NS_PER_MS


def picture(uid: str, arrival_s: float, side: int, slo_s: float, on_miss: OnMiss = OnMiss.BEST_EFFORT) -> Request:
    return Request(
        uid=uid,
        pipeline="flux.1-dev",
        shape=Shape(side, side),
        steps=20,
        arrival_ns=ns_from_s(arrival_s),
        deadline_ns=ns_from_s(arrival_s + slo_s),
        on_miss=on_miss,
    )


def serving(
    num_devices: int = 1, costs: CostTable | None = None, price: float = 1.0, policy: str = "tilework"
) -> Controller:
    control = Controller(ControllerConfig(policy=policy, promise_price=price), costs or table())
    for device_id in range(num_devices):
        control.handle(DeviceJoined(device_id, 0), 0)
    return control


# A promised run gives way where a proof remains.


def test_a_small_request_does_not_wait_for_a_large_promised_one_that_has_time() -> None:
    large, small = picture("large", 0.0, 2048, 100.0, OnMiss.REJECT), picture("small", 1.0, 512, 4.0)
    first, second = simulate([large, small], "tilework", costs=FLUX).endings
    assert first.on_time
    assert second.on_time
    assert second.latency_ns < 2 * NS_PER_S, "after one step of the large one"


def test_as_many_are_on_time_beside_a_promise_as_fit() -> None:
    """The large one takes 22.8 s of its 40 s, each small one 1.4 s of its 6 s, and a step of the large one 1.1 s."""
    small = [picture(str(index), 0.5, 512, 6.0) for index in range(12)]
    large, *others = simulate(
        [picture("large", 0.0, 2048, 40.0, OnMiss.REJECT), *small], "tilework", costs=FLUX
    ).endings
    assert large.on_time
    assert sum(one.on_time for one in others) >= 3


def test_a_promised_run_that_has_no_time_left_does_not_give_way() -> None:
    """Neither to one that would be on time, nor to many."""
    alone = simulate([picture("alone", 0.0, 2048, 100.0)], "tilework", costs=FLUX).endings[0].latency_ns
    slo_s = 1.08 * alone / NS_PER_S + 0.1
    small = [picture(str(index), 0.5 + index, 512, 2.0) for index in range(12)]
    large, *others = simulate(
        [picture("large", 0.0, 2048, slo_s, OnMiss.REJECT), *small], "tilework", costs=FLUX
    ).endings
    assert large.on_time
    assert not all(one.on_time for one in others)


# What is held back for a promise is said, once.


def told(requests: list[Request], policy: str, costs: CostTable) -> dict[str, list[HoldBack]]:
    """What was said to be held back, by request, on one device."""
    uids, found = dict[int, str](), dict[str, list[HoldBack]]()

    def note(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        uids.update({one.job_id: one.uid for one in only(Accept, actions)})
        for one in only(HoldBack, actions):
            found.setdefault(uids[one.job_id], []).append(one)

    Simulation(ControllerConfig(policy=policy), costs, SimConfig(num_devices=1)).run(requests, (), note)
    return found


def test_a_start_that_is_held_back_is_said_once() -> None:
    """By its deadline the other one would be first, and the promise broken; it is asked for at every arrival."""
    others = [request(str(index), 1.0 + index / 10, steps=1, slo_s=20) for index in range(8)]
    first, last = request("first", steps=20, slo_s=3), promise("promised", 0.1, slo_s=4.5, steps=20)
    found = told([first, last, request("earlier", 0.2, steps=10, slo_s=4.2), *others], "edf", table())
    assert found == {"earlier": [HoldBack(2, is_start=True)]}


def test_a_stop_that_is_held_back_is_said() -> None:
    large, small = picture("large", 0.0, 2048, 24.5, OnMiss.REJECT), picture("small", 1.0, 512, 3.0)
    found = told([large, small], "tilework", FLUX)
    assert found["large"] == [HoldBack(0, is_start=False)]


# A stop that comes earlier than predicted leaves more to do.


@pytest.mark.parametrize("steps_done", [0, 1])
def test_the_proof_counts_on_what_a_stop_has_really_left(steps_done: int) -> None:
    """One step was predicted: the one that runs. It was not, if the stop came before it had begun."""
    control = serving()
    control.handle(Submitted(promise("large", 0.0, slo_s=20, steps=100)), 0)
    control.handle(WorkFinished(1, _ENCODE_NS), _ENCODE_NS)
    at_ns = ns_from_s(0.05)
    stops = only(Stop, control.handle(Submitted(request("urgent", 0.05, steps=2, slo_s=0.5)), at_ns))
    job = control.tracker.jobs[0]
    assert job.stops_at == 2, "the encode, and one step"
    steps = dict.fromkeys([stop.work_id for stop in stops], 0) | {min(stop.work_id for stop in stops): steps_done}
    for work_id, num in sorted(steps.items()):
        control.handle(Stopped(work_id, num), at_ns)
    known = control._guard._known
    assert job.done.position == 1 + steps_done
    assert job.promised is not None
    assert known is not None
    assert known.spared_ns[0] == known.ends_ns[0] - job.promised.demand.run_ns


# A step that begins when the stop is told is not over.


@pytest.mark.parametrize("early_ns", [0, 300, 40 * NS_PER_MS])
def test_a_work_that_is_told_to_stop_as_a_step_begins_ends_after_that_step(early_ns: int) -> None:
    control = serving(policy="edf")
    control.handle(Submitted(request("a")), 0)
    control.handle(WorkFinished(1, _ENCODE_NS), _ENCODE_NS)
    job, at_ns = control.tracker.jobs[0], _ENCODE_NS + 100 * NS_PER_MS - early_ns
    control.tracker.set_time(at_ns)
    boundary = control.tracker.boundary([job])
    assert boundary is not None
    ends_ns = _ENCODE_NS + (100 if early_ns > NS_PER_MS else 200) * NS_PER_MS
    assert boundary.end_ns == ends_ns
    assert boundary.positions == {0: 2 if early_ns > NS_PER_MS else 3}
    control.tracker.stop([job])
    assert (control.tracker.devices[0].free_ns, job.committed.position) == (ends_ns, boundary.positions[0])


# A later deadline is promised where an earlier one is.


def answer(control: Controller, asked: Request) -> Accept | Reject:
    """The answer to a request; the controller must not be used after it."""
    actions = control.handle(Submitted(asked), asked.arrival_ns)
    return next(one for one in actions if isinstance(one, Accept | Reject))


def backlog(seed: int) -> Controller:
    """Six to twelve requests on one or four devices, of which half are promised if they can be."""
    rng = Random(seed)
    control = serving(rng.choice((1, 4)), table(degrees=(1, 2, 4)))
    for index in range(rng.randint(6, 12)):
        side, slo_s = rng.choice((64, 128, 192)), rng.uniform(2.0, 40.0)
        on_miss = rng.choice((OnMiss.REJECT, OnMiss.BEST_EFFORT))
        control.handle(Submitted(request(str(index), 0.0, slo_s=slo_s, side=side, on_miss=on_miss)), 0)
    return control


@pytest.mark.parametrize("seed", range(12))
def test_no_deadline_is_refused_that_is_later_than_one_that_is_promised(seed: int) -> None:
    side, slos_s = Random(f"asked/{seed}").choice((64, 128, 192)), [1.2 * 1.25**index for index in range(20)]
    answers = [answer(backlog(seed), promise("asked", 0.0, slo_s, side=side)) for slo_s in slos_s]
    kinds = [isinstance(one, Accept) for one in answers]
    assert kinds == sorted(kinds)
    assert kinds[-1]


def test_requests_that_wait_by_earlier_deadlines_are_no_reason_to_refuse_a_later_one() -> None:
    """Six best-effort requests take 14 s. A promise for 4.5 s comes before them, one for 8 s after."""

    def busy() -> Controller:
        control = serving()
        for index in range(6):
            control.handle(Submitted(request(str(index), 0.0, slo_s=5.0, side=192)), 0)
        return control

    answers = [answer(busy(), promise("asked", 0.0, slo_s)) for slo_s in (4.5, 8.0, 12.0, 30.0)]
    assert [type(one) for one in answers] == [Accept] * 4


@pytest.mark.parametrize("seed", range(12))
def test_a_refusal_proposes_a_later_deadline_which_is_promised(seed: int) -> None:
    for slo_s in (1.0, 2.0, 4.0, 8.0):
        refused = answer(backlog(seed), promise("asked", 0.0, slo_s))
        if isinstance(refused, Reject):
            assert refused.earliest_ns is not None
            assert refused.earliest_ns > ns_from_s(slo_s)
            proposed = promise("asked", 0.0, refused.earliest_ns / NS_PER_S)
            assert isinstance(answer(backlog(seed), replace(proposed, deadline_ns=refused.earliest_ns)), Accept)


# What a refusal says.


def test_a_deadline_that_an_idle_server_cannot_promise_is_not_worth_a_retry() -> None:
    refused = answer(serving(), promise("a", 0.0, slo_s=0.9))
    assert isinstance(refused, Reject)
    assert refused.retry_ns is None
    assert "even if nothing else runs" in refused.reason


def test_a_retry_is_worth_it_once_the_deadline_could_be_promised() -> None:
    control = serving()
    control.handle(Submitted(promise("first", 0.0, slo_s=1.5)), 0)
    refused = answer(control, promise("second", 0.0, slo_s=1.5))
    assert isinstance(refused, Reject)
    assert refused.earliest_ns is not None
    assert refused.retry_ns == refused.earliest_ns - ns_from_s(1.5)


# The price of a promise.


def late_without(price: float) -> Accept | Reject:
    """The answer to a promise that takes the time of two small requests that would be on time."""
    control = serving(price=price)
    for uid in ("a", "b"):
        control.handle(Submitted(request(uid, 0.0, slo_s=4.5 if uid == "a" else 6.0, side=192)), 0)
    return answer(control, promise("asked", 0.0, slo_s=5.2, side=192))


def test_a_promise_costs_no_more_deadlines_than_its_price() -> None:
    assert isinstance(late_without(0.0), Reject)
    assert isinstance(late_without(2.0), Accept)


# What must change for a promise.


def test_a_promise_stops_the_works_that_are_in_its_way() -> None:
    """Two chunks of a large promised run are committed. The other request has no time for them."""
    control = serving(costs=table(step_s=1.0))
    control.handle(Submitted(promise("large", 0.0, slo_s=60.0)), 0)
    control.handle(WorkFinished(1, _ENCODE_NS), _ENCODE_NS)
    actions = control.handle(Submitted(promise("small", 0.5, slo_s=4.4, side=64)), NS_PER_S // 2)
    assert only(Accept, actions)
    assert only(Stop, actions)


def test_a_promised_job_gets_another_width_for_a_promise() -> None:
    """The first is reserved on one device. Once the other has had both, it is in time on two only."""
    control = serving(num_devices=2, costs=table(degrees=(1, 2)))
    control.handle(Submitted(promise("first", 0.0, slo_s=2.6)), 0)
    (first,) = control.tracker.promised()
    assert first.promised is not None
    assert first.promised.demand.width == 1
    assert only(Accept, control.handle(Submitted(promise("second", 0.0, slo_s=2.0, side=192)), 0))
    assert first.promised.demand.width == 2


# What was promised before a restart.


def test_a_restored_promise_is_judged_by_what_is_left_of_it() -> None:
    """A few steps and the decode, in 0.4 s; all of it takes 1.06 s."""
    control = serving()
    control.handle(Restored(promise("a", 0.0, slo_s=1.6), 9), ns_from_s(1.2))
    (job,) = control.tracker.jobs.values()
    assert job.promised is not None


def test_the_widths_of_an_earliest_deadline_are_tried_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first uses up the budget of the search: by the order of a set, a log would not replay in another process."""
    asked: list[tuple[PromiseQuery, list[int]]] = []
    whole, one = PromiseQuery._earliest_ns, Reservations.earliest_ns

    def begun(query: PromiseQuery, at_least_ns: int) -> int:
        asked.append((query, []))
        return whole(query, at_least_ns)

    def tried(places: Reservations, block: Demand, *more: Any) -> int:
        asked[-1][1].append(block.width)
        return one(places, block, *more)

    monkeypatch.setattr(PromiseQuery, "_earliest_ns", begun)
    monkeypatch.setattr(Reservations, "earliest_ns", tried)
    sides = (256, 512, 1024, 2048)
    requests = [picture(str(place), 0.01 * place, sides[place % 4], 1.5 + place, OnMiss.REJECT) for place in range(40)]
    for steps in range(10, 24):
        simulate([replace(each, steps=steps) for each in requests], "tilework", costs=FLUX, num_devices=8)
    several = [(query, widths) for query, widths in asked if len(set(widths)) > 1]
    assert len({query.blocks[0] for query, _ in several}) > 5
    for query, widths in several:
        in_order = [query.blocks[0].width, min(query.blocks, key=lambda block: block.run_ns).width]
        assert widths == in_order * (len(widths) // 2)
