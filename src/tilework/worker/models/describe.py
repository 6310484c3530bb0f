"""Description of a worker's model for the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from tilework.core.component import Component
from tilework.core.lora import Lora
from tilework.core.model import DecodeMemory, ModelSource, SimulatedSource, Source
from tilework.core.wire.reports import LoadedModel
from tilework.pipelines.clips.plan import decode_memory
from tilework.pipelines.components import weights_of
from tilework.pipelines.family import Family
from tilework.pipelines.identity import architecture, model_identity, stage_keys
from tilework.pipelines.model_index import location
from tilework.worker.hardware import describe_hardware


def described(
    family: Family,
    source: Source,
    components: Mapping[str, Component],
    loras: Mapping[str, Lora],
    refused: Mapping[str, str],
) -> LoadedModel:
    """Describe a model with its components and LoRAs; `refused` are LoRAs that do not belong to it."""
    if isinstance(source, SimulatedSource):
        return LoadedModel(info=family.info, identity=source.pipeline, architecture=source.pipeline)
    info = replace(
        family.info,
        path=location(source.path),
        dtype=source.dtype,
        attention_backend=source.attention,
        hardware=describe_hardware(family.device),
        threads=source.threads,
        loras=tuple(loras),
        vae_tiling=bool(getattr(family.modules.get("vae"), "use_tiling", False)),
        decode=_decode_memory(family, source, components),
    )
    return LoadedModel(
        info=info,
        identity=model_identity(source),
        architecture=architecture(source),
        stage_keys=stage_keys(source, info),
        components=components,
        weights={} if components else {name: _num_bytes([module]) for name, module in family.modules.items()},
        loras=loras,
        refused=refused,
    )


def _decode_memory(family: Family, source: ModelSource, components: Mapping[str, Component]) -> DecodeMemory | None:
    """Return the memory that decodes may take, if known: `source.memory_bytes`, or what the model leaves of a GPU.

    The model takes the memory of all components if they stay there, of the autoencoder if they come on demand, and
    nearly none if layers come and go.
    """
    vae = family.modules.get("vae")
    memory_bytes = source.memory_bytes
    if vae is None:
        return None
    if memory_bytes is None and family.device.type == "cuda":
        there = components["vae"].num_bytes if components else _num_bytes(family.modules.values())
        held = 0 if source.offload == "layers" else there
        memory_bytes = torch.cuda.get_device_properties(family.device).total_memory - held
    return None if memory_bytes is None else decode_memory(vae, memory_bytes)


def _num_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the bytes of the modules' weights; weights that modules share count once."""
    return sum({one.data_ptr(): one.nbytes for module in modules for one in weights_of(module)}.values())
