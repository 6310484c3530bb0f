"""Imports that the forkserver makes once, so that a worker starts in hundredths of a second instead of several.

Imports only: no thread, no CUDA context and no model may exist before the fork. The forkserver ignores a preload that
fails, so a test looks for this module among those that a worker was born with.

Nothing of it becomes garbage. Collections would look at it again and again: for a fifth of the time of the imports,
and in each worker, which would then get a copy of the memory that they share.
"""

import atexit
import gc
import os
import signal

# torch marks a process that has asked the CUDA runtime for its devices as unfit for forking, and libraries ask while
# they are imported, so this comes before the first of them; through NVML the question is harmless.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pkgutil

from setproctitle import setproctitle

_NAMES = (
    "diffusers:AutoencoderKL",
    "diffusers:DPMSolverMultistepScheduler",
    "diffusers:EulerDiscreteScheduler",
    "diffusers:FlowMatchEulerDiscreteScheduler",
    "diffusers:FluxPipeline",
    "diffusers:FluxTransformer2DModel",
    "diffusers:SD3Transformer2DModel",
    "diffusers:StableDiffusion3Pipeline",
    "diffusers:StableDiffusionPipeline",
    "diffusers:StableDiffusionXLPipeline",
    "diffusers:UNet2DConditionModel",
    "diffusers.guiders",
    "transformers:CLIPTextModel",
    "transformers:CLIPTextModelWithProjection",
    "transformers:CLIPTokenizer",
    "transformers:T5EncoderModel",
    "transformers:T5Tokenizer",
    "tilework.pipelines.families.flux",
    "tilework.pipelines.families.sd",
    "tilework.pipelines.families.sd3",
    "tilework.pipelines.families.sdxl",
    "tilework.worker.process",
)

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this one.
setproctitle("tilework: starts workers")  # For `ps`; a worker sets its own title when it starts.
gc.disable()
try:
    pkgutil.resolve_name("tilework.pipelines.loading:quiet")()
    for _name in _NAMES:
        pkgutil.resolve_name(_name)
    gc.freeze()
finally:
    gc.enable()
atexit.register(os._exit, 0)  # Taking the imports apart takes 2 s, and none has anything to write.
PRELOADED = True
