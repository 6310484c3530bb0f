"""The identity of a model: measurements hold only for the same one."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from tilework.core.model import ModelSource
from tilework.pipelines.model_index import INDEX, SHIPPED, shipped_directory
from tilework.pipelines.workflow.source import is_workflow, pipeline_path, read_workflow, workflow_file

_READ = (".json", ".txt", ".model")


def model_identity(source: ModelSource) -> str:
    """NAME@DIGEST of a directory, ID@REVISION of a model from the hub (the id alone if no revision is known).

    The digest covers names and contents of configurations and tokenizers, and names, sizes and modification times of
    all other files: weights are gigabytes, and every server reads this when it starts. Another adapter is named, and so
    are tiles that the server asks for. Of a workflow the digest covers its file and pipelines, not what it imports.
    """
    if source.vae_tiling:
        return f"{model_identity(replace(source, vae_tiling=False))} in tiles"
    if source.adapter is not None:
        return f"{model_identity(replace(source, adapter=None))} by {source.adapter}"
    if is_workflow(source.path):
        return _workflow_identity(source)
    path = Path(source.path)
    if source.path in SHIPPED:
        return f"{source.path}@{_digest(shipped_directory(source.path))}"
    if path.is_dir():
        return f"{path.resolve().name}@{_digest(path)}"
    revision = _revision(source.path)
    return source.path if revision is None else f"{source.path}@{revision}"


def _workflow_identity(source: ModelSource) -> str:
    """NAME@DIGEST of the contents of a workflow's file and the identities of its pipelines."""
    workflow, file = read_workflow(source.path), workflow_file(source.path)
    digest = sha256(file.read_bytes())
    for one in workflow.pipelines:
        path = pipeline_path(source.path, one.path)
        digest.update(model_identity(replace(source, path=path, adapter=one.adapter)).encode())
    return f"{workflow.name}@{digest.hexdigest()[:12]}"


def _digest(directory: Path) -> str:
    digest = sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(directory)}\0".encode())
        digest.update(_essence(path))
    return digest.hexdigest()[:12]


def _essence(path: Path) -> bytes:
    if path.suffix in _READ:
        return sha256(path.read_bytes()).digest()
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}\0".encode()


def _revision(hub_id: str) -> str | None:
    """The commit that lies in the local cache, from which the model was loaded."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, INDEX)
    return Path(found).parent.name[:12] if isinstance(found, str) else None
