"""Loads a modular pipeline: its blocks are those of diffusers, never code that lies beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoModel, ModularPipeline

from tilework.pipelines.component_files import has_variant
from tilework.pipelines.errors import UnsupportedModel
from tilework.pipelines.model_index import ModelIndex
from tilework.pipelines.modular.index import BLOCKS


def load_modular(index: ModelIndex, dtype: torch.dtype, loaded: Mapping[str, Any]) -> Any:
    """Return the `ModularPipeline` of a model with all components that have a place in its index.

    `loaded` are there already. Each other component is loaded by its own `ComponentSpec`, since `load_components` turns
    errors into warnings.

    Raises:
        UnsupportedModel: diffusers lacks its class or its blocks.
    """
    place = _place(index)
    is_local = index.directory is not None
    _check_blocks(index)
    pipeline = ModularPipeline.from_pretrained(place, trust_remote_code=False, local_files_only=is_local)
    components = dict(loaded)
    for name in pipeline.pretrained_component_names:
        if name in components or index.components.get(name, [None])[0] is None:
            continue
        spec = pipeline.get_component_spec(name)
        options: dict[str, Any] = {"local_files_only": is_local}
        if is_local:
            options |= {"pretrained_model_name_or_path": place, "subfolder": name, "revision": None}
        if spec.type_hint is None or issubclass(spec.type_hint, torch.nn.Module | AutoModel):
            options |= {"use_safetensors": True, "dtype": dtype}
            if index.directory is not None:
                folder = index.directory / name
                options["variant"] = index.variant if has_variant(Path(folder), index.variant) else None
        components[name] = spec.load(**options)
    pipeline.update_components(**components)
    return pipeline


def _place(index: ModelIndex) -> str:
    return index.path if index.directory is None else str(index.directory)


def _check_blocks(index: ModelIndex) -> None:
    """Check that the class and its blocks are diffusers' own: otherwise it would quietly take the usual blocks."""
    name = index.components["_class_name"]
    blocks = index.components[BLOCKS]
    kind: Any = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ModularPipeline)):
        raise UnsupportedModel(
            f"{index.path}: {index.file} names the class {name!r}, which is no modular pipeline of diffusers "
            f"{diffusers.__version__}; install a version that has it"
        )
    usual = getattr(kind, "default_blocks_name", None)
    found = getattr(diffusers, blocks, None) if isinstance(blocks, str) else None
    if not getattr(found, "block_classes", None):
        raise UnsupportedModel(
            f"{index.path}: {index.file} names the blocks {blocks!r}, which diffusers {diffusers.__version__} does not "
            f"have as such: blocks that were put together by hand are not saved; those of the class are "
            f"{usual!r}"
        )
