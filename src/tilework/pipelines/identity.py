"""Identity of a model, for states, and its architecture, for measurements: the cost of steps, whatever the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import diffusers

from tilework.core.graph.stage import ResultKind
from tilework.core.model import ATTENTIONS, ModelInfo, ModelSource, is_weights_file
from tilework.pipelines.content.digests import quick_content
from tilework.pipelines.content.files import directory_files
from tilework.pipelines.model_index import INDEX, SHIPPED, shipped_directory
from tilework.pipelines.workflow.definition import Pipeline
from tilework.pipelines.workflow.source import is_workflow, pipeline_path, read_workflow, workflow_file

_COSTS_NOTHING = ("transformers_version", "torch_dtype", "dtype", "architectures", "name_or_path")
"""Entries of configurations that do not affect a model's time, besides private ones and ids of tokens."""
_TEXTS = ("prompt", "negative_prompt")


def model_identity(source: ModelSource) -> str:
    """Return NAME@DIGEST of a directory, or ID@REVISION of a model from the hub (ID alone without a known revision).

    The digest covers names and contents of the files that count (`content.files`), of weights a sample: they are
    gigabytes, and every server reads this when it starts. Time and place of the files do not matter. The identity names
    another adapter, and all settings that change results or speed. For a workflow the digest covers its file and
    pipelines, but not its imports.
    """
    plain, settings = _without_settings(source)
    if settings:
        return " ".join((model_identity(plain), *settings))
    if is_workflow(source.path):
        return _workflow_identity(source, model_identity)
    path = Path(source.path)
    if source.path in SHIPPED:
        return f"{source.path}@{_digest(shipped_directory(source.path))}"
    if path.is_dir():
        return f"{path.resolve().name}@{_digest(path)}"
    revision = _revision(source.path)
    return source.path if revision is None else f"{source.path}@{revision}"


def architecture(source: ModelSource) -> str:
    """Return CLASS@DIGEST: models of one architecture take the same time for everything, whatever their weights are.

    The digest covers the configurations of the components without entries that do not affect time, the code beside
    them, and how often a step of the sampler runs the model, but neither the sampler's class nor the words of
    tokenizers. Settings are named as in the identity. A model without a `model_index.json`, or with unknown files, is
    its own architecture.
    """
    plain, settings = _without_settings(source)
    if settings:
        return " ".join((architecture(plain), *settings))
    if is_workflow(source.path):
        return _workflow_identity(source, architecture)
    directory = shipped_directory(source.path) if source.path in SHIPPED else Path(source.path)
    if not directory.is_dir() and (found := _in_cache(source.path)) is not None:
        directory = found.parent
    if not (directory / INDEX).is_file():
        return model_identity(source)
    index = json.loads((directory / INDEX).read_text())
    content = json.dumps(_architecture(directory, index), sort_keys=True)
    return f"{index.get('_class_name', 'unknown')}@{sha256(content.encode()).hexdigest()[:12]}"


