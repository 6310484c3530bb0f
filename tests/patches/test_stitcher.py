"""The stitcher: normalised patches in their frames are windows of normalised pictures, by torch and by the kernel.

The kernel runs on a GPU where there is one, otherwise in Triton's interpreter. What the interpreter accepts need not
compile, so it is compiled for GPUs as well, which needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from patches.kernel_modules import load_kernels
from patches.pictures import TOLERANCE, assert_all_close, draw
from tilework.core.packing import Size
from tilework.patches import operators, stitcher
from tilework.patches.csp import Csp
from tilework.patches.layout import PatchLayout
from tilework.patches.operators import statistics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []  # `make test-gpu` compiles and runs the kernel.
CPU = torch.device("cpu")

Mix = tuple[Size, tuple[Size, ...]]
"""The sides of the patches, and how many rows and columns of them each picture has."""

mixes = st.tuples(
    st.tuples(st.integers(1, 13), st.integers(1, 13)),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3).map(tuple),
)
channels = st.sampled_from([6, 12])  # In three groups; a tile of the kernel has eight.
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])

Stitch = Callable[..., Tensor]
"""As `stitcher.stitch`."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stitch_by_kernel() -> Stitch:
    if DEVICE.type == "cuda":
        return stitcher.stitch
    kernel = load_kernels("tilework.patches.stitch_kernel", interpreted=True)

    def stitch(norm: nn.GroupNorm, patches: Tensor, csp: Csp, *, silu: bool) -> Tensor:
        result = kernel.stitch(patches, *statistics(norm, patches, csp), norm.weight, norm.bias, csp, silu=silu)
        assert isinstance(result, Tensor)
        return result

    return stitch


def normalisation(num_channels: int) -> nn.GroupNorm:
    torch.manual_seed(num_channels)
    norm = nn.GroupNorm(3, num_channels, eps=1e-3).requires_grad_(False)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def lay_out(mix: Mix, device: torch.device = CPU) -> PatchLayout:
    (rows, columns), grids = mix
    sizes = tuple((down * rows, right * columns) for down, right in grids)
    return PatchLayout(sizes, Csp.of(sizes, (rows, columns), device))


def windows(layout: PatchLayout, pictures: Sequence[Tensor]) -> Tensor:
    """What a 3x3 convolution sees of each patch: its part of the picture, zeros around which; (P, C, h + 2, w + 2)."""
    rows, columns = layout.csp.patch
    return torch.cat(
        [
            pad(picture, (1, 1, 1, 1)).unfold(1, rows + 2, rows).unfold(2, columns + 2, columns).flatten(1, 2)
            for picture in layout.arrange(pictures)
        ],
        dim=1,
    ).transpose(0, 1)


def check(stitch: Stitch, device: torch.device, mix: Mix, num_channels: int, dtype: torch.dtype, is_silu: bool) -> None:
    layout, norm = lay_out(mix, device), normalisation(num_channels).to(device, dtype)
    pictures = [picture.to(device, dtype) for picture in draw(layout.sizes, len(layout.sizes), num_channels)]
    result = stitch(norm, layout.split(pictures), layout.csp, silu=is_silu)
    norm.float()  # Its weights stay rounded.
    normed = [norm(picture[None].float())[0] for picture in pictures]
    expected = windows(layout, [silu(picture) for picture in normed] if is_silu else normed)
    assert result.shape == expected.shape
    assert result.dtype == dtype
    error = (result.float() - expected).abs().max() / expected.abs().max()
    assert error <= max(2 * torch.finfo(dtype).eps, TOLERANCE)
    outside = windows(layout, [torch.ones_like(picture) for picture in pictures]) == 0
    assert not result[outside].any()


@given(mixes, channels, dtypes, st.booleans())
def test_any_mix_by_torch(mix: Mix, num_channels: int, dtype: torch.dtype, is_silu: bool) -> None:
    check(stitcher.stitch, CPU, mix, num_channels, dtype, is_silu)


@pytest.mark.slow
@settings(max_examples=40)
@given(mix=mixes, num_channels=channels, dtype=dtypes, is_silu=st.booleans())
def test_any_mix_by_the_kernel(
    stitch_by_kernel: Stitch, mix: Mix, num_channels: int, dtype: torch.dtype, is_silu: bool
) -> None:
    check(stitch_by_kernel, DEVICE, mix, num_channels, dtype, is_silu)


