"""A stock call whose steps several processes share ends as one that a single process makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from quick import quick
from ranks import Ranks
from tilework.core.comm import Comm, GroupBroken
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.stock import guidance_halves, shared_calls
from tilework.pipelines.stock.answers import rebuilt
from tilework.pipelines.stock.component_calls import ComponentCall, Role
from tilework.pipelines.stock.guidance_halves import GuidanceHalves
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo import requests
from zoo.registry import ZOO, build

TOLERANCE = 1e-5
QUICK = ("qwen-image", "wan22")
ALL = (*QUICK, "z-image", "cogvideox", "flux2-klein-base", "ltx", "chroma", "hunyuan-video15")
ONE_PASS = ("z-image", "wan22", "ltx")
"""Models whose shared steps happen to give the same bits, or may."""
Moved = tuple[dict[str, Any], dict[str, Any]]
"""What the encoding wrote, and a state that was exported."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    tiny.prepare()
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def made_step(comm: Comm | None, name: str, moved: Moved | None) -> Moved:
    """The next step of a request, on a group or alone; it comes from another process, or has not begun."""
    made = StockPipeline(build(ZOO[name]), name, {}, "")
    spec, (_, loop, *_) = requests.spec_of(ZOO[name], made, seed=1), made.info.stages
    if moved is None:
        values, state = requests.begin(made, spec)
    else:
        values, exported = map(requests.shipped, moved)
        state = made.restore(loop.name, spec, values, exported)
    if comm is not None:
        made.join(comm, spec)
    made.step([state])
    made.parallel.leave()
    return requests.shipped(values), requests.shipped(made.export(state))


def latents(moved: Moved) -> Tensor:
    """What the sampler gave in the latest step."""
    answer = rebuilt(moved[1]["samplers"][0])
    return answer[0] if isinstance(answer, tuple) else answer["prev_sample"]


def drawn(ranks: Ranks, name: str, degrees: tuple[int, ...]) -> Tensor:
    """The latents after a step at each of these degrees, the same on all ranks."""
    moved: Moved | None = None
    for degree in degrees:
        results = [made_step(None, name, moved)] if degree == 1 else ranks.run(degree, made_step, name, moved)
        assert all(torch.equal(latents(one), latents(results[0])) for one in results)
        moved = results[0]
    assert moved is not None
    return latents(moved)


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("name", quick(QUICK, ALL))
def test_a_request_whose_degree_changes_differs_by_rounding_only(ranks: Ranks, name: str) -> None:
    steps = ZOO[name].inputs["num_inference_steps"]
    alone, elastic = drawn(ranks, name, (1, 1, 1, 1)[:steps]), drawn(ranks, name, (1, 2, 3, 1)[:steps])
    assert not torch.equal(elastic, alone) or name in ONE_PASS, "nothing was shared"
    assert difference(elastic, alone) <= TOLERANCE


def test_a_broken_exchange_is_seen(ranks: Ranks) -> None:
    alone = made_step(None, "qwen-image", None)
    (spoilt, *_) = ranks.run(3, spoilt_step, "qwen-image")
    assert difference(latents(spoilt), latents(alone)) > 10 * TOLERANCE


def spoilt_step(comm: Comm, name: str) -> Moved:
    """A step with an attention that is handed its own tokens only."""
    attend = Parallel.attend
    Parallel.attend = lambda self, query, key, value, *_, **__: value  # type: ignore[method-assign]
    try:
        return made_step(comm, name, None)
    finally:
        Parallel.attend = attend  # type: ignore[method-assign]


def shown_step(comm: Comm | None, name: str, moved: Moved) -> tuple[Moved, bytes]:
    """The next step with a preview, which the first rank alone draws."""
    made, images = StockPipeline(build(ZOO[name]), name, {}, ""), []
    spec = replace(requests.spec_of(ZOO[name], made, seed=1), preview_every=1)
    values, exported = map(requests.shipped, moved)
    state = made.restore(made.info.stages[1].name, spec, values, exported)
    if comm is not None:
        made.join(comm, spec)
    leads = comm is None or comm.rank == 0
    made.step([state], watch=lambda _, draw: images.append(draw().pixels) if leads else None)
    made.parallel.leave()
    return (requests.shipped(values), requests.shipped(made.export(state))), b"".join(images)