def _architecture(directory: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a model's files that its cost depends on."""
    found: dict[str, Any] = {}
    for name, entry in index.items():
        if not isinstance(entry, list):
            found |= _costing({name: entry})
            continue
        class_name = str(entry[-1])
        part = directory / name
        passes = getattr(getattr(diffusers, class_name, None), "order", None)
        if passes is not None and class_name.endswith("Scheduler"):
            found[name] = passes, _json(part / "scheduler_config.json").get("skip_prk_steps")
        elif "Tokenizer" in class_name:
            found[name] = _json(part / "tokenizer_config.json").get("model_max_length")
        else:
            found[name] = entry, _costing(_json(part / "config.json"))
    ours = {name: value for name, value in _json(directory / "tilework.json").items() if name != "name"}
    code = {str(path.relative_to(directory)): path.read_text() for path in sorted(directory.rglob("*.py"))}
    return {"components": found, "tilework": ours, "code": code}


def _costing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that a cost may depend on."""
    return {
        name: _costing(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name == "_class_name" or not (name.startswith("_") or name.endswith("token_id") or name in _COSTS_NOTHING)
    }


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file, or no object."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _without_settings(source: ModelSource) -> tuple[ModelSource, list[str]]:
    """Return the source of the model itself, and in words the settings that change results or speed."""
    schemes = ", ".join(f"{name} {_scheme(scheme)}".strip() for name, scheme in source.quantize)
    words = {
        "adapter": source.adapter and f"by {source.adapter}",
        "compiles": source.compiles and "compiled",
        "copy_stream": source.copy_stream and "copied by a stream",
        "cuda_graphs": source.cuda_graphs and "in CUDA graphs",
        "attention": source.attention != ATTENTIONS[0] and f"with {source.attention} attention",
        "offload": source.offload == "layers" and "offloaded by layers",
        "quantize": schemes and f"in {schemes}",
        "vae_tiling": source.vae_tiling and "in tiles",
    }
    chosen = {name: str(word) for name, word in words.items() if word}
    usual: dict[str, Any] = {one.name: one.default for one in fields(ModelSource) if one.name in chosen}
    return replace(source, **usual), list(chosen.values())


def _scheme(scheme: str) -> str:
    """Return a scheme, or NAME@DIGEST of a file with weights."""
    if not is_weights_file(scheme):
        return scheme
    return f"{Path(scheme).name}@{sha256(_essence(Path(scheme)).encode()).hexdigest()[:12]}"


def stage_keys(source: ModelSource, info: ModelInfo) -> dict[str, str]:
    """Return a key of each stage, by its name: stages of two models with equal keys take the same time.

    The key of a pipeline's stage covers architecture, stage and settings, and the writers of the images that it reads:
    the first pipeline of a workflow has the keys of the model itself. The key of a function covers its file and name,
    and the writers of all that it reads.

    Source: OnePiece §8.3, where workflows share the stages that they have in common.
    """
    workflow = read_workflow(source.path) if is_workflow(source.path) else None
    functions = {one.name for one in workflow.functions} if workflow else set()
    pipelines = workflow.pipelines if workflow else ()
    keys: dict[str, str] = {}
    writers: dict[str, str] = {}
    for stage in info.graph.stages:
        read = [writers.get(name, name) for name in stage.spec.inputs]
        if stage.spec.result is ResultKind.VIDEO:
            content = [stage.name, *read]
        elif stage.name in functions:
            content = [workflow_file(source.path).read_text(), stage.name, *read]
        elif not pipelines:
            content = [architecture(source), stage.name]
        else:
            prefix = stage.name.partition(".")[0]
            one = next((each for each in pipelines if len(pipelines) > 1 and each.name == prefix), pipelines[0])
            inner = stage.name.removeprefix(f"{one.name}." if len(pipelines) > 1 else "")
            departures = _departures(one, one is pipelines[0], writers)
            content = [architecture(_pipeline_source(source, one)), inner, *departures]
        keys[stage.name] = sha256("\0".join(content).encode()).hexdigest()[:16]
        writers |= dict.fromkeys(stage.spec.outputs, keys[stage.name])
    return keys


def _departures(pipeline: Pipeline, is_first: bool, writers: Mapping[str, str]) -> list[str]:
    """Return how the stages of a pipeline differ from those of its model; empty if they do not."""
    pictures = [f"{name} {writers.get(value, value)}" for name, value in pipeline.reads.items() if name not in _TEXTS]
    settings = [f"{name} {value!r}" for name, value in pipeline.settings.items()]
    return [*pictures, *settings, *(() if is_first else ("with its own defaults",))]


def _workflow_identity(source: ModelSource, of_pipeline: Callable[[ModelSource], str]) -> str:
    """Return NAME@DIGEST of the contents of a workflow's file and its pipelines' identities, or architectures."""
    workflow = read_workflow(source.path)
    file = workflow_file(source.path)
    digest = sha256(file.read_bytes())
    for one in workflow.pipelines:
        digest.update(of_pipeline(_pipeline_source(source, one)).encode())
    return f"{workflow.name}@{digest.hexdigest()[:12]}"


def _pipeline_source(source: ModelSource, pipeline: Pipeline) -> ModelSource:
    return replace(source, path=pipeline_path(source.path, pipeline.path), adapter=pipeline.adapter)


def _digest(directory: Path) -> str:
    digest = sha256()
    for name, path in directory_files(directory).items():
        digest.update(f"{name}\0{_essence(path)}\0".encode())
    return digest.hexdigest()[:12]


def _essence(path: Path) -> str:
    content = quick_content(path)
    return f"{content.num_bytes} {content.quick}"


def _revision(hub_id: str) -> str | None:
    """Return the commit in the local cache from which the model was loaded."""
    found = _in_cache(hub_id)
    return None if found is None else found.parent.name[:12]


def _in_cache(hub_id: str) -> Path | None:
    """Return the index of a model in the local cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, INDEX)
    return Path(found) if isinstance(found, str) else None