MIXES: dict[str, Mix] = {
    "nobody around": ((12, 20), ((1, 1),)),
    "all eight neighbours": ((4, 6), ((3, 3),)),
    "of one row, of one column": ((4, 4), ((1, 4), (4, 1))),
    "patches of one pixel": ((1, 1), ((3, 4), (2, 1))),
    "patches of several tiles": ((24, 36), ((1, 1), (2, 1))),
    "two pictures of one size": ((8, 8), ((2, 1), (1, 1), (2, 1))),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_each_kind_of_edge_by_the_kernel(stitch_by_kernel: Stitch, mix: Mix) -> None:
    check(stitch_by_kernel, DEVICE, mix, 12, torch.float32, True)


@pytest.mark.slow
@pytest.mark.parametrize(("num_channels", "side"), [(6, 3), (3, 1), (96, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_by_the_kernel(num_channels: int, side: int, dtype: torch.dtype) -> None:
    """Of values far from zero, whose squares would cancel; the last shape takes several readings."""
    kernel = load_kernels("tilework.patches.stitch_kernel", interpreted=DEVICE.type == "cpu")
    patches = (1000 + torch.randn(2, num_channels, side, side)).to(DEVICE, dtype)
    mean, variance = kernel.moments(patches, 3, 1e-3)
    exact = patches.double().view(2, 3, -1)
    torch.testing.assert_close(mean.double(), exact.mean(dim=2), rtol=1e-5, atol=0)
    torch.testing.assert_close(variance.double(), exact.var(dim=2, correction=0) + 1e-3, rtol=1e-3, atol=1e-6)


def test_patches_of_a_card_have_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_kernels", lambda: "the kernels")
    there: Any = SimpleNamespace(is_cuda=True)
    assert operators.kernels_for(there) == "the kernels"
    assert operators.kernels_for(torch.ones(1)) is None


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_kernel_compiles_for_devices(
    dtype: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = load_kernels("tilework.patches.stitch_kernel", interpreted=False)
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    constants = {"SILU": True, "PIXELS": kernel._PIXELS, "CHANNELS": kernel._CHANNELS}
    kinds = dict.fromkeys(("patches", "result", "weight", "bias"), f"*{dtype}")
    kinds |= dict.fromkeys(("mean", "variance"), "*fp32") | dict.fromkeys(("owners", "neighbours"), "*i64")
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel._stitch.arg_names}
    target = GPUTarget("cuda", capability, 32)
    source = compiler.ASTSource(kernel._stitch, signature, constants)
    assert compiler.compile(source, target=target).asm["cubin"]
    values = {"patches": f"*{dtype}", "mean": "*fp32", "variance": "*fp32", "num_values": "i32", "epsilon": "fp32"}
    size = {"VALUES": kernel._VALUES}
    source = compiler.ASTSource(kernel._moments, values | dict.fromkeys(size, "constexpr"), size)
    assert compiler.compile(source, target=target).asm["cubin"]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="it has started")
def test_where_triton_cannot_start_torch_stitches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a host without a C compiler."""
    driver = pytest.importorskip("triton.runtime.driver").driver
    find = operators._kernels.__wrapped__
    monkeypatch.setattr(type(driver), "active", SimpleNamespace(get_current_device=lambda: 0))
    assert find() is not None

    def fail() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(type(driver), "active", SimpleNamespace(get_current_device=fail))
    assert find() is None
    assert "Failed to find C compiler" in caplog.text


@given(mixes, channels)
def test_a_convolution_of_activated_patches_is_one_of_whole_pictures(mix: Mix, num_channels: int) -> None:
    layout, norm = lay_out(mix), normalisation(num_channels)
    convolution = nn.Conv2d(num_channels, 4, 3, padding=1).requires_grad_(False)
    pictures = draw(layout.sizes, 0, num_channels)
    results = layout.assemble(layout.convolve_activated(convolution, norm, layout.split(pictures)))
    assert_all_close(results, [convolution(silu(norm(picture[None])))[0] for picture in pictures])
