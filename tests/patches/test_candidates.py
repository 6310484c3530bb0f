"""Kernels that no GPU has measured yet, interpreted on the CPU: torch's operators are the reference."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import layer_norm

from patches.kernel_modules import load_kernels
from patches.pictures import TOLERANCE, draw
from patches.test_stitcher import MIXES, Mix, lay_out, normalisation
from tilework.patches import stitcher
from tilework.patches.operators import statistics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    torch.set_num_threads(1)
    return load_kernels("suite.kernels.candidates", interpreted=True)


# Each program is interpreted by itself, which takes long.
FEW = {name: MIXES[name] for name in ("all eight neighbours", "of one row, of one column")}


@pytest.mark.parametrize("mix", FEW.values(), ids=FEW)
def test_edges_that_patches_write_are_those_that_they_fetch(kernels: ModuleType, mix: Mix) -> None:
    layout, norm = lay_out(mix), normalisation(12)
    patches = layout.split(draw(layout.sizes, 3, 12))
    moments = statistics(norm, patches, layout.csp)
    result = kernels.stitch_scattered(patches, *moments, norm.weight, norm.bias, layout.csp, silu=True)
    expected = stitcher.stitch(norm, patches, layout.csp, silu=True)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("mix", FEW.values(), ids=FEW)
def test_patches_of_pictures_and_back(kernels: ModuleType, mix: Mix) -> None:
    csp = lay_out(mix).csp
    pictures = draw(lay_out(mix).sizes, 5, 3)
    pixels = torch.cat([pictures[index].flatten(1) for index in csp.order], dim=1)
    places, _ = csp._pixels(csp.patch)
    patches = kernels.split(pixels, places, csp.num_patches)
    assert torch.equal(patches, csp.split(pictures).flatten(2))
    assert torch.equal(kernels.assemble(patches, places), pixels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [8, 100])
def test_modulation_by_the_picture_of_each_patch(kernels: ModuleType, dtype: torch.dtype, channels: int) -> None:
    torch.manual_seed(channels)
    owners = torch.tensor([0, 0, 2, 1, 1])
    tokens = (3 + torch.randn(5, 4, channels)).to(dtype)
    shift, scale = torch.randn(2, 3, channels).to(dtype)
    result = kernels.modulate(tokens, shift, scale, owners, 1e-6)
    of_patch = [rows.float()[owners][:, None] for rows in (shift, scale)]
    expected = layer_norm(tokens.float(), (channels,), eps=1e-6) * (1 + of_patch[1]) + of_patch[0]
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("name", ["_scatter", "_move", "_modulate"])
def test_they_compile_for_an_h100(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(load_kernels("suite.kernels.candidates", interpreted=False), name)
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    constants = {"SILU": True, "SPLIT": True, "PIXELS": 128, "VALUES": 1024}
    constants["CHANNELS"] = 8 if name == "_scatter" else 2048
    kinds = dict.fromkeys(("patches", "result", "weight", "bias", "tokens", "shift", "scale", "source"), "*bf16")
    kinds |= dict.fromkeys(("mean", "variance"), "*fp32") | {"epsilon": "fp32"}
    kinds |= dict.fromkeys(("owners", "neighbours", "places"), "*i64") | dict.fromkeys(constants, "constexpr")
    signature = {one: kinds.get(one, "i32") for one in kernel.arg_names}
    used = {one: value for one, value in constants.items() if one in signature}
    source = compiler.ASTSource(kernel, signature, used)
    assert compiler.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
