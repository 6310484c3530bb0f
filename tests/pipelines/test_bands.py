"""A decode that ranks share, each with a band of rows or with some of the tiles, is the one of a single device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from pipelines.test_clips import BUILDERS, built, latents_of, told, with_tiles
from ranks import Ranks
from tilework.core.comm import Comm
from tilework.pipelines.bands import bands
from tilework.pipelines.bands.bands import in_bands
from tilework.pipelines.bands.decoders import ATTENTIONS, is_known
from tilework.pipelines.clips.decoders import decoder_of
from tilework.pipelines.clips.decoding import decode
from zoo.autoencoders import kl, kl_wan
from zoo.ltx import kl_ltx

TOLERANCE = 1e-5
BANDS = {**BUILDERS, "kl": kl}
QUICK = ("wan", "kl")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    tiny.prepare()
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def built_kl() -> Any:
    torch.manual_seed(0)
    return kl().eval()


@torch.no_grad()
def decoded(comm: Comm | None, name: str, rows: int) -> Tensor:
    """Frames in full precision; `name` of `BANDS`."""
    if name == "kl":
        vae = built_kl()
        latents = torch.randn(1, 4, rows, 5, generator=torch.Generator().manual_seed(1))
        with in_bands(vae, comm, latents) as own:
            return own.joined(vae.decode(own.own(latents), return_dict=False)[0])
    vae, decoder = built(name)
    latents = latents_of(vae, decoder, 1 + 2 * decoder.scales(vae)[0], rows, 5)
    with in_bands(vae, comm, latents) as own:
        chunks = list(decoder.whole(vae, own.own(latents), *told(vae)))
        return own.joined(torch.cat(chunks, dim=2))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def test_every_known_decoder_is_tried() -> None:
    assert {type(build()).__name__ for build in BANDS.values()} == ATTENTIONS.keys()


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_bands_are_what_one_device_makes(ranks: Ranks, name: str, degree: int) -> None:
    """Seven rows: bands differ in size."""
    alone = decoded(None, name, 7)
    together = ranks.run(degree, decoded, name, 7)
    assert all(torch.equal(one, together[0]) for one in together)
    assert together[0].shape == alone.shape
    print(name, degree, difference(together[0], alone))
    assert difference(together[0], alone) <= TOLERANCE
