"""What the server must know of a model that a worker has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilework.core.component import Component
from tilework.core.lora import Lora
from tilework.core.model import SimulatedSource, Source
from tilework.core.wire.reports import LoadedModel
from tilework.pipelines.family import Family
from tilework.pipelines.identity import model_identity
from tilework.pipelines.model_index import location
from tilework.pipelines.numerics import ATTENTION


def described(
    family: Family,
    source: Source,
    components: Mapping[str, Component],
    loras: Mapping[str, Lora],
    refused: Mapping[str, str],
) -> LoadedModel:
    """A model with its components and LoRAs; `refused` are LoRAs that are none of it."""
    if isinstance(source, SimulatedSource):
        return LoadedModel(info=family.info, identity=source.pipeline)
    info = replace(
        family.info,
        path=location(source.path),
        dtype=source.dtype,
        attention_backend=ATTENTION,
        loras=tuple(loras),
        vae_tiling=bool(getattr(family.modules.get("vae"), "use_tiling", False)),
    )
    return LoadedModel(info=info, identity=model_identity(source), components=components, loras=loras, refused=refused)
