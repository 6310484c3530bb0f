"""Plans of memory against what a GPU takes then, and what each setup costs a step."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from suite.case import CaseFailed, Check, Finding, Note, Table
from suite.gpu.models import TOY, Drawn, folder_of, on_gpu
from suite.stats import exact, extremes, median
from tilework.pipelines.setup.host_memory import free_host_bytes

Setup = dict[str, Any]
_GB = 1e9
_SPARE_BYTES = 2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """A model as it is and in each setup, loaded and drawn with in turn, in this process."""

    device: str
    dtype: str
    drawn: Drawn
    setups: tuple[Setup, ...]
    threads: int = 1
    low: float = 0.95
    high: float = 1.05

    @classmethod
    def make(cls, quick: bool) -> Self:
        if not on_gpu():
            return cls(device="cpu", dtype="float32", drawn=TOY, setups=({}, *cls.on_cpu()))
        drawn = Drawn(model="FLUX.1-dev", side=1024, steps=4 if quick else 12, rounds=1)
        threads = len(os.sched_getaffinity(0))  # Weights are quantised on the CPU.
        return cls(device="cuda", dtype="bfloat16", drawn=drawn, setups=({}, *cls.changes()), threads=threads)

    @classmethod
    def changes(cls) -> tuple[Setup, ...]:
        return ({"attention": "cudnn"}, {"compiles": True})

    @classmethod
    def on_cpu(cls) -> tuple[Setup, ...]:
        """Those that are rehearsed without a GPU."""
        return ({"attention": "math"},)

    def measure(self, note: Note) -> Finding:
        checks: list[Check] = []
        rows: list[tuple[str, ...]] = []
        usual_s = 0.0
        for setup in self.setups:
            name = ", ".join(f"{key} {value}" for key, value in setup.items()) or "as it is"
            try:
                run = self._run(setup, note)
            except Exception as error:  # Of the libraries; the other setups are measured all the same.
                reason = str(error)
                if not isinstance(error, CaseFailed):
                    reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
                    checks.append(Check(what=f"{name}: runs", measured=exact(0), low=1))
                note(f"{name}: left out; {reason}")
                rows.append((name, reason, "", "", "", ""))
                continue
            finally:
                gc.collect()
                Meter(torch, self.device).free()
            usual_s = usual_s or median(run.steps_s)
            checks += self._checks(name, run)
            rows.append((name, *run.cells(usual_s)))
            note(f"{name}: {', '.join(rows[-1][1:])}")
        return Finding(
            checks=tuple(checks),
            method=(
                "Planned: from the configurations alone. Measured: the most that the allocator has in a step and in "
                "a decode, less what it has before; the weights after loading; all by what the driver says is in use, "
                "CUDA's context included. With layers that come and go a step and a decode count with these.",
                "A step is a call of the denoiser, until the GPU has done it; of the first two none counts.",
                "Weights are random, of real size (`tilework fake`). On a CPU no memory is measured: that is a "
                "rehearsal.",
            ),
            tables=(
                Table(
                    title=f"{self.drawn.model}, {self.drawn.side} px, {self.dtype}",
                    columns=(
                        "setup",
                        "weights, GB (planned)",
                        "step, GB (planned)",
                        "decode, GB (planned)",
                        "all, GB (planned)",
                        "a step, s (of that as it is)",
                    ),
                    rows=tuple(rows),
                ),
            ),
        )

    def _checks(self, name: str, run: _Run) -> list[Check]:
        if self.device == "cpu":
            return []
        ratios = {"a step": (run.step_bytes, run.planned_step), "the decode": (run.decode_bytes, run.planned_decode)}
        found = [
            Check(
                what=f"{name}: {what}, planned / measured",
                measured=extremes([planned / taken]),
                low=self.low,
                high=self.high,
            )
            for what, (taken, planned) in ratios.items()
        ]
        taken_of_all = extremes([run.all_bytes / run.planned_all])
        of_all = Check(what=f"{name}: all, measured / planned", measured=taken_of_all, high=1)
        return [*found, of_all]

    def _run(self, setup: Setup, note: Note) -> _Run:
        import tilework
        from tilework.core.model import ModelSource
        from tilework.core.request import Shape
        from tilework.pipelines.errors import ModelError
        from tilework.pipelines.fits.beside import NO_SERVER
        from tilework.pipelines.fits.plan import Planner
        from tilework.pipelines.model_index import model_directory
        from tilework.pipelines.setup.quantize import parse_schemes

        folder = folder_of(self.drawn.model, note)
        given = {key: value for key, value in setup.items() if key != "quantize"}
        schemes = parse_schemes(setup["quantize"]) if "quantize" in setup else ()
        source = ModelSource(path=folder, device=self.device, dtype=self.dtype, quantize=schemes, **given)
        shape = Shape(self.drawn.side, self.drawn.side)
        plan = Planner.of(str(model_directory(folder))).plan(source, 0, shape, NO_SERVER)
        if source.offload == "layers":
            _check_host(sum(one.num_bytes for one in plan.components))
        meter = Meter(torch, self.device)
        try:
            pipeline = tilework.reference(folder, device=self.device, dtype=self.dtype, threads=self.threads, **setup)
        except ModelError as error:
            raise CaseFailed(str(error)) from error
        layers = source.offload == "layers"
        beside = {one.name: one.num_bytes if layers else one.run_bytes or 0 for one in plan.stages}
        run = _Run(
            planned_weights=0 if layers else max(one.weights_bytes for one in plan.stages),
            planned_step=beside["diffuse"],
            planned_decode=beside["decode"],
            planned_all=plan.needed_bytes,
            weights_bytes=meter.allocated(),
        )
        pipeline.set_progress_bar_config(disable=True)
        denoiser: Any = getattr(pipeline, "transformer", None) or pipeline.unet
        denoiser.forward = run.step(meter, denoiser.forward)
        pipeline.vae.decode = run.decode(meter, pipeline.vae.decode)
        size = {"height": shape.height, "width": shape.width}
        pipeline("a red circle", **size, num_inference_steps=self.drawn.steps, **self.drawn.stock)
        run.all_bytes = meter.used()
        return run


class FitsQuantized(Fits):
    """With weights that are quantised while they are loaded. What the card lacks is left out, and said."""

    __slots__ = ()

    @classmethod
    def changes(cls) -> tuple[Setup, ...]:
        return tuple({"quantize": scheme} for scheme in ("fp8", "int8", "nf4", "nvfp4"))

    @classmethod
    def on_cpu(cls) -> tuple[Setup, ...]:
        return ({"quantize": "int8"}, {"quantize": "nf4"})


class FitsOffloaded(Fits):
    """With layers that come and go. It comes last: the host's memory may not be enough for it."""

    __slots__ = ()

    @classmethod
    def changes(cls) -> tuple[Setup, ...]:
        return ({"offload": "layers"},)

    @classmethod
    def on_cpu(cls) -> tuple[Setup, ...]:
        return cls.changes()


