"""Looks at CUDA in a separate process, so that the asking process never touches it, and no driver makes it hang.

python -m tilework.pipelines.cuda.look      prints what it finds as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tilework.pipelines.cuda.attention import kernels_on
from tilework.pipelines.cuda.state import Card, CudaState

_DRIVER = Path("/proc/driver/nvidia/version")
_TIMEOUT_S = 120.0  # The first start of a driver that is not kept loaded takes half a minute with eight cards.
_COMMAND = (sys.executable, "-m", __name__)


def cuda_state() -> CudaState:
    """Return the state of CUDA, as another process finds it; a build for CPUs needs no process."""
    state = CudaState(torch=str(torch.__version__), built_for=torch.version.cuda, driver=driver())
    if state.built_for is None:
        return state
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return _with(state, f"it does not answer within {_TIMEOUT_S:g} s")
    if done.returncode != 0:
        last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        return _with(state, f"the search for it ended with status {done.returncode}: {last}")
    return CudaState.from_json(json.loads(done.stdout))


def look(*, all_cards: bool = True, tries_attentions: bool = False) -> CudaState:
    """Return the state of CUDA; this process uses CUDA from now on. Trying attention kernels takes a second.

    A process takes memory on each card that it looks at, for as long as it lives: half a gigabyte on an H100. A process
    that will work on a card looks only at that, its current one, instead of at `all_cards`.
    """
    state = CudaState(torch=str(torch.__version__), built_for=torch.version.cuda, driver=driver())
    if state.built_for is None:
        return state
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # Says what is wrong; `is_available` only that something is.
        everything = range(torch.cuda.device_count())
        indices = everything if all_cards or not everything else (torch.cuda.current_device(),)
        cards = tuple(_card(index, tries_attentions) for index in indices)
    except (RuntimeError, AssertionError) as problem:
        return _with(state, _first_line(problem))
    return CudaState(
        torch=state.torch,
        built_for=state.built_for,
        driver=state.driver,
        cards=cards,
        problem="" if cards else "CUDA_VISIBLE_DEVICES hides all",
        has_nvml=torch.cuda._device_count_nvml() >= 0,
    )


def driver() -> str:
    """Return the driver that the kernel has loaded, in its own words."""
    try:
        return _DRIVER.read_text().splitlines()[0].removeprefix("NVRM version: ").strip()
    except (OSError, IndexError):
        return "none is loaded"


def _with(state: CudaState, problem: str) -> CudaState:
    return CudaState(torch=state.torch, built_for=state.built_for, driver=state.driver, problem=problem)


def _card(index: int, tries_attentions: bool) -> Card:
    properties = torch.cuda.get_device_properties(index)
    total_bytes = properties.total_memory
    capability = (properties.major, properties.minor)
    try:
        torch.ones(1, device=f"cuda:{index}").add_(1).cpu()
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        attentions = kernels_on(torch.device("cuda", index)) if tries_attentions else ()
    except RuntimeError as problem:  # This build has no kernels for it, others use it, or it is broken.
        return Card(properties.name, total_bytes, 0, capability, _first_line(problem))
    return Card(properties.name, total_bytes, free_bytes, capability, attentions=attentions)


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0]


if __name__ == "__main__":
    print(json.dumps(asdict(look(tries_attentions=True))))
