"""What is measured on a card, the most valuable first: the one table of `bench/gpu/run.py` and `bench/gpu/quarter.py`.

It imports no case: one that is measured imports what it needs, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suite.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A case by its `name`, and what it `answers`.

    Attributes:
        limit_s: what it may take in a quarter of an hour, with the writing of its model; then it is ended.
        case: MODULE:CLASS, which is made with `settings`.
        packages: without one of them it measures nothing, or less; see `can_do_without`.
        can_do_without: whether it measures what it can without its `packages`.
        num_cards: it needs as many.
        leaves: a folder of this name beside the models is kept with its result.
    """

    name: str
    answers: str
    limit_s: int
    case: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    can_do_without: bool = False
    num_cards: int = 1
    leaves: str = ""

    def make(self, quick: bool) -> Case:
        module, _, kind = self.case.partition(":")
        case: Case = getattr(import_module(module), kind).make(quick, **self.settings)
        return case


PARTS = (
    Part(
        name="start",
        answers="A server: does it start, how soon does it draw, are its pictures stock's, eager and as CUDA graphs",
        limit_s=150,
        case="suite.gpu.start:Start",
    ),
    Part(
        name="exact",
        answers="Tests on a card: the bits of stock in steps split and moved, eager and as CUDA graphs; copies",
        limit_s=180,
        case="suite.gpu.exactness:Exactness",
        settings={"only": ("test_gpu",)},
    ),
    Part(
        name="sdxl",
        answers="Pictures of SDXL through the whole stack, against the stock pipeline on the same GPU",
        limit_s=150,
        case="suite.gpu.served:Served",
        settings={"model": "SDXL", "steps": 30, "rounds": 5},
    ),
    Part(
        name="sd35",
        answers="Pictures of SD3.5-medium through the whole stack, against the stock pipeline on the same GPU",
        limit_s=180,
        case="suite.gpu.served:Served",
        settings={"model": "SD3.5-medium", "steps": 28, "rounds": 3},
    ),
    Part(
        name="flux",
        answers="Pictures of FLUX.1-dev through the whole stack, against the stock pipeline on the same GPU",
        limit_s=260,
        case="suite.gpu.served:Served",
        settings={"model": "FLUX.1-dev", "steps": 28, "rounds": 2},
    ),
    Part(
        name="idle",
        answers="Where the device of a served model idles, and what the host does meanwhile",
        limit_s=100,
        case="suite.gpu.idle:Idle",
    ),
    Part(
        name="live",
        answers="Deadlines kept on one GPU under Poisson arrivals, live and simulated",
        limit_s=170,
        case="suite.gpu.live:LivePolicies",
        settings={"policies": ("tilework",)},
    ),
    Part(
        name="mixed",
        answers="Steps of several sizes in one forward pass, against one by one, on a GPU",
        limit_s=110,
        case="suite.gpu.mixed:MixedSteps",
    ),
    Part(
        name="stitcher",
        answers="Normalisation, SiLU and frames of patches in one pass, against several and a copy",
        limit_s=40,
        case="suite.gpu.stitcher:Stitching",
    ),
    Part(
        name="offloads",
        answers="A server in the setups that offload: does it start, and are its pictures those of stock set up so",
        limit_s=150,
        case="suite.gpu.start:Start",
        settings={"offloads": True},
    ),
    Part(
        name="setups",
        answers="Tests on a card: quantised, offloaded, compiled, other attention against stock; groups; stitcher",
        limit_s=300,
        case="suite.gpu.exactness:Exactness",
        settings={"without": ("test_gpu",)},
        packages=("torchao", "bitsandbytes"),
        can_do_without=True,
    ),
    Part(
        name="schnell",
        answers="Pictures of FLUX.1-schnell in four steps through the whole stack, against the stock pipeline",
        limit_s=240,
        case="suite.gpu.served:Served",
        settings={"model": "FLUX.1-schnell", "steps": 4, "rounds": 5},
    ),
    Part(
        name="loads",
        answers="Weights from the host's copies to a GPU, against copies from pinned memory",
        limit_s=90,
        case="suite.gpu.loads:Loads",
    ),
    Part(
        name="policies",
        answers="Deadlines kept on one GPU by policy, live and simulated",
        limit_s=420,
        case="suite.gpu.live:LivePolicies",
    ),
    Part(
        name="fits",
        answers="Plans of memory against what a GPU takes, and what compilation and attention make of a step",
        limit_s=360,
        case="suite.gpu.fits:Fits",
    ),
    Part(
        name="profile",
        answers="A cost table of this GPU, with rows of batches",
        limit_s=480,
        case="suite.gpu.profiled:Profiled",
        leaves="profiles",
    ),
    Part(
        name="kernels",
        answers="Kernels that save a pass over memory, beside what is used today",
        limit_s=90,
        case="suite.gpu.kernels:Kernels",
    ),
    Part(
        name="quantized",
        answers="Plans of memory with quantised weights",
        limit_s=420,
        case="suite.gpu.fits:FitsQuantized",
        packages=("torchao", "bitsandbytes"),
    ),
    Part(
        name="offloaded",
        answers="Plans of memory with layers that come and go",
        limit_s=260,
        case="suite.gpu.fits:FitsOffloaded",
    ),
    Part(
        name="clips",
        answers="Decodes of clips: memory against the plan, and time against stock",
        limit_s=150,
        case="suite.gpu.clips:ClipDecodes",
    ),
    Part(
        name="cards",
        answers="Several cards: exchanges in groups, changes of a request's degree, stops",
        limit_s=200,
        case="suite.gpu.cards:Cards",
        num_cards=2,
    ),
)
