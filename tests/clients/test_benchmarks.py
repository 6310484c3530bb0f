"""Benchmarks of others as they come from PyPI, against a server as a user starts it: each request has a deadline.

That of vLLM-Omni is in its source package only. Version 0.20.0 is the newest that has one on PyPI.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients.installed import from_pypi, source_from_pypi

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

SGLANG = ("sglang==0.5.23", "orjson", "pybase64", "ipython", "traitlets", "opencv-python-headless")
VLLM_OMNI = "vllm-omni==0.20.0"
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ["--backend", "modelled", "--devices", "2", "--cost", "flux1dev_h100_eager", "--port", "0", "--json"]
    command = [sys.executable, "-m", "tilework", "serve", *flags, "--default-slo", "3x", "--served-model-name", "flux"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def measured(command: list[str], url: str, task: str, file: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What a benchmark writes about pictures of its own prompts, after a look at what the server was asked for."""
    options = ["--dataset", "random", "--task", task, "--num-prompts", str(NUM_PROMPTS), "--base-url", url]
    options += ["--width", "256", "--height", "256", "--num-inference-steps", "4", "--max-concurrency", "6"]
    options += ["--output-file", str(file), "--disable-tqdm"]
    done = subprocess.run(
        [sys.executable, *command, *options], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(file.read_text())
    assert (found["completed_requests"], found["failed_requests"]) == (NUM_PROMPTS, 0), found
    calls = httpx.get(f"{url}/v1/requests", params={"limit": 100}).json()["data"]
    assert len(calls) >= NUM_PROMPTS
    assert {(one["slo_source"], one["size"]) for one in calls} == {("server", "256x256")}
    assert all(one["slo_s"] > 0 and not one["warnings"] for one in calls)
    text = httpx.get(f"{url}/metrics").text
    judged = [line for line in text.splitlines() if line.startswith("tilework_deadlines_total")]
    assert sum(float(line.split()[-1]) for line in judged) == len(calls), "each was judged by its deadline"
    return found


def test_sglangs_benchmark_runs_unchanged(url: str, tmp_path: Path) -> None:
    environment = from_pypi(tmp_path / "sglang", *SGLANG)
    module = ["-m", "sglang.multimodal_gen.benchmarks.bench_serving"]
    measured(module, url, "text-to-image", tmp_path / "found.json", environment)


def test_vllm_omnis_benchmark_runs_unchanged(url: str, tmp_path: Path) -> None:
    """By chat completions, and by the route of pictures, with the deadlines of its own by which it counts."""
    script = source_from_pypi(tmp_path, VLLM_OMNI) / "benchmarks" / "diffusion" / "diffusion_benchmark_serving.py"
    for backend in ("vllm-omni", "openai"):
        command = [str(script), "--backend", backend, "--model", "flux", "--slo", "--slo-scale", "100"]
        found = measured(command, url, "t2i", tmp_path / f"{backend}.json", dict(os.environ))
        assert found["slo_attainment_rate"] == 1
        stages = list(found["stage_durations_mean"])
        assert stages == (["encode", "diffuse", "decode"] if backend == "vllm-omni" else [])
