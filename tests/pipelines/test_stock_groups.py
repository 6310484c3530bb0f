"""A stock call that several processes share for some of its steps ends as one that a single process makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tiny
from ranks import Ranks
from tilework.core.comm import Comm
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.stock.answers import rebuilt
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo import requests
from zoo.registry import ZOO, build

TOLERANCE = 1e-5
MODELS = ("qwen-image", "z-image", "flux2-klein-base", "wan22", "ltx", "chroma", "hunyuan-video15", "cogvideox")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    tiny.prepare()
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def latents(comm: Comm | None, name: str, together: tuple[int, ...]) -> tuple[Tensor, int]:
    """What the sampler gives in the last step, if the steps of these indices are made `together`."""
    made = StockPipeline(build(ZOO[name]), name, {}, "")
    spec = requests.spec_of(ZOO[name], made, seed=1)
    _, state = requests.begin(made, spec)
    while state.steps_done < state.num_steps:
        if comm is not None and state.steps_done in together:
            made.join(comm, spec)
        made.step([state])
        made.parallel.leave()
    answer = rebuilt(state.walk.mark().samplers[0])
    return (answer[0] if isinstance(answer, tuple) else answer["prev_sample"]), made.info.max_degree


@pytest.mark.parametrize("name", MODELS)
def test_a_group_that_joins_and_leaves_changes_nothing_but_rounding(ranks: Ranks, name: str) -> None:
    alone, max_degree = latents(None, name, ())
    assert max_degree > 1
    for size in (2, 3):
        results = [result for result, _ in ranks.run(size, latents, name, (1, 2))]
        assert all(torch.equal(result, results[0]) for result in results)
        assert not torch.equal(results[0], alone) or size > 3 or name in ("z-image", "wan22", "ltx"), (
            "nothing was shared"
        )
        assert (results[0] - alone).abs().max() <= TOLERANCE * alone.abs().max()


def test_a_broken_exchange_is_seen(ranks: Ranks) -> None:
    alone, _ = latents(None, "qwen-image", ())
    (spoilt, _), *_ = ranks.run(2, spoilt_latents, "qwen-image")
    assert (spoilt - alone).abs().max() > 10 * TOLERANCE * alone.abs().max()


def spoilt_latents(comm: Comm, name: str) -> tuple[Tensor, int]:
    """The same with an attention that is handed its own tokens only."""
    attend = Parallel.attend
    Parallel.attend = lambda self, query, key, value, *_, **__: value  # type: ignore[method-assign]
    try:
        return latents(comm, name, (1,))
    finally:
        Parallel.attend = attend  # type: ignore[method-assign]
