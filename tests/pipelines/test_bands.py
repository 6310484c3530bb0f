"""A decode that ranks share, each with a band of rows or with some of the tiles, is the one of a single device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tiny
from pipelines.test_clips import BUILDERS, built, in_parts, latents_of, pictures, told, with_tiles
from quick import quick
from ranks import Counting, Ranks
from tilework.core.comm import Comm
from tilework.pipelines.bands import bands
from tilework.pipelines.bands.bands import in_bands
from tilework.pipelines.bands.decoders import ATTENTIONS, is_known
from tilework.pipelines.clips.decoding import decode
from tilework.pipelines.stock.stock_pipeline import StockPipeline
from zoo import requests
from zoo.autoencoders import kl, kl_flux2, kl_qwen, kl_wan
from zoo.hunyuan import kl_hunyuan
from zoo.ltx import kl_ltx
from zoo.registry import ZOO, build

TOLERANCE = 1e-5
PICTURES = {"kl": kl, "kl-flux2": kl_flux2, "kl-qwen": kl_qwen}
BANDS = {**BUILDERS, **PICTURES}
QUICK = ("wan", "kl")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    tiny.prepare()
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@torch.no_grad()
def decoded(comm: Comm | None, name: str, rows: int) -> Tensor:
    """Pictures or frames in full precision; `name` of `BANDS`."""
    if name in PICTURES:
        torch.manual_seed(0)
        vae: Any = PICTURES[name]().eval()
        sizes = (vae.config.latent_channels,) if name != "kl-qwen" else (vae.config.z_dim, 1)
        latents = torch.randn(1, *sizes, rows, 5, generator=torch.Generator().manual_seed(1))
        whole: Tensor = bands.decode(vae, comm, vae.decode, latents).sample
        return whole
    vae, decoder = built(name)
    latents = latents_of(vae, decoder, 1 + 2 * decoder.scales(vae)[0], rows, 5)
    with in_bands(vae, comm, latents) as own:
        chunks = list(decoder.whole(vae, own.own(latents), *told(vae)))
        return own.joined(torch.cat(chunks, dim=2))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def test_every_known_decoder_is_tried() -> None:
    assert {type(build()).__name__ for build in BANDS.values()} == ATTENTIONS.keys()


@pytest.mark.parametrize("name", quick(QUICK, BANDS))
@pytest.mark.parametrize("degree", quick((3,), (2, 3, 4)))
def test_bands_are_what_one_device_makes(ranks: Ranks, name: str, degree: int) -> None:
    """Seven rows: bands differ in size."""
    alone = decoded(None, name, 7)
    together = ranks.run(degree, decoded, name, 7)
    assert all(torch.equal(one, together[0]) for one in together)
    assert together[0].shape == alone.shape
    assert difference(together[0], alone) <= TOLERANCE


@pytest.mark.parametrize("broken", quick(("padded",), ("padded", "_group_norm", "_made_whole")))
def test_what_crosses_the_edges_of_bands_is_needed(ranks: Ranks, broken: str) -> None:
    alone, (spoilt, *_) = decoded(None, "kl", 7), ranks.run(3, spoilt_decode, broken)
    assert difference(spoilt, alone) > 10 * TOLERANCE


def spoilt_decode(comm: Comm, broken: str) -> Tensor:
    """Each band alone, in one respect."""
    with pytest.MonkeyPatch.context() as patch:
        match broken:
            case "padded":

                def padded(_: Any, rows: Tensor, *how: Any) -> Tensor:
                    return functional.pad(rows, *how)

                patch.setattr(bands.Bands, "padded", padded)
            case "_group_norm":
                patch.delitem(bands._ANSWERS, functional.group_norm)  # type: ignore[arg-type]
            case _:
                patch.setattr(bands, "attentions_of", lambda _: ())
                patch.delitem(bands._ANSWERS, functional.scaled_dot_product_attention)  # type: ignore[arg-type]
        return decoded(comm, "kl", 7)


def counted_decode(comm: Comm, name: str, rows: int) -> tuple[Tensor, int]:
    counting = Counting(comm)
    return decoded(counting, name, rows), counting.num_calls  # type: ignore[arg-type]


def test_fewer_rows_than_ranks_are_decoded_by_each(ranks: Ranks) -> None:
    alone = decoded(None, "kl", 3)
    for found, num_calls in ranks.run(4, counted_decode, "kl", 3):
        assert torch.equal(found, alone)
        assert num_calls == 0
    assert all(num_calls > 0 for _, num_calls in ranks.run(3, counted_decode, "kl", 3))


def test_what_is_not_known_is_not_shared() -> None:
    assert is_known(kl_wan())
    assert not is_known(kl_hunyuan()), "its attention is cut out of a mask of all frames"
    noisy = kl_ltx()
    noisy.register_to_config(decoder_inject_noise=(False, True, False, False, False))
    assert not is_known(noisy), "each rank would draw other noise"


@pytest.mark.parametrize(
    "layer", [torch.nn.Conv2d(4, 4, 3, stride=2, padding=1), torch.nn.ZeroPad2d((0, 1, 0, 1)), torch.nn.AvgPool2d(2)]
)
def test_a_layer_that_is_not_known_is_refused(layer: torch.nn.Module) -> None:
    vae = kl()
    vae.decoder.conv_act = layer
    with pytest.raises(RuntimeError, match="use degree 1"), in_bands(vae, Echo(), torch.zeros(1, 4, 4, 4)):  # type: ignore[arg-type]
        layer(torch.zeros(1, 4, 4, 4))


class Echo:
    """A group of two whose other rank is never asked."""

    rank, size = 0, 2


# Tiles.


@torch.no_grad()
def tiled(comm: Comm | None, name: str, dtype: torch.dtype) -> Tensor:
    vae, decoder = built(name, dtype)
    latents = latents_of(vae, decoder, 1 + decoder.scales(vae)[0], 8, 8)
    with_tiles(vae, 4)
    return decode(decoder, vae, pictures, latents, *told(vae), comm=comm)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("wan", torch.float32),
        pytest.param("wan", torch.bfloat16, marks=pytest.mark.exhaustive),
        *(pytest.param(name, torch.float32, marks=pytest.mark.exhaustive) for name in BUILDERS if name != "wan"),
    ],
)
def test_tiles_of_several_ranks_are_those_of_one_bit_for_bit(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    """There are nine: two, three and four ranks share them unevenly."""
    alone = tiled(None, name, dtype)
    vae, decoder = built(name, dtype)
    latents = latents_of(vae, decoder, 1 + decoder.scales(vae)[0], 8, 8)
    with_tiles(vae, 4)
    with torch.no_grad():
        assert torch.equal(in_parts(vae, latents), alone)
    for degree in (2, 3, 4):
        assert all(torch.equal(found, alone) for found in ranks.run(degree, tiled, name, dtype))


def test_each_rank_decodes_its_share_of_the_tiles(ranks: Ranks) -> None:
    assert ranks.run(4, num_tiles, "wan") == [3, 2, 2, 2]


def num_tiles(comm: Comm, name: str) -> int:
    kind, calls = type(built(name)[0].decoder), list[int]()
    forward = kind.forward

    def counted(self: Any, *args: Any, first_chunk: bool, **kwargs: Any) -> Tensor:
        calls.extend([1] * first_chunk)
        made: Tensor = forward(self, *args, first_chunk=first_chunk, **kwargs)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", counted)
        tiled(comm, name, torch.float32)
    return len(calls)


# Requests.

CLIPS = ("wan22", "cogvideox", "ltx", "ltx2", "hunyuan-video15", "modular-wan22")
FAMILIES = (*CLIPS, "qwen-image", "flux2-klein")


def drawn(comm: Comm | None, name: str) -> tuple[np.ndarray, int]:
    """A request whose decode a group shares, and how many messages that took."""
    made = StockPipeline(build(ZOO[name]), name, {}, "")
    spec = requests.spec_of(ZOO[name], made, 1)
    _, state = requests.begin(made, spec)
    while state.steps_done < state.num_steps:
        made.step([state])
    latents = made.finish(state)
    counting = None if comm is None else Counting(comm)
    if counting is not None:
        assert made.info.stages[2].degrees is None
        made.parallel.join(counting, guided=False)  # type: ignore[arg-type]
    pixels = requests.pixels(made, spec, requests.shipped(latents))
    made.parallel.leave()
    return pixels, 0 if counting is None else counting.num_calls


@pytest.mark.parametrize("name", quick(("ltx2",), FAMILIES))
def test_a_request_that_is_decoded_by_a_group_is_the_same(ranks: Ranks, name: str) -> None:
    alone, _ = drawn(None, name)
    for found, num_calls in ranks.run(2, drawn, name):
        assert num_calls > 3, "nothing was shared"
        assert np.abs(found.astype(int) - alone).max() <= 1
