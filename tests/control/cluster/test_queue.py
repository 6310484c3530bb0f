"""The queue of waiting jobs against a plain sorted list."""

from __future__ import annotations

from random import Random

import pytest

from builders import job, request
from tilework.control.cluster.job import Job
from tilework.control.cluster.queue import WaitingQueue
from tilework.core.block import Demand


@pytest.mark.parametrize("spread", [10, 10**9])
def test_it_is_a_sorted_list_with_sums_up_to_each_place(spread: int) -> None:
    """It grows to 3,000 jobs, which is several blocks, and shrinks to none."""
    rng, queue, plain = Random(2), WaitingQueue(), list[Job]()
    for index in range(6000):
        if rng.random() < (0.75 if index < 4000 else 0.1) or not plain:
            urgency_ns = rng.randrange(spread)
            one = job(index, request(str(index)), urgency_ns, demand=Demand(rng.choice([1, 4]), rng.randrange(1000)))
            queue.add(one)
            plain.append(one)
        else:
            queue.remove(plain.pop(rng.randrange(len(plain))))
        if index % 50 == 0 or not plain:
            plain.sort(key=lambda one: (one.urgency_ns, one.job_id))
            assert (list(queue), len(queue)) == (plain, len(plain))
            key = (rng.randrange(spread), rng.randrange(6000))
            before = [one.demand for one in plain if (one.urgency_ns, one.job_id) < key]
            ahead = queue.ahead(key)
            assert list(ahead.demands) == before[-128:]
            assert ahead.volume_ns == sum(demand.width * demand.run_ns for demand in before[:-128])
            assert all(one in queue for one in plain[:: max(1, len(plain) // 9)])
            assert job(9999, request("other"), 5) not in queue
