"""Tilework: serving for diffusion models that keeps each request's deadline."""

from importlib.metadata import version

__version__ = version("tilework")
