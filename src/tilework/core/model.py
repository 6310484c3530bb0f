"""The model of a worker: its source, and the values that its requests may have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tilework.core.cache import CacheKind
from tilework.core.cost_row import CostRow
from tilework.core.graph.graph import Graph
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import StageSpec

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
ATTENTIONS = ("native", "cudnn", "efficient", "flash", "math")
"""Kernels of torch's attention: "native" lets torch choose for each call, the others are one kernel for all calls."""
OFFLOADS = ("none", "components", "layers")
"""Weights that lie on the device: all; those of the stage that runs; or those of the layer that runs."""


LORA_NAME = "up to 128 letters, digits and _ . -, but neither . nor .. alone"
MODEL_NAME = "up to 128 letters, digits and _ . / -, where no part between slashes is empty, . or .. or loras"
"""Forms of names, worded for error messages. Names stand in paths of the API, which clients shorten at dots."""
_PART = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def is_lora_name(name: str) -> bool:
    """Return whether a LoRA can have this name."""
    return _PART.fullmatch(name) is not None and name not in (".", "..")


def is_model_name(name: str) -> bool:
    """Return whether a model can have this name, or have it as another of its names.

    A part `loras` would make a path of the model one of its LoRAs: `/v1/admin/models/MODEL/loras/LORA`.
    """
    return len(name) <= 128 and all(is_lora_name(part) and part != "loras" for part in name.split("/"))


@dataclass(frozen=True, slots=True, order=True)
class LoraSource:
    """A LoRA that requests may use by its name, and its safetensors file."""

    name: str
    path: str


