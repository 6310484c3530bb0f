"""The stages of the shipped graph, by which tests name them."""

from __future__ import annotations

from tilework.core.graph.progress import Cursor
from tilework.core.graph.shipped import latent_diffusion
from tilework.core.graph.stage import Stage
from tilework.core.request import Request

STAGES = ENCODE, DIFFUSE, DECODE = "encode", "diffuse", "decode"


def stage_of(pipeline: str, name: str) -> Stage:
    """A stage of a latent diffusion pipeline."""
    return latent_diffusion(pipeline).stage(name)


def at_start(request: Request) -> Cursor:
    """The progress of a request of which nothing is done."""
    return latent_diffusion(request.pipeline).itinerary(request.steps).at[0]
