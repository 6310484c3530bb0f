"""Where a result was measured: versions, processor, model. No name of the machine and no path."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import tilework

_PACKAGES = ("torch", "diffusers", "transformers", "fastapi", "uvicorn", "httpx", "pillow")


def environment() -> dict[str, Any]:
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "tilework": tilework.__version__,
        "python": platform.python_version(),
        **versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **_accelerator(),
        "load_before": round(os.getloadavg()[0], 2),
        "shapes_weights_sha256": _model_hash(),
    }


def hardware_slug(place: dict[str, Any]) -> str:
    """Such as "2-core-amd-epyc", or "nvidia-h100-80gb-hbm3" where there is a GPU, for names of files."""
    if "gpu" in place:
        return re.sub(r"[^a-z0-9]+", "-", str(place["gpu"]).lower()).strip("-")
    name = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b|@.*", "", str(place["cpu"]), flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", f"{place['cores']}-core-{name}".lower()).strip("-")


def _accelerator() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The checkout's; of a copy without its history that of the environment."""
    here = Path(__file__).parent
    try:
        run = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCH_COMMIT", "not a git checkout")


def _cpu_model() -> str:
    """As the kernel calls it; `platform.processor` is empty on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _model_hash() -> str:
    """One hash over all weights of the shipped model, so that a result says which model it ran."""
    digest = hashlib.sha256()
    root = Path(str(resources.files("tilework"))) / "models" / "shapes"
    for path in sorted(root.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
