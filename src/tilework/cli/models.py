"""The model that a command names: checked before any worker starts."""

from __future__ import annotations

from tilework.cli.console import user_errors
from tilework.core.model import ModelSource


def model_source(
    path: str, *, device: str, dtype: str | None, threads: int, memory_bytes: int | None = None
) -> ModelSource:
    """Where a model is and how it runs, if its files show that it can be served.

    The check reads `model_index.json` without torch, so a wrong model is refused at once and once, not by each worker.
    Raises UserError.
    """
    from tilework.pipelines.errors import ModelError
    from tilework.pipelines.model_index import read_model_index

    with user_errors(ModelError):
        read_model_index(path)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    return ModelSource(path=path, device=device, dtype=dtype, threads=threads, memory_bytes=memory_bytes)
