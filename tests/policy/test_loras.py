"""Requests with LoRAs: only those with the same ones share works, and their weights are loaded like others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import PIPELINE, POLICIES, batched, finished, request, simulate
from stages import DIFFUSE
from tilework.core.component import Component, LoadSource
from tilework.core.lora import Lora, UsedLora
from tilework.core.request import Request
from tilework.cost.table import CostTable
from tilework.sim.trace import Trace

INK, CHALK = UsedLora("ink", 0.8), UsedLora("chalk", 1.0)


def with_loras(table: CostTable, size: int | None = None) -> CostTable:
    """LoRAs of the denoiser; with a size they are weights of which a device has room for one beside the model's."""
    components = {name: None if size is None else Component(name, size) for name in ("ink", "chalk")}
    loras = {name: Lora(changes=frozenset({"denoiser"}), component=one) for name, one in components.items()}
    table = replace(table, loras={PIPELINE: loras})
    if size is None:
        return table
    return replace(
        table,
        components={PIPELINE: {"denoiser": Component("denoiser", 1000)}},
        memory_bytes=1000 + size,
        load_bytes_per_s={LoadSource.DISK: 10 * size},
    )


def alternating(count: int) -> list[Request]:
    uses = ((), (INK,), (CHALK,), (INK, CHALK), (replace(INK, scale=0.2),))
    return [request(str(index), steps=4, loras=uses[index % len(uses)]) for index in range(count)]


def jobs(trace: Trace) -> dict[int, Request]:
    return {one.job_id: one.request for one in trace.endings if one.job_id is not None}


@pytest.mark.parametrize("policy", POLICIES)
def test_only_requests_with_the_same_loras_share_works(policy: str) -> None:
    requests = alternating(20)
    trace = simulate(requests, policy, costs=with_loras(batched()))
    assert sorted(finished(trace)) == sorted(one.uid for one in requests)
    of_job = jobs(trace)
    for run in trace.runs:
        (loras,) = {of_job[job_id].loras for job_id in run.work.job_ids}
        assert run.work.stage.loras == (loras if run.work.stage.name == DIFFUSE else ())


def test_requests_with_the_same_loras_share_steps_if_they_have_one_size() -> None:
    alike = [request(str(index), steps=8, loras=(INK,)) for index in range(6)]
    trace = simulate(alike, "tilework", num_devices=1, costs=with_loras(batched()))
    assert max(len(run.work.job_ids) for run in trace.runs) > 1
    sizes = [request(str(index), steps=8, side=(64, 128)[index % 2], loras=(INK,)) for index in range(6)]
    trace = simulate(sizes, "tilework", num_devices=1, costs=with_loras(batched()))
    of_job = jobs(trace)
    steps = [run.work for run in trace.runs if run.work.stage.name == DIFFUSE]
    assert all(len({of_job[job_id].shape for job_id in work.job_ids}) == 1 for work in steps)


def test_a_lora_that_many_ask_for_stays_rather_than_one_that_came_later() -> None:
    """A device has room for two LoRAs of three."""
    wash = UsedLora("wash", 1.0)
    costs = with_loras(batched(), size=100)
    loras = {**costs.loras[PIPELINE], "wash": Lora(changes=frozenset({"denoiser"}), component=Component("wash", 100))}
    costs = replace(costs, loras={PIPELINE: loras}, memory_bytes=1200)
    uses = [INK] * 6 + [CHALK, wash, INK]
    requests = [request(str(index), 3.0 * index, steps=4, loras=(one,)) for index, one in enumerate(uses)]
    trace = simulate(requests, "tilework", num_devices=1, costs=costs)
    loaded = [digest for one in trace.loads for digest in one.load.components]
    assert loaded.count("ink") == 1, "it was used before chalk was"


@pytest.mark.parametrize("policy", ["tilework", "deadline-lru", "edf"])
def test_a_lora_is_loaded_where_a_request_uses_it_and_dropped_for_another(policy: str) -> None:
    requests = [request(str(index), 3.0 * index, steps=4, loras=((INK,), (CHALK,))[index % 2]) for index in range(4)]
    trace = simulate(requests, policy, num_devices=1, costs=with_loras(batched(), size=100))
    assert len(finished(trace)) == 4
    loaded = [digest for one in trace.loads for digest in one.load.components]
    assert loaded.count("denoiser") == 1, "what the requests have in common stays"
    assert (loaded.count("ink"), loaded.count("chalk")) == (2, 2)
