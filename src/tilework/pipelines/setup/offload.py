"""Offloading by layers: diffusers' group offloading, with which a layer's weights are on the device while it runs."""

from __future__ import annotations

from typing import Any

import torch


def offload_layers(pipeline: Any, device: torch.device) -> None:
    """Keep the weights of all components on the host, and bring each layer's to the device for its run.

    On CUDA the next layer's are copied meanwhile, from pinned memory. It is `enable_group_offload` of the stock
    pipeline.
    """
    pipeline.enable_group_offload(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=device.type == "cuda",
    )
