"""The model that a command names: checked before any worker starts."""

from __future__ import annotations

from tilework.cli.console import UserError, user_errors
from tilework.core.model import DEVICES, DTYPES, LoraSource, ModelSource


def named_model(text: str) -> tuple[str, str]:
    """The name and path of NAME=PATH; a path alone has no name. What is in a directory called A=B is ./A=B."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and path and not name.startswith((".", "/", "~")) else ("", text)


def model_source(
    model: str,
    adapter: str | None,
    device: str,
    dtype: str | None,
    threads: int,
    memory_bytes: int | None = None,
    loras: tuple[LoraSource, ...] = (),
    devices: tuple[int, ...] | None = None,
    vae_tiling: bool = False,
    previews: bool = True,
) -> ModelSource:
    """Where a model is and how it runs, if its files show that it can be served.

    `model` is PATH or NAME=PATH. Nothing here needs torch: `model_index.json` says what the model is. So a mistake is
    refused at once and once, not by each worker. Raises UserError.
    """
    from tilework.pipelines.errors import ModelError
    from tilework.pipelines.model_index import read_model_index

    for name, value, known in (("device", device, DEVICES), ("dtype", dtype or DTYPES[0], DTYPES)):
        if value not in known:
            raise UserError(f"{name} is {value!r}; choose one of {', '.join(known)}")
    name, path = named_model(model)
    with user_errors(ModelError):
        read_model_index(path, adapter)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    return ModelSource(
        path=path,
        name=name,
        adapter=adapter,
        device=device,
        dtype=dtype,
        threads=threads,
        memory_bytes=memory_bytes,
        loras=loras,
        devices=devices,
        vae_tiling=vae_tiling,
        previews=previews,
    )
