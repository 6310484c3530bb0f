"""A family without a model: each stage and step takes the time of a cost table and computes nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
from torch import Tensor

from tilework.core.cache import CacheUse
from tilework.core.comm import Comm
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import ResultKind
from tilework.core.model import ModelInfo, SimulatedSource
from tilework.core.packing import Pack
from tilework.core.preview import preview_shape
from tilework.core.request import Shape
from tilework.core.time import NS_PER_S
from tilework.core.wire.spec import File, Image, Spec
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.pipelines.arguments import generator_device
from tilework.pipelines.family import Values, Watch
from tilework.pipelines.parallel import Parallel
from tilework.pipelines.video.export import video_file

_SIDE_MULTIPLE = 16
_LATENT_CHANNELS = 16
_PIXELS_PER_LATENT = 8
_VIDEO_SIDE = 64
_FPS = 16.0


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedState:
    """A `StepState` without anything to compute."""

    spec: Spec
    stage: str
    num_steps: int
    latents: Tensor
    steps_done: int = 0
    is_torn: bool = False

    def take_cache_use(self) -> CacheUse | None:
        """See `StepState`."""
        return None


class SimulatedFamily:
    """A `Family` that sleeps. Groups, messages and blobs are real; states are as large as FLUX's in half precision.

    Within a work the steps end when the table says: the worker's own actions between two steps overlap the sleep, as
    they would overlap an accelerator's work. Between two works they do not. A group follows the clock of rank 0, which
    may have to draw previews.
    """

    def __init__(self, source: SimulatedSource) -> None:
        self._graph = Graph(source.pipeline, source.stages, source.frames_per_latent)
        table = CostTable(hardware=source.hardware, rows=source.rows, graphs={source.pipeline: self._graph})
        self._costs = TableCosts(table)
        self._source = source
        self._parallel = _Clocked()
        stepped = {stage.name for stage in self._graph.stepped}
        rows = [row for row in source.rows if row.pipeline == source.pipeline and row.stage in stepped]
        shapes = sorted({row.shape for row in rows}, key=lambda shape: shape.pixels)
        clips = [shape for shape in shapes if shape.frames > 1] if self._graph.makes(ResultKind.VIDEO) else []
        default = clips[len(clips) // 2] if clips else shapes[len(shapes) // 2]
        self._info = ModelInfo(
            name=source.pipeline,
            family="modelled",
            side_multiple=gcd(_SIDE_MULTIPLE, *(side for shape in shapes for side in (shape.height, shape.width))),
            max_side=2 * max(max(shape.height, shape.width) for shape in shapes),
            default_height=default.height,
            default_width=default.width,
            default_steps=source.steps,
            default_guidance_scale=1.0,
            parameters=0,
            library=f"no model; times of {source.hardware}",
            two_passes=False,
            max_degree=max(row.degree for row in rows),
            arguments=(generator_device("cpu"),),
            default_frames=default.frames if clips else 1,
            max_frames=max((shape.frames for shape in clips), default=1),
            frame_multiple=source.frames_per_latent,
            default_fps=_FPS if clips else 0.0,
            stages=source.stages,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        return {}

    @property
    def loras(self) -> None:
        return None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def parallel(self) -> Parallel:
        return self._parallel

    def join(self, comm: Comm, spec: Spec) -> None:
        self._parallel.join(comm, guided=False)

    def run(self, stage: str, specs: Sequence[Spec], values: Sequence[Values], sliced: bool = False) -> list[Values]:
        shapes = [spec.shape for spec in specs]
        degree = self._parallel.degree
        self._check_memory(stage, shapes, degree, share=0.5 if sliced else 1.0)
        time.sleep(self._run_ns(stage, shapes, degree) / NS_PER_S)
        return [dict.fromkeys(self._graph.stage(stage).spec.outputs) for _ in specs]

    def begin(self, stage: str, spec: Spec, values: Values) -> SimulatedState:
        side = _PIXELS_PER_LATENT
        latents = torch.zeros(_LATENT_CHANNELS, spec.height // side, spec.width // side, dtype=torch.bfloat16)
        share = self._graph.stage(stage).spec.steps
        assert share is not None, f"{stage} has no steps"
        num_steps = share.of(spec.steps)
        return SimulatedState(spec=spec, stage=stage, num_steps=num_steps, latents=latents)

    def step(self, states: Sequence[SimulatedState], pack: Pack | None = None, watch: Watch | None = None) -> None:
        shapes = [state.spec.shape for state in states]
        for together in [[shape] for shape in shapes] if pack is None else [shapes]:
            self._check_memory(states[0].stage, together, self._parallel.degree)
            self._parallel.take_step(self._run_ns(states[0].stage, together, self._parallel.degree))
        for state in states:
            if watch is not None:
                watch(state, partial(self._preview, state))
            state.steps_done += 1

    def _preview(self, state: SimulatedState) -> Image:
        """Return the decoded image, but smaller."""
        shape = preview_shape(state.spec.shape)
        self._parallel.take(self._run_ns(self._graph.stage(state.stage).spec.previews, [shape], 1))
        return _flat(shape, state.spec.seed)

    def finish(self, state: SimulatedState) -> Values:
        return dict.fromkeys(self._graph.stage(state.stage).spec.outputs, state.latents)

    def image(self, spec: Spec, values: Values) -> Image:
        """Return an image of one colour, which depends on the seed."""
        return _flat(spec.shape, spec.seed)

    def file(self, spec: Spec, values: Values) -> File:
        """Return a video of one colour, which depends on the seed; small, so that it takes hardly any time."""
        assert spec.video is not None
        colour = torch.tensor(_colour(spec.seed), dtype=torch.uint8)
        return video_file(colour.expand(spec.frames, _VIDEO_SIDE, _VIDEO_SIDE, 3), spec.video)

    def export(self, state: SimulatedState) -> Values:
        return {"latents": state.latents, "steps_done": state.steps_done}

    def restore(self, stage: str, spec: Spec, values: Values, exported: Values) -> SimulatedState:
        state = self.begin(stage, spec, values)
        state.latents = exported["latents"]
        state.steps_done = exported["steps_done"]
        return state

    def _run_ns(self, stage: str, shapes: Sequence[Shape], degree: int) -> int:
        return self._costs.run_ns(self._graph.stage(stage), shapes, degree)

    def _check_memory(self, stage: str, shapes: Sequence[Shape], degree: int, share: float = 1.0) -> None:
        """Check that a stage has enough memory. Its peak grows with all pixels together, from the nearest tabled size.

        Raises:
            MemoryError: this `share` of it is more than there is.
        """
        source = self._source
        place = (source.pipeline, stage, degree, 1)
        rows = [row for row in source.rows if (row.pipeline, row.stage, row.degree, row.batch) == place]
        peaks = [(row.shape.pixels, row.peak_bytes) for row in rows if row.peak_bytes is not None]
        if source.memory_bytes is None or not peaks:
            return
        wanted = sum(shape.pixels for shape in shapes)
        pixels, peak_bytes = min(peaks, key=lambda peak: abs(peak[0] - wanted))
        needed = int(share * peak_bytes * wanted / pixels)
        if needed > source.memory_bytes:
            raise MemoryError(
                f"{stage} at {' + '.join(map(str, shapes))} takes {needed} bytes, and there are {source.memory_bytes}"
            )


def _flat(shape: Shape, seed: int) -> Image:
    return Image(shape.height, shape.width, bytes(_colour(seed)) * shape.pixels, shape.frames)


def _colour(seed: int) -> list[int]:
    return [(64 + 37 * seed * channel) % 256 for channel in (1, 3, 7)]


class _Clocked(Parallel):
    """A `Parallel` that knows when the running work ends."""

    def leave(self) -> None:
        super().leave()
        self._due_ns: int | None = None

    def take(self, run_ns: int) -> None:
        """Sleep for `run_ns`, counted from the end of the previous sleep."""
        self._sleep_until(self._due_after(run_ns))

    def take_step(self, run_ns: int) -> None:
        """Sleep for a step in lockstep, until the step of rank 0 ends."""
        due_ns = self._due_after(run_ns)
        if self.degree > 1:  # The table's step time contains the communication.
            due_ns = int(self.gather(torch.tensor([[due_ns]], dtype=torch.float64), None).item())
        self._sleep_until(due_ns)

    def _due_after(self, run_ns: int) -> int:
        return run_ns + (time.monotonic_ns() if self._due_ns is None else self._due_ns)

    def _sleep_until(self, due_ns: int) -> None:
        self._due_ns = due_ns
        time.sleep(max(0, due_ns - time.monotonic_ns()) / NS_PER_S)
