"""Measure on a GPU: `python bench/gpu/run.py --help`. The cases are in `bench/suite/gpu/`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from suite.application import application
from suite.gpu.cards import Cards
from suite.gpu.clips import ClipDecodes
from suite.gpu.exactness import Exactness
from suite.gpu.fits import Fits, FitsOffloaded, FitsQuantized
from suite.gpu.kernels import Kernels
from suite.gpu.live import LivePolicies
from suite.gpu.loads import Loads
from suite.gpu.mixed import MixedSteps
from suite.gpu.profiled import Profiled
from suite.gpu.served import Served, ServedFlux
from suite.gpu.start import Start
from suite.gpu.stitcher import Stitching

app = application(
    {
        "start": ("A server in each setup: does it start, how soon does it draw, and are its pictures stock's", Start),
        "exact": ("The tests that need a GPU: the same bits, memory, and what is done there alone", Exactness),
        "served": ("Pictures through the whole stack, against the stock pipeline on the same GPU", Served),
        "flux": ("FLUX through the whole stack, in many steps and in few, against stock", ServedFlux),
        "mixed": ("Steps of several sizes in one forward pass, against one by one, on a GPU", MixedSteps),
        "stitcher": ("Normalisation, SiLU and frames of patches in one pass, against several and a copy", Stitching),
        "kernels": ("Kernels that save a pass over memory, beside what is used today", Kernels),
        "fits": ("Plans of memory against what a GPU takes, and what compilation and attention make of a step", Fits),
        "quantized": ("The same with quantised weights", FitsQuantized),
        "offloaded": ("The same with layers that come and go", FitsOffloaded),
        "loads": ("Weights from the host's copies to a GPU, against copies from pinned memory", Loads),
        "cards": ("Several cards: exchanges in groups, changes of a request's degree, stops", Cards),
        "clips": ("Decodes of clips: memory against the plan, and time against stock", ClipDecodes),
        "profile": ("A cost table of this GPU, with rows of batches", Profiled),
        "live": ("Deadlines kept on one GPU by policy, live and simulated", LivePolicies),
    },
    "bench/gpu/run.py",
    "Measure on GPUs, with models of real size and random weights. Without a GPU the cases run small, as a "
    "rehearsal. Exit status 1 if a goal is missed.",
    "served mixed --write",
)

if __name__ == "__main__":  # Some cases start processes, which import this file.
    app()