def _check_host(weights_bytes: int) -> None:
    """Raises CaseFailed if the kernel might end this process for want of memory; pinned copies are made if they fit."""
    if (free := free_host_bytes()) < weights_bytes + _SPARE_BYTES:
        raise CaseFailed(
            f"the host has {free / _GB:.0f} GB free, and {(weights_bytes + _SPARE_BYTES) / _GB:.0f} GB are needed; "
            "remove other models from BENCH_MODELS, if that is in memory"
        )


@dataclass(slots=True)
class Meter:
    """What a device has allocated; on a CPU nothing is known of it."""

    torch: Any
    device: str

    def allocated(self) -> int:
        return int(self.torch.cuda.memory_allocated()) if self.device == "cuda" else 0

    def used(self) -> int:
        """What the device has given out, to the allocator and to CUDA itself."""
        if self.device != "cuda":
            return 0
        free, total = self.torch.cuda.mem_get_info()
        return int(total - free)

    def free(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int, float]:
        """The result of a call, the most that it had allocated beyond what was there, and its seconds."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()
            self.torch.cuda.reset_peak_memory_stats()
        before, start_s = self.allocated(), time.perf_counter()
        result = call(*args, **kwargs)
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        seconds = time.perf_counter() - start_s
        peak = int(self.torch.cuda.max_memory_allocated()) if self.device == "cuda" else 0
        return result, peak - before, seconds


@dataclass(slots=True, kw_only=True)
class _Run:
    planned_weights: int
    planned_step: int
    planned_decode: int
    planned_all: int
    weights_bytes: int
    step_bytes: int = 0
    decode_bytes: int = 0
    all_bytes: int = 0
    steps_s: list[float] = field(default_factory=list)

    def step(self, meter: Meter, forward: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def metered(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            result, taken, seconds = meter.run(forward, *args, **kwargs)
            calls += 1
            if calls > 2:
                self.step_bytes = max(self.step_bytes, taken)
                self.steps_s.append(seconds)
            return result

        return metered

    def decode(self, meter: Meter, decode: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*args: Any, **kwargs: Any) -> Any:
            result, self.decode_bytes, _ = meter.run(decode, *args, **kwargs)
            return result

        return metered

    def cells(self, usual_s: float) -> tuple[str, ...]:
        pairs = (
            (self.weights_bytes, self.planned_weights),
            (self.step_bytes, self.planned_step),
            (self.decode_bytes, self.planned_decode),
            (self.all_bytes, self.planned_all),
        )
        step_s = median(self.steps_s)
        shown = [f"{taken / _GB:.2f} ({planned / _GB:.2f})" for taken, planned in pairs]
        return (*shown, f"{step_s:.3f} ({step_s / usual_s:.2f})")