@pytest.mark.parametrize("name", ["qwen-image", pytest.param("wan22", marks=pytest.mark.exhaustive)])
def test_in_a_group_the_first_draws_previews_and_nothing_changes(ranks: Ranks, name: str) -> None:
    first = made_step(None, name, None)
    plain = ranks.run(2, made_step, name, first)
    (of_leader, drawn_there), (of_other, nothing) = ranks.run(2, shown_step, name, first)
    assert torch.equal(latents(of_leader), latents(plain[0]))
    assert torch.equal(latents(of_other), latents(plain[0]))
    _, drawn_alone = shown_step(None, name, first)
    assert not nothing
    together, alone = (np.frombuffer(one, np.uint8).astype(int) for one in (drawn_there, drawn_alone))
    assert np.abs(together - alone).max() <= 2


# Two passes of one step, each by half of a group.


@pytest.mark.parametrize("name", ["qwen-image", "wan22", pytest.param("chroma", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("degree", [2, 4])
def test_the_halves_of_a_group_make_a_pass_each(ranks: Ranks, name: str, degree: int) -> None:
    first = made_step(None, name, None)
    alone = latents(made_step(None, name, first))
    for halved, num_trades in ranks.run(degree, counted_step, name, first):
        assert num_trades == 1
        if degree == 2:
            assert torch.equal(latents(halved), alone), "neither pass was shared"
        assert difference(latents(halved), alone) <= TOLERANCE


def counted_step(comm: Comm, name: str, moved: Moved) -> tuple[Moved, int]:
    """A step, and how many answers the halves traded."""
    trades: list[int] = []
    trade = Parallel.trade

    def counted(self: Parallel, output: Tensor) -> list[Tensor]:
        trades.append(1)
        return trade(self, output)

    Parallel.trade = counted  # type: ignore[method-assign]
    try:
        return made_step(comm, name, moved), len(trades)
    finally:
        Parallel.trade = trade  # type: ignore[method-assign]


class Doubles(nn.Module):
    """A denoiser."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        return (2 * hidden_states,)


@pytest.mark.parametrize("how", ["read", "read through a view", "given to the second call", "given to the sampler"])
def test_an_answer_that_is_read_early_is_there(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_calls, "ROWS", {"Doubles": frozenset({"hidden_states"})})
    denoiser, given = Doubles(), torch.arange(4.0).reshape(1, 4)
    halves = GuidanceHalves(Parallel(), lambda _: [(torch.zeros(1, 4),), (torch.zeros(1, 4),)])

    def ask(tensor: Tensor, role: Role = Role.DENOISER) -> Tensor:
        (answer,) = halves.answer(ComponentCall(denoiser, "denoiser", "forward", role, denoiser, (tensor,), {}))
        return answer

    first = ask(given)
    assert halves.is_open
    match how:
        case "read":
            with halves:
                result = first + 0
        case "read through a view":
            with halves:
                part = first[:, 2:]
                assert halves.is_open
                result = torch.cat([given[:, :2] * 2, part], dim=1)
        case "given to the second call":
            result = ask(first) / 2
            assert guidance_halves.tensors_of(first) == [first]
        case _:
            result = ask(first, Role.SAMPLER) / 2
    assert torch.equal(result, 2 * given)


def test_a_request_whose_group_breaks_between_its_passes_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StockPipeline(build(ZOO["qwen-image"]), "qwen-image", {}, "")
    _, state = requests.begin(made, requests.spec_of(ZOO["qwen-image"], made, seed=1))
    made.step([state])

    def broken(self: Parallel) -> None:
        raise GroupBroken

    monkeypatch.setattr(Parallel, "halved", broken)
    monkeypatch.setattr(made.parallel, "degree", 2)
    with pytest.raises(GroupBroken):
        made.step([state])
    assert state.is_torn, "the first pass was answered with zeros"
