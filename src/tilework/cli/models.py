"""The model that a command names: checked before any worker starts."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.cli.console import user_errors
from tilework.core.model import LoraSource, ModelSource


def named_model(text: str) -> tuple[str, str]:
    """The name and path of NAME=PATH; a path alone has no name. What is in a directory called A=B is ./A=B."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and path and not name.startswith((".", "/", "~")) else ("", text)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model runs: see `core.model.ModelSource`."""

    adapter: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    memory_bytes: int | None = None
    vae_tiling: bool = False
    previews: bool = True
    eager: bool = False
    loras: tuple[LoraSource, ...] = ()
    devices: tuple[int, ...] | None = None


def model_source(model: str, options: ModelOptions) -> ModelSource:
    """Where a model is and how it runs, if its files show that it can be served.

    `model` is PATH or NAME=PATH; a workflow is FILE.py:NAME, and its file is run. Nothing else here needs torch:
    `model_index.json` says what the model is. So a mistake is refused at once and once, not by each worker. Raises
    UserError.
    """
    from tilework.pipelines.errors import ModelError
    from tilework.pipelines.model_index import check_model

    name, path = named_model(model)
    with user_errors(ModelError):
        check_model(path, options.adapter)
    return ModelSource(
        path=path,
        name=name,
        adapter=options.adapter,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        memory_bytes=options.memory_bytes,
        loras=options.loras,
        devices=options.devices,
        vae_tiling=options.vae_tiling,
        previews=options.previews,
        eager=options.eager,
    )
