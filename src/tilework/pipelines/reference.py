"""The stock pipeline, set up to give exactly the images that a server gives."""

from __future__ import annotations

from typing import Any

from tilework.core.model import ModelSource
from tilework.pipelines.loading import load_stock, quietly
from tilework.pipelines.numerics import pin_numerics
from tilework.pipelines.setup.quantize import parse_schemes


def reference(
    path: str,
    *,
    adapter: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int = 1,
    vae_tiling: bool = False,
    quantize: str | None = None,
    offload: str = "none",
    attention: str = "native",
    compiles: bool = False,
) -> Any:
    """Load the stock diffusers pipeline of a model so that its images equal a server's, bit for bit.

    A plain `from_pretrained` differs in two respects, each of which changes last bits on CPUs. It leaves weights in
    the mapped file, where they lie unaligned, so that other kernels are chosen; and torch chooses the number of threads
    by the number of cores. See docs/exactness.md for what else has to be equal.

    `path` is a diffusers directory, a hub id, "shapes" or "shapes-motion"; `adapter`, `device`, `dtype`, `threads`,
    `vae_tiling`, `quantize`, `offload`, `attention` and `compiles` (--compile) are those of the server. Sets the number
    of threads, the precision of float32 and the attention back end for the whole process, so call it before anything is
    computed.

    Raises:
        ModelError: the model cannot be loaded.
    """
    pin_numerics(threads, attention)
    source = ModelSource(
        path=path,
        adapter=adapter,
        device=device,
        dtype=dtype,
        threads=threads,
        vae_tiling=vae_tiling,
        quantize=() if quantize is None else parse_schemes(quantize),
        offload=offload,
        attention=attention,
        compiles=compiles,
    )
    with quietly():
        return load_stock(source)
