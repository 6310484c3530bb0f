"""Offloading by layers: diffusers' group offloading, with which a layer's weights are on the device while it runs."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tilework.pipelines.components import modules_of, weights_of
from tilework.pipelines.setup.host_memory import free_host_bytes

_log = logging.getLogger(__name__)
_SPARE_BYTES = 4e9
"""Bytes of the host's memory that pinned weights leave to everything else."""


def offload_layers(pipeline: Any, device: torch.device) -> None:
    """Keep the weights of all components on the host, and bring each layer's to the device for its run.

    On CUDA the next layer's weights are copied meanwhile, from pinned memory. A host without room for pinned copies of
    all weights pins those of a layer when they are copied, from the mapped files of the model: the same images, later.
    It is `enable_group_offload` of the stock pipeline.
    """
    on_cuda = device.type == "cuda"
    pipeline.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=on_cuda,
        low_cpu_mem_usage=on_cuda and not _has_room(pipeline, torch.cuda.device_count()),
    )


def _has_room(pipeline: Any, num_cards: int) -> bool:
    """Return whether the host can pin all weights of a pipeline once for each card: each may have a worker."""
    weights = (tensor for module in modules_of(pipeline).values() for tensor in weights_of(module))
    needed = num_cards * sum(map(_pinned_bytes, weights)) + _SPARE_BYTES
    if needed <= (free := free_host_bytes()):
        return True
    _log.warning(
        "the host has %.0f GB free, and pinned copies of all layers take %.0f GB: layers are pinned when they are "
        "copied, which is slower; with more memory, or --quantize, that is not needed",
        free / 1e9,
        needed / 1e9,
    )
    return False


def _pinned_bytes(tensor: torch.Tensor) -> int:
    """Return the pinned bytes of a tensor: torch rounds each pinned block up to a power of two."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.nbytes else 0
