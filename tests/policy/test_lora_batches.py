"""Requests with different LoRAs never share a work, under any policy; those with equal ones may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from builders import PIPELINE, POLICIES, batched, request, simulate
from stages import DECODE, DIFFUSE, ENCODE
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.lora import Lora, UsedLora
from tilework.core.request import Request, Status
from tilework.cost.table_costs import TableCosts
from tilework.sim.trace import Trace
from tilework_lab.optimum.bound import due_requests

SHARING = {"tilework", "tetriserve", "tetriserve-early", "patchedserve", "mixed-cache", "nirvana"}
NEEDS = {ENCODE: "text", DIFFUSE: "denoiser", DECODE: "vae"}
GRAPH = Graph(PIPELINE, tuple(replace(one, components=(NEEDS[one.name],)) for one in latent_diffusion(PIPELINE).specs))
LORA = Lora(changes=frozenset({"denoiser"}), slowdown=1.5)
COSTS = replace(batched(), graphs={PIPELINE: GRAPH}, loras={PIPELINE: {"ink": LORA, "chalk": LORA}})
USES = (), (UsedLora("ink", 1.0),), (UsedLora("ink", 0.5),), (UsedLora("chalk", 1.0), UsedLora("ink", 1.0))


def crowd(*uses: Sequence[UsedLora], sides: Sequence[int] = (128,)) -> list[Request]:
    """Twelve requests at once, with these LoRAs and sizes in turn."""
    return [
        request(str(n), n / 100, slo_s=30, loras=tuple(uses[n % len(uses)]), side=sides[n % len(sides)])
        for n in range(12)
    ]


def shared(trace: Trace) -> list[list[Request]]:
    """The requests of each work of steps that several share. All are done."""
    assert all(ending.status is Status.DONE for ending in trace.endings)
    asked = {ending.job_id: ending.request for ending in trace.endings}
    steps = [run.work.job_ids for run in trace.runs if run.work.stage.name == DIFFUSE]
    return [[asked[job_id] for job_id in job_ids] for job_ids in steps if len(job_ids) > 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_members_of_a_work_have_equal_loras(policy: str) -> None:
    groups = shared(simulate(crowd(*USES), policy, num_devices=1, costs=COSTS))
    assert all(len({one.loras for one in group}) == 1 for group in groups)


@pytest.mark.parametrize("policy", sorted(SHARING))
def test_requests_with_equal_loras_share(policy: str) -> None:
    groups = shared(simulate(crowd(USES[1]), policy, num_devices=1, costs=COSTS))
    assert groups, "none shares"


@pytest.mark.parametrize("policy", sorted(SHARING))
def test_sizes_with_loras_do_not_share_although_they_would_without(policy: str) -> None:
    groups = shared(simulate(crowd(USES[1], sides=(64, 128)), policy, num_devices=1, costs=COSTS))
    assert all(len({one.shape for one in group}) == 1 for group in groups)


def test_the_default_policy_mixes_sizes_without_loras() -> None:
    """Or the tests of sizes prove nothing."""
    groups = shared(simulate(crowd(USES[0], sides=(64, 128)), "tilework", num_devices=1, costs=COSTS))
    assert any(len({one.shape for one in group}) > 1 for group in groups)


def test_the_bound_of_a_workload_counts_what_loras_take() -> None:
    plain, inked = crowd(*USES[:2])[:2]
    times = [[piece.shortest_ns for piece in one.pieces] for one in due_requests([plain, inked], TableCosts(COSTS), 1)]
    assert times[1] == [round(1.5 * times[0][0])], "steps are all that these tables have"