def is_weights_file(scheme: str) -> bool:
    """Return whether a scheme of `ModelSource.quantize` is the path of a file with quantised weights."""
    return scheme.endswith(".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The files of a model, and how a worker runs it. `path` is a diffusers directory or a hub id.

    `name` is the name that clients use; empty: the name in its `tilework.json`, or that of its directory or hub id.

    `device` is one of `DEVICES`, `dtype` one of `DTYPES`. `memory_bytes` is how much memory a work may take in addition
    to the loaded model; None: all that the device has. `adapter`, MODULE:CLASS, serves the model in place of the
    adapter for the class of its pipeline; if it names a pipeline class itself, the model is loaded as that class.
    Requests may use those of the `loras` that are LoRAs of this model. Only the accelerators `devices` serve it; None:
    all do. With `vae_tiling` its autoencoder works in tiles, as after `enable_tiling()`; without, only if its
    `tilework.json` says so. Without `previews` requests get none, and its steps do not need the autoencoder; with,
    unless that file forbids them. `quantize` holds components, each with the scheme of its weights
    (`pipelines.setup.quantize`) or the file that has them; the component "" stands for the denoisers.
    `offload` is one of `OFFLOADS`. `attention` is one of `ATTENTIONS` and holds for the whole process. If it
    `compiles`, the repeated blocks of the denoisers are compiled. With `cuda_graphs` their passes on CUDA are recorded
    as graphs. With a `copy_stream` states and weights are copied between a CUDA device and the host on a stream of
    their own; that holds for the whole process, too.
    """

    path: str
    name: str = ""
    adapter: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    memory_bytes: int | None = None
    loras: tuple[LoraSource, ...] = ()
    devices: tuple[int, ...] | None = None
    vae_tiling: bool = False
    previews: bool = True
    quantize: tuple[tuple[str, str], ...] = ()
    offload: str = OFFLOADS[0]
    attention: str = ATTENTIONS[0]
    compiles: bool = False
    cuda_graphs: bool = False
    copy_stream: bool = False

    @property
    def weights_files(self) -> tuple[str, ...]:
        """Components whose weights are in files of their own, as in `quantize`."""
        return tuple(name for name, scheme in self.quantize if is_weights_file(scheme))

    def of_others(self) -> ModelSource:
        """Return the source with which other models beside this one run: without the settings for this model alone."""
        quantize = tuple(one for one in self.quantize if not is_weights_file(one[1]))
        return replace(self, adapter=None, quantize=quantize)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """A model to be served beside others: see `ModelSource`. Without a `dtype` it has that of the first model."""

    path: str
    name: str = ""
    dtype: str | None = None
    loras: tuple[LoraSource, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSource:
    """A simulated device: a worker that sleeps for the time that `rows` predict, and returns images of one colour.

    It has `memory_bytes`: a work whose peak in `rows` is higher runs out of memory.
    """

    pipeline: str
    hardware: str
    steps: int
    rows: tuple[CostRow, ...] = field(repr=False)
    stages: tuple[StageSpec, ...] = latent_diffusion("").specs
    frames_per_latent: int = 1
    device: str = "cpu"
    threads: int = 1
    memory_bytes: int | None = None


Source = ModelSource | SimulatedSource

StepRange = tuple[int, int | None]
"""Numbers of steps from the first to the second, both included; None: no limit."""

PromptWords = tuple[tuple[str, tuple[str, ...]], ...]
"""Words that a model was trained on, by their kind, such as "shape"."""

TRUE_SCALE = "true_cfg_scale"
"""Argument that guides models whose `guidance_scale` is an input, or that have none."""

ArgumentValue = str | int | float | tuple[int | float, ...]


class ArgumentKind(StrEnum):
    """Kind of value that an argument takes, as JSON. A schedule is a list of falling numbers, one for each step."""

    TEXT = "text"
    NUMBER = "number"
    INTEGER = "integer"
    INTEGERS = "integers"
    CHOICE = "choice"
    SCHEDULE = "schedule"


class StrengthRule(StrEnum):
    """Rule for the number of steps that are made if denoising begins in the middle, at a `strength` between 0 and 1.

    Stock pipelines round steps x strength DOWN or UP.
    """

    DOWN = "down"
    UP = "up"

    def steps(self, whole_steps: int, strength: float) -> int:
        """Return the number of steps that are made of `whole_steps`."""
        if self is StrengthRule.DOWN:
            return min(int(whole_steps * strength), whole_steps)
        return whole_steps - int(max(whole_steps - min(whole_steps * strength, whole_steps), 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument of the stock pipeline's call that a request may give, beside those that all models have.

    Numbers lie between `low` and `high`. `count` is the number of integers; None: one or more. A schedule has `more`
    values than there are steps. `choices` are the values of a choice. A number with a `strength` rule determines the
    part of the steps that is made. `default` is the number that the stock call uses if none is given; None: the
    argument then has no effect. A `required` argument must be given.
    """

    name: str
    kind: ArgumentKind
    low: float = 0.0
    high: float = 0.0
    count: int | None = None
    more: int = 0
    choices: tuple[str, ...] = ()
    strength: StrengthRule | None = None
    default: float | None = None
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureInput:
    """An argument of the stock pipeline's call that is a picture, or up to `most` of them.

    A mask says where to draw: its white parts are drawn anew. A clip is a list of its frames.
    """

    name: str
    required: bool = False
    most: int = 1
    is_mask: bool = False
    is_clip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMemory:
    """Facts about a model's autoencoder, from which the memory of its decodes can be planned before they run.

    `autoencoder` is the class of its autoencoder, `config` its configuration as JSON, `tiling` its settings of tiles,
    and `dtype` the type of its numbers. A decode may take `most_bytes` beside the weights. `counts_kernels` is true
    where the memory of convolutions beside their tensors is known and counted: for float32 on a CPU.
    """

    autoencoder: str
    config: str = field(repr=False)
    tiling: tuple[tuple[str, bool | int | float], ...] = field(repr=False)
    dtype: str
    most_bytes: int
    counts_kernels: bool

    @property
    def in_tiles(self) -> bool:
        """True if images that are larger than a tile are decoded tile by tile."""
        return ("use_tiling", True) in self.tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The limits of a loaded model and the defaults of its requests, for the server and the command line.

    Sides are in pixels, multiples of `side_multiple`, at most `max_side`. If it does not `takes_size`, a given picture
    determines them. `two_passes`: a guidance scale above `guided_above` adds a second pass to each step
    (classifier-free guidance); otherwise guidance is an input of the model. Unless it `takes_guidance`, a request
    cannot give the scale; unless it `takes_negative`, no negative prompt. Numbers of frames are at most `max_frames`,
    and one more than a multiple of `frame_multiple`. If `frames_of` is not empty, a clip given under that name
    determines the number. Clips have `default_fps` frames a second unless a request says otherwise. `max_degree` is how
    many devices can share one request's steps. `path` is the directory that the model was loaded from, or its hub id;
    empty if there is no model.
    `dtype` and `attention_backend` are those with which it computes; empty if there is no model. `step_ranges` are the
    numbers of steps that the model's sampler can run, ascending. `arguments` are those that a request may give beside
    the ones that all models take. `stages` are those of its pipeline's graph. `loras` are the names of the LoRAs that
    requests may use. With `vae_tiling` its autoencoder works in tiles. `decode` is given if a plan can tell from it
    that a decode needs more memory than there is. Each device that serves the model is a `cell` of this number of
    accelerators. `hardware` is the device of the worker that sends this, and `threads` the number of CPU threads that
    it computes with; empty and 0 if there is no model. `caches` are those that a request may ask for. `words` are all
    that the model can draw, if it was trained on few words and lists them.
    """

    name: str
    family: str
    side_multiple: int
    max_side: int
    default_height: int
    default_width: int
    default_steps: int
    default_guidance_scale: float
    parameters: int
    library: str
    two_passes: bool = True
    guided_above: float = 1.0
    takes_guidance: bool = True
    takes_negative: bool = True
    takes_size: bool = True
    max_degree: int = 1
    path: str = ""
    dtype: str = ""
    attention_backend: str = ""
    step_ranges: tuple[StepRange, ...] = ((1, None),)
    arguments: tuple[Argument, ...] = ()
    pictures: tuple[PictureInput, ...] = ()
    default_frames: int = 1
    max_frames: int = 1
    frame_multiple: int = 1
    frames_of: str = ""
    default_fps: float = 0.0
    stages: tuple[StageSpec, ...] = latent_diffusion("").specs
    loras: tuple[str, ...] = ()
    vae_tiling: bool = False
    decode: DecodeMemory | None = None
    cell: int = 1
    hardware: str = ""
    threads: int = 0
    caches: tuple[CacheKind, ...] = ()
    words: PromptWords = ()

    @property
    def graph(self) -> Graph:
        """Graph of its pipeline, which has the name of the model."""
        return Graph(self.name, self.stages, self.frame_multiple)

    def argument(self, name: str) -> Argument | None:
        """Return the argument of this name; None if a request cannot give one."""
        return next((one for one in self.arguments if one.name == name), None)

    def has_true_guidance(self, negative_prompt: str | None, arguments: Mapping[str, ArgumentValue]) -> bool:
        """Return whether `true_cfg_scale` adds a second pass, for a negative prompt (maybe empty), to each step.

        If the argument is not given, the stock call's default counts.
        """
        one = self.argument(TRUE_SCALE)
        if one is None or negative_prompt is None:
            return False
        scale = arguments.get(TRUE_SCALE, one.default)
        return isinstance(scale, int | float) and scale > 1

    def can_run(self, steps: int) -> bool:
        """Return whether the sampler can run this number of steps."""
        return any(first <= steps and (last is None or steps <= last) for first, last in self.step_ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotServed:
    """A model that a server was started with but that cannot run on its devices, and why; `is_first`: it was the first.

    A model that could not be loaded has no `info`.
    """

    name: str
    reason: str
    is_first: bool
    info: ModelInfo | None = None
