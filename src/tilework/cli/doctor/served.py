"""The models that are to be served, and the encoders of videos."""

from __future__ import annotations

from pathlib import Path

from tilework.cli.doctor.finding import Finding, error, gigabytes, ok, warning
from tilework.cli.models import named_model
from tilework.distribution import install_command


def model_finding(model: str) -> tuple[Finding, int]:
    """Whether the files of a model show that it can be served; and how many bytes of weights it has here.

    `model` is that of `tilework serve`. Loads no weights. The file of a workflow is run, as a server does.
    """
    from tilework.pipelines.errors import ModelError
    from tilework.pipelines.model_index import check_model

    _, path = named_model(model)
    try:
        check_model(path)
    except ModelError as problem:
        return error(f"model {model}", str(problem), "see docs/models.md, or `tilework classes`"), 0
    num_bytes = _weights_bytes(path)
    return ok(f"model {model}", f"{gigabytes(num_bytes)} of weights" if num_bytes else "can be served"), num_bytes


def _weights_bytes(path: str) -> int:
    from tilework.pipelines.model_index import model_directory
    from tilework.pipelines.workflow.source import is_workflow

    directory: Path | None = None if is_workflow(path) else model_directory(path)
    return 0 if directory is None else sum(file.stat().st_size for file in directory.glob("*/*.safetensors"))


def videos_finding() -> Finding:
    """Whether PyAV has the encoders of clips as files."""
    try:
        import av

        from tilework.pipelines.video.mp4 import missing_encoders
    except ImportError as problem:
        return warning("videos", f"PyAV cannot be imported: {problem}; pictures need none", install_command("serve"))
    missing = missing_encoders()
    if missing:
        found = f"PyAV {av.__version__} lacks {', '.join(missing)}"
        return error("videos", found, "pip install --force-reinstall av, whose wheels bring them")
    return ok("videos", f"PyAV {av.__version__} encodes H.264, VP9 and AAC")
