"""The names of the stages of a latent diffusion pipeline, by which cases choose what they time."""

from __future__ import annotations

STAGES = ENCODE, DIFFUSE, DECODE = "encode", "diffuse", "decode"
