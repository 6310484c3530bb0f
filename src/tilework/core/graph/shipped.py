"""The graph of pipelines that describe none: text is encoded, latents are denoised, and decoded to an image."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib import resources

from tilework.core.graph.graph import Graph


@lru_cache(maxsize=1024)
def latent_diffusion(pipeline: str) -> Graph:
    """Return the graph of a latent diffusion pipeline. Cost tables without graphs describe such pipelines."""
    return _shipped().renamed(pipeline)


@cache
def _shipped() -> Graph:
    text = (resources.files("tilework") / "data" / "graph" / "latent_diffusion.json").read_text("utf-8")
    return Graph.parse("", json.loads(text))
