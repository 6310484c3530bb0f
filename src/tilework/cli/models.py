"""The model that a command names: checked before any worker starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING

from tilework.cli.console import UserError, console, user_errors
from tilework.core.model import DEVICES, DTYPES, LoraSource, ModelInfo, ModelSource
from tilework.core.wire.spec import Spec

if TYPE_CHECKING:
    from tilework.pipelines.family import Family


def named_model(text: str) -> tuple[str, str]:
    """The name and path of NAME=PATH; a path alone has no name. What is in a directory called A=B is ./A=B."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and path and not name.startswith((".", "/", "~")) else ("", text)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model runs: see `core.model.ModelSource`. Without a `dtype` it has that which suits the device."""

    adapter: str | None = None
    device: str = "cpu"
    dtype: str | None = None
    threads: int = 1
    memory_bytes: int | None = None
    vae_tiling: bool = False
    previews: bool = True
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

    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    for name, value, known in (("device", options.device, DEVICES), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise UserError(f"{name} is {value!r}; choose one of {', '.join(known)}")
    name, path = named_model(model)
    with user_errors(ModelError):
        check_model(path, options.adapter)
    return ModelSource(
        path=path,
        name=name,
        adapter=options.adapter,
        device=options.device,
        dtype=dtype,
        threads=options.threads,
        memory_bytes=options.memory_bytes,
        loras=options.loras,
        devices=options.devices,
        vae_tiling=options.vae_tiling,
        previews=options.previews,
    )


def checked_spec(fields: Mapping[str, object], info: ModelInfo, *, is_video: bool = False) -> Spec:
    """What these fields of a request ask of a model, checked as the server would. Raises UserError."""
    from tilework.server.calls.errors import CallError
    from tilework.server.calls.parsing.image_call import image_call
    from tilework.server.calls.parsing.specs import Rules
    from tilework.server.calls.parsing.video_format import AskedVideo
    from tilework.server.config import ServerConfig
    from tilework.server.tenants import Tenant, Tenants

    rules = Rules(info=info, config=ServerConfig(), tenants=Tenants(), tenant=Tenant(), now=datetime.now(UTC))
    try:
        return image_call(fields, rules, Random(), video=AskedVideo() if is_video else None).specs[0]
    except CallError as error:
        raise UserError(error.message) from error


def loaded_family(source: ModelSource) -> Family:
    """A model in this process. Raises UserError."""
    with console.status(f"loading {source.path}"):
        from tilework.pipelines.errors import ModelError
        from tilework.pipelines.loading import load, quiet
        from tilework.pipelines.numerics import pin_numerics

        quiet()
        pin_numerics(source.threads)
        with user_errors(ModelError):
            return load(source)
