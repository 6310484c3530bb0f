"""Which requests are to be on time when devices are asked for more than they can do."""

from __future__ import annotations

from collections import Counter

import pytest

from builders import shipped, simulate
from tilework.core.request import OnMiss, Request, RequestClass, Shape, cost_key
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.policy.lookahead.arrivals import Rationing

SMALL, LARGE = 1.0, 10.0  # Device time, in seconds.


def key(side: int) -> RequestClass:
    return cost_key(Request(uid="a", pipeline="toy", shape=Shape(side, side), steps=4, arrival_ns=0))


def admitted(
    num_devices: int, small_per_s: int, large_per_s: int, seconds: int = 600, weight: float = 1.0
) -> dict[str, float]:
    """The share of each class that is to be on time, of what comes in the last half of this time."""
    rationing, came, kept = Rationing(), Counter[str](), Counter[str]()
    for second in range(seconds):
        for name, side, device_s, num in (("small", 64, SMALL, small_per_s), ("large", 128, LARGE, large_per_s)):
            for _ in range(num):
                at_ns, its_weight = second * NS_PER_S, weight if name == "large" else 1.0
                rationing.add(key(side), at_ns, device_s * NS_PER_S, its_weight)
                is_kept = rationing.admits(key(side), at_ns, num_devices)
                if 2 * second >= seconds:
                    came[name] += 1
                    kept[name] += is_kept
    return {name: kept[name] / came[name] for name in came}


def test_nothing_is_rationed_while_devices_can_do_it() -> None:
    """Four small and one large per second are 14 devices' work."""
    assert admitted(14, 4, 1) == {"small": 1.0, "large": 1.0}


def test_the_dearest_are_rationed_to_what_the_cheaper_leave() -> None:
    """Of ten devices, the small ones leave six: enough for 60% of the large ones."""
    found = admitted(10, 4, 1)
    assert found["small"] == 1.0
    assert found["large"] == pytest.approx(0.6, abs=0.03)


def test_the_cheap_are_rationed_only_when_they_alone_are_too_many() -> None:
    found = admitted(5, 10, 1)
    assert found["small"] == pytest.approx(0.5, abs=0.03)
    assert found["large"] == 0.0


def test_a_heavy_request_costs_less() -> None:
    """With a weight of twenty, a large one is worth more than small ones of its device time."""
    found = admitted(10, 4, 1, weight=20.0)
    assert found["large"] == pytest.approx(1.0, abs=0.03)
    assert found["small"] < 0.1


def test_a_burst_is_no_load() -> None:
    assert admitted(10, 4, 1, seconds=20) == {"small": 1.0, "large": 1.0}


def test_when_less_is_asked_for_all_are_on_time_again() -> None:
    rationing = Rationing()
    for second in range(600):
        rationing.add(key(128), second * NS_PER_S, LARGE * NS_PER_S, 1.0)
    assert not all(rationing.admits(key(128), 600 * NS_PER_S, 5) for _ in range(3))
    rationing.add(key(128), 1200 * NS_PER_S, LARGE * NS_PER_S, 1.0)
    assert rationing.admits(key(128), 1200 * NS_PER_S, 5)
    assert rationing.admits(key(64), 600 * NS_PER_S, 5), "nothing is known of it"


def overloaded(on_miss: OnMiss = OnMiss.BEST_EFFORT) -> list[Request]:
    """Twice what eight devices can do, half of it for videos of 20 times the device time of pictures."""
    table, found = shipped("hunyuanvideo_l20"), []
    sizes = ("960x544x17", "1280x720x129")
    for index in range(60):
        size = sizes[index % 5 == 0]
        arrival_ns = ns_from_s(8.0 * index)
        deadline_ns = arrival_ns + ns_from_s(table.slo_s[size])
        found.append(
            Request(
                uid=f"{index}",
                pipeline="hunyuanvideo",
                shape=Shape.parse(size),
                steps=table.steps or 1,
                arrival_ns=arrival_ns,
                deadline_ns=deadline_ns,
                on_miss=on_miss,
            )
        )
    return found


def test_under_overload_less_is_begun_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device time that requests took which were late at last: with and without rations."""

    def wasted_s() -> tuple[float, int]:
        trace = simulate(overloaded(), "tilework", num_devices=8, costs=shipped("hunyuanvideo_l20"))
        late = {one.job_id: one.request.deadline_ns or 0 for one in trace.endings if not one.on_time}
        runs = [run for run in trace.runs if run.work.job_ids[0] in late]
        spent_ns = sum(
            len(run.devices) * (run.end_ns - run.start_ns) for run in runs if run.end_ns <= late[run.work.job_ids[0]]
        )
        return spent_ns / NS_PER_S, sum(bool(one.on_time) for one in trace.endings)

    with_rations = wasted_s()
    monkeypatch.setattr(Rationing, "admits", lambda *_: True)
    without = wasted_s()
    assert with_rations[0] < 0.7 * without[0]
    assert with_rations[1] >= 0.95 * without[1]


def test_promises_are_not_rationed() -> None:
    trace = simulate(overloaded(OnMiss.REJECT), "tilework", num_devices=8, costs=shipped("hunyuanvideo_l20"))
    accepted = [one for one in trace.endings if one.job_id is not None]
    assert accepted
    assert all(one.on_time for one in accepted)
